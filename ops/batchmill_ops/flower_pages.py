"""How Flower's pages look with us: a task by its rows and words, its id short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tornado.template import Loader, Template

COLUMNS = "args,state,result,runtime,worker,received,uuid"
HEADERS = {"args": "Rows"}
_STYLE = """<style>
#tasks-table .task-uuid-full { display: none }
#tasks-table .task-uuid-short { display: inline }
#tasks-table > tbody > tr > td { border-color: var(--bs-border-color) }
</style>"""


class Pages(Loader):
    """Flower's templates, with a style of ours at the end of every page's head."""

    def _create_template(self, name: str) -> Template:
        text = Path(self.root, name).read_text(encoding="utf-8")
        if name == "base.html":  # the others extend it
            text = text.replace("</head>", f"{_STYLE}</head>")
        return Template(text, name=name, loader=self)


def readable(task: Any) -> Any:
    """A task, Flower's copy of it, as the pages show it: texts without the quotes that Celery puts around them."""
    for name in ("args", "result"):
        value = getattr(task, name, None)
        if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            setattr(task, name, value[1:-1])
    if task.kwargs == "{}":
        task.kwargs = ""
    return task
