"""Flower as a child of ``batchmill up``: ``python -m batchmill_ops.flower_process HOME PORT ADDRESS PREFIX``.

Ends by SIGTERM, or when the parent is gone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from batchmill_core.errors import BatchmillError
from batchmill_core.settings import load_settings
from batchmill_workers.parentage import watch_parent

from .flower import Place, run_flower
from .flower_folder import Running
from .flower_login import Login

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Runs Flower; the last line of its log says why it could not."""
    home, port, address, prefix = arguments
    try:
        settings = load_settings(Path(home))
        run_flower(settings, Place(port=int(port), address=address, prefix=prefix), ready=_note)
    except BatchmillError as fault:
        sys.stderr.write(f"{fault}\n")
        return 2
    return 0


def _note(running: Running, _: Login) -> None:
    log.info("flower_ready url=%s", running.url)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    watch_parent()
    sys.exit(main(sys.argv[1:]))
