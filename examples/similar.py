"""Finds the reviews that are most like a question, by vectors that are stored as a job's results.

    python examples/similar.py "the zip burst and it came broken"

Run it twice: the job has a key, so that the second run asks for the vector of the question alone.
"""

from __future__ import annotations

import sys
from math import sqrt

from practice import REVIEWS, practice

import batchmill

MODEL = "sim-embed"  # or "text-embedding-3-small", with OPENAI_API_KEY set: this line is all there is to change


def vectors(rows, **options):
    """The rows' results; embeddings are saved like any answer, so that they are asked for once."""
    shape = {"dimensions": 512}
    job = batchmill.submit(rows, model=MODEL, task="embed", prompt="{{ text }}", params=shape, **options)
    return list(job.wait().results(status="ok"))


def likeness(a, b):
    """Cosine of the angle between two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / sqrt(sum(x * x for x in a) * sum(y * y for y in b))


if __name__ == "__main__":
    question = " ".join(sys.argv[1:]) or "the zip burst and it came broken"
    with practice():
        stored = vectors(REVIEWS, key=f"reviews by {MODEL}", name="vectors")
        [asked] = vectors([{"text": question}], name="question")
        nearest = sorted(stored, key=lambda r: likeness(asked.output, r.output), reverse=True)
        print(f"{len(stored)} vectors of {len(asked.output)} dimensions; nearest to {question!r}:")
        for result in nearest[:5]:
            print(f"{likeness(asked.output, result.output):.2f}  {' '.join(result.input['text'].split())[:90]}")
