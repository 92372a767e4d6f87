"""A job of 100 rows through the embedded stack and a vLLM worker on the processor; ``ops/vllm-check`` runs it.

``python tests/vllm_job.py MODEL_FOLDER`` in an empty folder; exits non-zero when a row is missing or has no answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROWS = 100
CONFIGURATION = """
[models.smollm2]
engine = "vllm"
source = "{folder}"
device_usd_per_hour = 0.05
[models.smollm2.options]
dtype = "float32"
enforce_eager = true
max_num_seqs = 32
max_model_len = 2048
kv_cache_memory_bytes = 1073741824
"""


def main() -> None:
    Path("batchmill.toml").write_text(CONFIGURATION.format(folder=sys.argv[1]))
    with Path("rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"topic": f"number {n}"}) + "\n" for n in range(ROWS))
    options = ["--model", "smollm2", "--prompt", "Write two sentences about {{ topic }}.", "-o", "out.jsonl"]
    sampling = ["--param", "max_tokens=8", "--param", "temperature=0"]
    command = [Path(sys.executable).with_name("batchmill"), "run", "rows.jsonl", *options, *sampling, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        raise SystemExit(f"batchmill run exited with {done.returncode}")
    results = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    wrong = [one for one in results if one["status"] not in {"ok", "truncated"} or not one["output"]]
    if len(results) != ROWS or wrong:
        raise SystemExit(f"{len(results)} of {ROWS} rows, {len(wrong)} without an answer: {wrong[:1]}")
    told = json.loads(done.stdout)
    tokens = sum(one["usage"]["output"] for one in results)
    print(
        f"measured {tokens / told['seconds']:.0f} output tokens/s over {told['seconds']} s, {told['rows_per_s']} rows/s"
    )


if __name__ == "__main__":
    main()
