"""Our own figures on the metrics page, for Prometheus: read from SQL, at most every two seconds, kept in between."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchmill_core.job import JobState
from batchmill_core.request import STATUSES
from batchmill_core.usage import NANO, TOKEN_KINDS
from batchmill_db import gauges
from batchmill_db.gauges import Gauges, Spent
from batchmill_db.jobs import JobRecord
from batchmill_db.samples import DEVICE_FIGURES, ENGINE_FIGURES
from batchmill_db.session import Database, DatabaseError

log = logging.getLogger(__name__)

MAX_AGE_S = 2.0
ENDED_JOBS = 50  # how many of those that have ended keep their figures
_LEDGER_SHARE = 0.05  # of the time may go into summing the ledger, which grows without end
_MONEY = ("settled", "unknown", "wasted", "reserved")
Values = Iterable[tuple[Sequence[str], float]]


@dataclass(frozen=True, slots=True)
class _Read:
    """One reading of everything; the ledger's sums may be older than the rest."""

    gauges: Gauges
    spent: Sequence[Spent]


class MillCollector(Collector):
    """Reads the database when it is asked, in the asking thread. A database that is away gives ``batchmill_up 0``.

    ``queues`` are named even when they hold no work, so that an autoscaler sees a zero and not a gap. Thread-safe.
    """

    def __init__(
        self, database: Database, *, queues: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._queues = tuple(queues)
        self._clock = clock
        self._lock = threading.Lock()
        self._last: _Read | None = None
        self._due = self._ledger_due = float("-inf")
        self._spent: Sequence[Spent] = ()

    def describe(self) -> Iterable[Metric]:
        """Nothing: else the registry would collect once to find the names, before the database is asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            read = self._read()
        yield _gauge("batchmill_up", "Whether the database answers.", (), [((), float(read is not None))])
        if read is not None:
            yield from _of_jobs(read.gauges)
            yield from _of_queues(read.gauges, self._queues)
            yield from _of_calls(read)
            yield from _of_devices(read.gauges)

    def _read(self) -> _Read | None:
        if self._clock() < self._due:
            return self._last
        try:
            now = self._database.read(lambda conn: gauges.read(conn, ended_jobs=ENDED_JOBS))
            self._last = _Read(now, self._ledger())
        except DatabaseError as fault:
            log.warning("metrics_not_read error=%s", fault)
            self._last = None
        self._due = self._clock() + MAX_AGE_S
        return self._last

    def _ledger(self) -> Sequence[Spent]:
        begin = self._clock()
        if begin >= self._ledger_due:
            self._spent = self._database.read(gauges.spent)
            took_s = self._clock() - begin
            self._ledger_due = begin + took_s / _LEDGER_SHARE
        return self._spent


def _gauge(name: str, what: str, labels: Sequence[str], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=labels)
    for found, value in values:
        family.add_metric([str(v) for v in found], value)
    return family


def _counter(name: str, what: str, labels: Sequence[str], values: Values) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=labels)
    for found, value in values:
        family.add_metric([str(v) for v in found], value)
    return family


def _of_jobs(now: Gauges) -> Iterator[Metric]:
    states = {**dict.fromkeys(map(str, JobState), 0), **now.job_states}
    yield _gauge("batchmill_jobs", "Jobs by state.", ("state",), [((s,), n) for s, n in states.items()])
    info = [((j.public_id, j.name, j.model, j.state), 1.0) for j in now.jobs]
    yield _gauge("batchmill_job_info", "Name, model and state of a job.", ("job", "name", "model", "state"), info)
    rows = [((j.public_id, status), float(n)) for j in now.jobs for status, n in _rows(j).items()]
    yield _gauge("batchmill_rows", "Rows of a job by status; waiting ones have none yet.", ("job", "status"), rows)
    budgets = [((j.public_id,), j.budget_nanousd / NANO) for j in now.jobs if j.budget_nanousd is not None]
    yield _gauge("batchmill_job_budget_usd", "What a job may cost.", ("job",), budgets)
    held = [((j.public_id,), j.held_nanousd / NANO) for j in now.jobs if j.budget_nanousd is not None]
    yield _gauge("batchmill_job_held_usd", "Spent, unknown and reserved of a budget.", ("job",), held)


def _rows(job: JobRecord) -> dict[str, int]:
    waiting = max(0, job.n_rows - job.done) if not job.ended else 0
    return {**{s.value: job.by_status.get(s, 0) for s in STATUSES}, "waiting": waiting}


def _of_queues(now: Gauges, known: Iterable[str]) -> Iterator[Metric]:
    workers, slots = Counter[str](), Counter[str]()
    for w in now.workers:
        workers.update(w.queues)
        slots.update(dict.fromkeys(w.queues, w.slots))
    names = sorted({*known, *now.queues, *workers})
    depths = {q: now.queues.get(q, (0, 0)) for q in names}
    chunks = [((q, s), float(n)) for q, d in depths.items() for s, n in zip(("ready", "leased"), d, strict=True)]
    yield _gauge("batchmill_chunks", "Chunks of open jobs to do or being done.", ("queue", "state"), chunks)
    depth = [((q,), float(sum(d))) for q, d in depths.items()]
    yield _gauge("batchmill_queue_depth", "Ready and leased chunks: scale workers by it.", ("queue",), depth)
    yield _gauge("batchmill_workers", "Live worker processes.", ("queue",), [((q,), workers[q]) for q in names])
    yield _gauge(
        "batchmill_slots", "Chunks that live workers take at once.", ("queue",), [((q,), slots[q]) for q in names]
    )
    unfit = Counter(q for w in now.unfit for q in w.queues)
    yield _gauge(
        "batchmill_workers_unfit",
        "Workers that could not start lately.",
        ("queue",),
        [((q,), n) for q, n in unfit.items()],
    )
    yield _gauge(
        "batchmill_account_stopped",
        "Accounts that are stopped for all hosts.",
        ("account",),
        [((a,), 1.0) for a in now.stopped_accounts],
    )


def _of_calls(read: _Read) -> Iterator[Metric]:
    flying = [(key, float(n)) for key, n in sorted(read.gauges.in_flight.items())]
    yield _gauge("batchmill_calls_in_flight", "Calls sent and not yet answered.", ("account", "model"), flying)
    calls = [((s.account, s.model, state), float(n)) for s in read.spent for state, n in sorted(s.calls.items())]
    yield _gauge("batchmill_calls", "Lines of the ledger by state.", ("account", "model", "state"), calls)
    tokens = [((s.account, s.model, kind), float(s.tokens[kind])) for s in read.spent for kind in TOKEN_KINDS]
    yield _counter(
        "batchmill_tokens",
        "Tokens by kind; input has the cached ones, output reasoning.",
        ("account", "model", "kind"),
        tokens,
    )
    money = [((s.account, s.model, kind), getattr(s, kind) / NANO) for s in read.spent for kind in _MONEY]
    yield _gauge(
        "batchmill_cost_usd",
        "Settled; unknown and reserved as upper bounds; wasted of the settled.",
        ("account", "model", "state"),
        money,
    )
    unpriced = [((s.account, s.model), float(s.unpriced_calls)) for s in read.spent]
    yield _gauge(
        "batchmill_calls_unpriced", "Calls whose cost nobody knows, not even a bound.", ("account", "model"), unpriced
    )


def _of_devices(now: Gauges) -> Iterator[Metric]:
    for figure in (*DEVICE_FIGURES, *ENGINE_FIGURES):
        values = [((d.host, d.device), d.figures[figure]) for d in now.devices if figure in d.figures]
        if values:
            yield _gauge(f"batchmill_device_{figure}", "Newest sample of a device.", ("host", "device"), values)
