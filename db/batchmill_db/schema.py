"""The tables. Amounts are integer nano-USD, times are integer milliseconds since 1970 (UTC) by the database's clock."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from batchmill_core.request import STATUSES
from batchmill_core.usage import TOKEN_KINDS

SCHEMA_VERSION = "0001"

metadata = MetaData()

# SQLite makes only a column of type INTEGER the row id.
Big = BigInteger().with_variant(Integer(), "sqlite")


def _count(name: str) -> Column[int]:
    return Column(name, Big, nullable=False, server_default=text("0"))


STATUS_COLUMNS = tuple(f"n_{s.value}" for s in STATUSES)
TOKEN_COLUMNS = tuple(f"{k}_tokens" for k in TOKEN_KINDS)
MONEY_COLUMNS = ("cost_nanousd", "unknown_nanousd", "wasted_nanousd")
COUNTER_COLUMNS = (*STATUS_COLUMNS, *TOKEN_COLUMNS, *MONEY_COLUMNS, "calls", "unknown_calls")


def _counters() -> list[Column[int]]:
    return [_count(c) for c in COUNTER_COLUMNS]


def _partial(name: str, *columns: Any, where: str) -> None:
    """An index of the few rows that a hot query looks for. The query has to say ``where`` in literals to be served."""
    Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


job = Table(
    "job",
    metadata,
    Column("id", Big, primary_key=True, autoincrement=True),
    Column("public_id", Text, nullable=False, unique=True),
    Column("key", Text, unique=True),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason_kind", Text),  # user, budget, unknown_model, account, source
    Column("reason", Text),
    Column("reason_account", Text),
    Column("loaded", Boolean, nullable=False, server_default=text("false")),
    Column("contract", Integer, nullable=False),
    Column("task", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("source", Text),
    Column("round", Integer, nullable=False, server_default=text("1")),
    Column("priority", Integer, nullable=False, server_default=text("5")),  # 0 goes first
    Column("deadline_ms", Big),
    Column("n_rows", Big, nullable=False, server_default=text("0")),
    Column("n_skipped", Big, nullable=False, server_default=text("0")),
    Column("skipped", Text),  # JSON: the first bad lines with their reasons
    Column("columns", Text),  # JSON: names of the data set's columns
    Column("submission", Text),  # JSON: what submit was given; the same key must give the same
    Column("budget_nanousd", Big),
    Column("held_nanousd", Big, nullable=False, server_default=text("0")),  # settled + unknown + reserved
    *_counters(),
    Column("created_ms", Big, nullable=False),
    Column("opened_ms", Big),
    Column("first_claim_ms", Big),
    Column("last_save_ms", Big),
    Column("finished_ms", Big),
    sqlite_autoincrement=True,  # an id is never used again, since the ledger outlives the job
)
Index("job_by_state", job.c.state)

round_ = Table(
    "round",
    metadata,
    Column("job_id", Big, ForeignKey("job.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("spec", Text, nullable=False),  # JSON of core.job.Spec, frozen
    Column("statuses", Text),  # the statuses that a retry picked, comma separated
    Column("created_ms", Big, nullable=False),
)

payload = Table(
    "payload",
    metadata,
    Column("job_id", Big, primary_key=True),
    Column("first_row", Big, primary_key=True),
    Column("n_rows", Integer, nullable=False),
    Column("requests", LargeBinary, nullable=False),  # zstd of one JSON line per row
    Column("inputs", LargeBinary, nullable=False),  # zstd of one JSON line per row
    Column("digest", Text, nullable=False),  # of both, uncompressed
)

chunk = Table(
    "chunk",
    metadata,
    Column("id", Big, primary_key=True, autoincrement=True),
    Column("job_id", Big, ForeignKey("job.id"), nullable=False),
    Column("parent_id", Big),
    Column("parent_fence", Integer),
    Column("rows", Text, nullable=False),  # row numbers, such as 0-99,105
    Column("first_row", Big, nullable=False),
    Column("n_rows", Integer, nullable=False),
    Column("queue", Text, nullable=False),
    Column("step", Integer, nullable=False, server_default=text("0")),
    Column("round", Integer, nullable=False, server_default=text("1")),
    Column("contract", Integer, nullable=False),
    Column("priority", Integer, nullable=False, server_default=text("5")),
    Column("state", Text, nullable=False),
    Column("not_before_ms", Big, nullable=False, server_default=text("0")),
    Column("published_ms", Big),
    Column("fence", Integer, nullable=False, server_default=text("0")),
    Column("save_seq", Integer, nullable=False, server_default=text("0")),
    Column("done_fence", Integer),
    Column("lease_owner", Text),
    Column("lease_until_ms", Big),
    Column("crash_count", Integer, nullable=False, server_default=text("0")),
    Column("fail_count", Integer, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    *_counters(),
    Column("unsummed_since_ms", Big),  # when its counters first moved after they were last added to the job's
    Column("summed", Text),  # JSON: its counters as they were last added to the job's
    Column("created_ms", Big, nullable=False),
    Column("first_claim_ms", Big),
    Column("last_save_ms", Big),
    UniqueConstraint(
        "parent_id", "parent_fence", "step", "queue", "not_before_ms", "first_row", name="chunk_derived_once"
    ),
    sqlite_autoincrement=True,  # an id is never used again, since it is a part of the ledger's key
)
# A job's publishable chunks of a queue in the order they go. It starts with the job, so that those of a paused job are
# not stepped over at every tick.
_partial(
    "chunk_ready",
    chunk.c.job_id,
    chunk.c.queue,
    chunk.c.priority,
    chunk.c.id,
    chunk.c.not_before_ms,
    where="state = 'ready'",
)
_partial("chunk_rung", chunk.c.queue, chunk.c.published_ms, where="state = 'ready' AND published_ms IS NOT NULL")
_partial(
    "chunk_derived",
    chunk.c.job_id,
    chunk.c.step,
    chunk.c.round,
    chunk.c.queue,
    where="state = 'ready' AND parent_id IS NOT NULL",
)
_partial("chunk_leased", chunk.c.lease_until_ms, where="state = 'leased'")
_partial("chunk_unsummed", chunk.c.unsummed_since_ms, where="unsummed_since_ms IS NOT NULL")
Index("chunk_of_job", chunk.c.job_id, chunk.c.state)

result = Table(
    "result",
    metadata,
    Column("job_id", Big, primary_key=True),
    Column("row", Big, primary_key=True),
    Column("round", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("output", Text),  # the answer; JSON text when the job has a schema
    Column("embedding", LargeBinary),  # float32, little-endian
    Column("finish_reason", Text),
    Column("error_kind", Text),
    Column("error", Text),
    Column("raw", Text),  # start of the last unusable answer
    Column("model", Text),
    Column("account", Text),
    *[Column(c, Big) for c in TOKEN_COLUMNS],
    Column("cost_nanousd", Big),  # settled sum of all the row's calls
    Column("unknown_nanousd", Big),  # upper bound of the row's unknown calls
    Column("calls", Integer, nullable=False, server_default=text("0")),
    Column("cached", Boolean, nullable=False, server_default=text("false")),
    Column("sanitized", Boolean, nullable=False, server_default=text("false")),
    Column("latency_ms", Integer),
    Column("ttft_ms", Integer),
    Column("chunk_id", Big, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("saved_ms", Big, nullable=False),
    sqlite_with_rowid=False,
)
# Without those that are ok, so that it costs the usual row nothing.
_partial("result_not_ok", result.c.job_id, result.c.status, result.c.error_kind, where="status <> 'ok'")

call = Table(
    "call",
    metadata,
    Column("chunk_id", Big, primary_key=True),
    Column("fence", Integer, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("job_id", Big, nullable=False),
    Column("round", Integer, nullable=False),
    Column("first_row", Big, nullable=False),
    Column("last_row", Big, nullable=False),
    Column("rows", Text),  # the row numbers, when the call covers more than one
    Column("state", Text, nullable=False),  # reserved, settled, void, unknown
    Column("account", Text),
    Column("model", Text, nullable=False),
    Column("worker", Text, nullable=False),
    *[Column(c, Big) for c in TOKEN_COLUMNS],
    Column("bound_nanousd", Big),  # the most it can cost; NULL without a price
    Column("cost_nanousd", Big),
    Column("device_ns", Big),
    Column("price_version", Text),
    Column("wasted", Boolean, nullable=False, server_default=text("false")),  # its answer was not used
    Column("error_kind", Text),
    Column("http_status", Integer),
    Column("request_id", Text),
    Column("latency_ms", Integer),
    Column("reserved_ms", Big, nullable=False),
    Column("settled_ms", Big),
    sqlite_with_rowid=False,
)
Index("call_by_row", call.c.job_id, call.c.first_row)
_partial("call_of_many_rows", call.c.job_id, call.c.first_row, call.c.last_row, where="rows IS NOT NULL")
_partial("call_reserved", call.c.job_id, where="state = 'reserved'")

account = Table(
    "account",
    metadata,
    Column("name", Text, primary_key=True),
    Column("state", Text, nullable=False),  # ok, stopped
    Column("reason_kind", Text),
    Column("reason", Text),
    Column("probe_at_ms", Big),
    Column("probes", Integer, nullable=False, server_default=text("0")),
    Column("changed_ms", Big, nullable=False),
)

worker = Table(
    "worker",
    metadata,
    Column("id", Text, primary_key=True),  # a new one for each start of a process
    Column("name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("wing", Text, nullable=False),
    Column("queues", Text, nullable=False),  # comma separated, with one at each end
    Column("device", Text),
    Column("slots", Integer, nullable=False),
    Column("state", Text, nullable=False),  # starting, ready, draining, unfit, gone
    Column("reason", Text),
    Column("in_flight", Integer, nullable=False, server_default=text("0")),
    Column("capacity", Integer, nullable=False, server_default=text("0")),
    Column("throttled", Text),  # why it waits just now, for people
    Column("version", Text, nullable=False),
    Column("load_ms", Integer),
    Column("started_ms", Big, nullable=False),
    Column("beat_ms", Big, nullable=False),
)

leader = Table(
    "leader",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("until_ms", Big, nullable=False),
    Column("tick_ms", Big, nullable=False),
)

device_sample = Table(
    "device_sample",
    metadata,
    Column("id", Big, primary_key=True, autoincrement=True),
    Column("at_ms", Big, nullable=False),
    Column("host", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("worker", Text),
    Column("model", Text),
    Column("use_percent", Float),
    Column("memory_used_bytes", Big),
    Column("memory_total_bytes", Big),
    Column("power_w", Float),
    Column("temperature_c", Float),
    Column("clock_mhz", Integer),
    Column("running", Integer),
    Column("waiting", Integer),
    Column("kv_cache_percent", Float),
    Column("batch_rows", Float),
    Column("tokens_per_s", Float),
    Column("bubble_ms", Integer),
    Column("throttle", Text),
)
Index("device_sample_at", device_sample.c.at_ms)

batch_size = Table(
    "batch_size",
    metadata,
    Column("model", Text, primary_key=True),
    Column("device", Text, primary_key=True),
    Column("length_class", Integer, primary_key=True),
    Column("rows", Integer, nullable=False),
    Column("changed_ms", Big, nullable=False),
)
