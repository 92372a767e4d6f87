"""What `batchmill status` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from batchmill_ops.status import Status


def status_table(status: Status) -> Iterator[RenderableType]:
    """The parts in order: what runs, then queues, then workers; nothing where there is nothing."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(status):
        table.add_row(name, value)
    yield table
    if status.queues:
        yield ""
        yield _queues(status)
    if status.workers:
        yield ""
        yield _workers(status)


def _lines(status: Status) -> Iterator[tuple[str, str | Text]]:
    yield "folder", status.home
    yield "stack", _stack(status)
    if status.broker is not None:
        answers = Text("answers", "green") if status.broker_answers else Text("does not answer", "red")
        yield "broker", Text.assemble(status.broker, " · ", answers)
    yield "database", status.database
    if status.database_fault is not None:
        yield "", Text(status.database_fault, "red")
    yield "flower", _flower(status)
    if status.jobs:
        yield "jobs", " · ".join(f"{n:,} {state}" for state, n in sorted(status.jobs.items()))
    for sentence in status.stopped:
        yield "", Text(sentence, "yellow")
    for reason in status.stack.unfit if status.stack else ():
        yield "unfit", Text(reason, "red")


def _stack(status: Status) -> str | Text:
    if not status.embedded:
        return "a broker is configured; workers are started by `batchmill worker`"
    if status.stack is None:
        return Text("nothing runs here; `batchmill up` keeps a stack running", "yellow")
    by = f"kept by `batchmill up` (process {status.up_pid})" if status.up_pid else "while a run needs it"
    users = f"{status.stack.users} user{'' if status.stack.users == 1 else 's'}"
    processes = f"process {status.stack.pid}, broker {status.stack.broker_pid}"
    return Text.assemble(("runs", "green"), f" {by} · {users} · {processes}")


def _flower(status: Status) -> str | Text:
    if status.flower is None:
        return "not running; `batchmill flower` starts it"
    return Text.assemble((status.flower.url, "cyan"), f" · user batchmill · process {status.flower.pid}")


def _queues(status: Status) -> Table:
    table = _table(left=("queue",), right=("ready", "leased", "workers", "slots"))
    for q in status.queues:
        unserved = "red" if q.workers == 0 else ""
        table.add_row(q.queue, f"{q.ready:,}", f"{q.leased:,}", Text(f"{q.workers:,}", unserved), f"{q.slots:,}")
    return table


def _workers(status: Status) -> Table:
    table = _table(left=("worker", "state", "queues"), right=("slots", "in flight", "process"))
    for w in status.workers:
        state = Text(w.state, "green" if w.state == "ready" else "yellow")
        table.add_row(w.name, state, ", ".join(w.queues), f"{w.slots:,}", f"{w.in_flight:,}", str(w.pid))
    return table


def _table(*, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
