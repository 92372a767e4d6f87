"""Submitting and exporting: rows per second, and peak memory at 100,000 and 1,000,000 rows.

Each run is a process of its own, so that its peak memory is its own. ``python tests/benchmarks/bench_producers.py``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import insert

from batchmill_core.job import JobState
from batchmill_core.settings import load_settings
from batchmill_db import jobs, migrate
from batchmill_db.schema import job as job_table
from batchmill_db.schema import result
from batchmill_db.session import Database
from batchmill_producers.export import write_results
from batchmill_producers.submit import Submission, submit

TOML = """
[accounts.sim]
base_url = "http://127.0.0.1:9/v1"
[models.sim-chat]
account = "sim"
price = { input = 0.40, output = 1.60 }
"""
ROW_BYTES = 300


def write_rows(path: Path, rows: int) -> None:
    filler = "great product, I love it and use it every day. " * 10
    with path.open("w") as out:
        for n in range(rows):
            head = f'{{"id": "r{n:07d}", "text": "'
            out.write(head + filler[: ROW_BYTES - len(head) - 3] + '"}\n')


def submit_once(home: Path) -> None:
    settings = load_settings(home, {})
    database = Database(settings.database_address)
    migrate.upgrade(database)
    started = time.perf_counter()
    wanted = Submission(
        dataset=str(home / "rows.jsonl"),
        model="sim-chat",
        prompt="Label: {{ text }}",
        id_column="id",
        params={"max_tokens": 5},
    )
    job = submit(database, settings, wanted)
    seconds = time.perf_counter() - started
    print(json.dumps({"rows": job.n_rows, "seconds": seconds, "peak_mb": _peak_mb()}))


def export_once(home: Path) -> None:
    settings = load_settings(home, {})
    database = Database(settings.database_address)
    with database.reading() as conn:
        job = jobs.newest(conn)[0]
    started = time.perf_counter()
    with (home / "out.jsonl").open("wb") as out:
        rows = write_results(database, job.id, out)
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - started, "peak_mb": _peak_mb()}))


def answer_all(home: Path) -> None:
    """Puts a result for every row into the database, as workers would have left them."""
    database = Database(load_settings(home, {}).database_address)
    with database.reading() as conn:
        job = jobs.newest(conn)[0]
    for first in range(0, job.n_rows, 20_000):
        values = [_result(job.id, n) for n in range(first, min(first + 20_000, job.n_rows))]
        with database.transaction() as conn:
            conn.execute(insert(result), values)
    with database.transaction() as conn:
        conn.execute(job_table.update().values(state=JobState.DONE.value))


def _result(job_id: int, row: int) -> dict[str, object]:
    return {
        "job_id": job_id,
        "row": row,
        "round": 1,
        "status": "ok",
        "output": "positive",
        "finish_reason": "stop",
        "model": "sim-chat",
        "account": "sim",
        "input_tokens": 80,
        "cached_input_tokens": 0,
        "cache_write_tokens": 0,
        "output_tokens": 2,
        "reasoning_tokens": 0,
        "cost_nanousd": 35_200,
        "calls": 1,
        "latency_ms": 101,
        "chunk_id": 1,
        "fence": 1,
        "saved_ms": 1,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _child(step: str, home: Path) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, __file__, "--step", step, "--home", str(home)], check=True, stdout=subprocess.PIPE
    )
    figures: dict[str, float] = json.loads(ran.stdout) if ran.stdout else {}
    return figures


def report(sizes: tuple[int, ...]) -> None:
    peaks: dict[str, list[float]] = {"submit": [], "export": []}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            (home / "batchmill.toml").write_text(TOML)
            (home / ".batchmill").mkdir()
            write_rows(home / "rows.jsonl", rows)
            for step in ("submit", "answer", "export"):
                figures = _child(step, home)
                if figures:
                    assert figures["rows"] == rows, f"{step}: {figures['rows']} of {rows} rows"
                    peaks[step].append(figures["peak_mb"])
                    rate = rows / figures["seconds"]
                    print(
                        f"{step} {rows:>9,} rows: {rate:>8,.0f} rows/s, peak memory {figures['peak_mb']:.0f} MB",
                        flush=True,
                    )
    for step, found in peaks.items():
        print(f"{step}: peak memory at {sizes[-1]:,} rows is {found[-1] / found[0]:.2f} times that at {sizes[0]:,}")


def test_rows_per_second_of_producers() -> None:
    report((100_000, 1_000_000))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--step", choices=("submit", "answer", "export"))
    parser.add_argument("--home", type=Path)
    arguments = parser.parse_args()
    if arguments.step is None:
        report(tuple(arguments.rows))
    else:
        {"submit": submit_once, "answer": answer_all, "export": export_once}[arguments.step](arguments.home)
