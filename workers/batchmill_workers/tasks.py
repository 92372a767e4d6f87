"""What `celery -A batchmill_workers.tasks worker` runs: the application and its one task."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from celery import signals
from celery.exceptions import SecurityWarning
from celery.worker import state

from batchmill_core.broker import RUN_CHUNK, make_celery
from batchmill_core.errors import BatchmillError
from batchmill_core.settings import load_settings
from batchmill_db.session import DatabaseUnavailable

from . import messages
from .lifecycle import WorkerProcess
from .parentage import DOWN_EXIT_CODE, SLOTS_VARIABLE, UNFIT_EXIT_CODE, exit_with, watch_parent

# Celery warns root of pickle; messages here are JSON and hold one number.
warnings.filterwarnings("ignore", category=SecurityWarning)

log = logging.getLogger(__name__)
messages.install()
settings = load_settings()
app = make_celery(settings)
_process: list[WorkerProcess] = []


@app.task(name=RUN_CHUNK)
def run_chunk(chunk_id: int) -> str:
    """Answers the rows of one chunk. The message is a doorbell: SQL decides whether there is something to do."""
    return _process[0].run_chunk(chunk_id)


@signals.setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("kombu", "celery.worker.strategy", "celery.app.trace", "celery.bootsteps"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@signals.celeryd_after_setup.connect
def _start(sender: str, instance: Any, **_: Any) -> None:
    process = WorkerProcess(
        settings,
        app,
        name=sender,
        queues=sorted(instance.app.amqp.queues.consume_from),
        slots=int(os.environ.get(SLOTS_VARIABLE) or instance.concurrency),
        threads=instance.concurrency,
        leave=_leave,
        on_slots=lambda count: setattr(instance, "max_concurrency", count),
    )
    # The name that Celery's autoscaler has for how many messages to take at once, see celery.worker.consumer.tasks.
    instance.max_concurrency = process.slots
    try:
        process.start()
    except DatabaseUnavailable as fault:
        exit_with(DOWN_EXIT_CODE, fault)
    except BatchmillError as fault:
        exit_with(UNFIT_EXIT_CODE, fault)
    except BaseException as fault:
        # Celery would log it and take messages all the same, with nobody to run them.
        log.exception("worker_not_started")
        exit_with(DOWN_EXIT_CODE, fault)
    _process.append(process)
    watch_parent()


def _leave(code: int) -> None:
    """Makes Celery shut down as after SIGTERM: it takes no more messages, waits for its tasks, and exits with ``code``."""
    state.should_stop = code  # type: ignore[assignment]  # celery-types has the type of its first value


@signals.worker_shutting_down.connect
def _drain(**_: Any) -> None:
    for process in _process:
        process.drain()


@signals.worker_shutdown.connect
def _stop(**_: Any) -> None:
    for process in _process:
        process.stop()
