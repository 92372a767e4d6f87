"""A claimed chunk with all that SQL knows of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchmill_core.request import RowStatus
from batchmill_db import chunks, past_calls, payload_store, saved_results
from batchmill_db.chunks import Claim
from batchmill_db.past_calls import Past
from batchmill_db.session import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A claimed chunk with all that SQL knows of its rows."""

    claim: Claim
    frames: Sequence[tuple[int, int, bytes]]
    finished: set[int]
    past: Mapping[int, Past]
    replaced: Mapping[int, RowStatus]


def claim_and_load(conn: Connection, chunk_id: int, worker_id: str, lease_ms: int) -> Loaded | None:
    """Claims a chunk and reads what its rows need; None when it is not to be had."""
    claim = chunks.claim(conn, chunk_id, worker_id, lease_ms=lease_ms)
    if claim is None:
        return None
    fresh = claim.fresh
    return Loaded(
        claim=claim,
        frames=payload_store.requests_of(conn, claim.job_id, claim.rows),
        finished=set() if fresh else saved_results.finished(conn, claim.job_id, claim.rows, claim.round),
        past={} if fresh else past_calls.past_of(conn, claim.job_id, claim.rows, claim.round),
        replaced={} if claim.round == 1 else saved_results.earlier(conn, claim.job_id, claim.rows, claim.round),
    )
