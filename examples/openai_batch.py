"""Runs a file made for OpenAI's batch endpoint, on any model, and writes the file that endpoint would have answered.

    python examples/openai_batch.py

Each line may name a model of its own; --model overrides them all.
"""

from __future__ import annotations

import json
import subprocess
import sys

from practice import HERE, practice

MODEL = "sim-chat"  # or None, with OPENAI_API_KEY set: then each line is asked of the model it names
REQUESTS, ANSWERS = "openai_batch.jsonl", "openai_batch.out.jsonl"

if __name__ == "__main__":
    run = ["batchmill", "run", REQUESTS, "-o", ANSWERS, "--format", "openai", *(["--model", MODEL] if MODEL else [])]
    print(" ".join(run))
    with practice():
        subprocess.run([sys.executable, "-m", "batchmill.cli", *run[1:]], cwd=HERE, check=True)
    for line in (HERE / ANSWERS).read_text().splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
