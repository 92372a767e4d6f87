"""Statements about batch sizes: how many rows of a length a kind of device took at once for a model."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select

from .bulk import insert_for
from .schema import batch_size
from .session import now_ms


def load(conn: Connection, model: str, device: str) -> dict[int, int]:
    """Rows by length class (class ``c``: at most ``2**c`` tokens) that worked for a model on this kind of device."""
    c = batch_size.c
    found = conn.execute(select(c.length_class, c.rows).where(c.model == model, c.device == device))
    return {row.length_class: row.rows for row in found}


def remember(conn: Connection, model: str, device: str, sizes: Mapping[int, int]) -> None:
    """Notes sizes that work; what is known of other classes stays. Idempotent, the last writer of a class wins."""
    insert_ = insert_for(conn.dialect.name)
    # In one order, so that two workers of a model never wait for each other crosswise.
    for length_class, rows in sorted(sizes.items()):
        values = {"model": model, "device": device, "length_class": length_class, "rows": rows, "changed_ms": now_ms()}
        statement = insert_(batch_size).values(values)
        changed = {"rows": statement.excluded.rows, "changed_ms": statement.excluded.changed_ms}
        key = [batch_size.c.model, batch_size.c.device, batch_size.c.length_class]
        conn.execute(
            statement.on_conflict_do_update(
                index_elements=key, set_=changed, where=batch_size.c.rows != statement.excluded.rows
            )
        )
