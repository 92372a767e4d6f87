"""The examples that `--help` of each command ends with. A test reads every line of them with the commands themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape

EXAMPLES: Mapping[str, Sequence[str]] = {
    "run": (
        "batchmill run reviews.jsonl -m gpt-4.1-mini -p 'Label: {{ text }}' -o out.csv",
        "batchmill run reviews.parquet -m sim-chat -p 'Label: {{ text }}' \\\n    --param max_tokens=8 --budget 5 -o labels.parquet",
        "batchmill run texts.csv -m sim-embed --task embed -o vectors.parquet",
        "batchmill run batch.jsonl -o answers.jsonl --format openai",
        "batchmill run job.toml --limit 10",
    ),
    "submit": (
        "batchmill submit texts.csv -m sim-chat -p 'Label: {{ text }}' --name labels",
        "batchmill submit 's3://bucket/*.parquet' -m sim-chat --prompt-file ask.txt",
        "job=$(batchmill submit job.toml) && batchmill watch $job",
    ),
    "estimate": (
        "batchmill estimate reviews.jsonl -m gpt-4.1-mini -p 'Label: {{ text }}' \\\n    --param max_tokens=8",
        "batchmill estimate job.toml --json",
    ),
    "watch": ("batchmill watch", "batchmill watch labels", "batchmill watch labels --give-up-after 10m"),
    "jobs": ("batchmill jobs", "batchmill jobs --json | jq -r '.[] | select(.state == \"paused\") | .job_id'"),
    "show": ("batchmill show labels", "batchmill show labels --json | jq .cost_usd"),
    "results": (
        "batchmill results labels -o labels.csv --columns id,output --excel-safe",
        "batchmill results labels --status failed,invalid | head",
        "batchmill results labels -o answers.jsonl --format openai",
    ),
    "costs": ("batchmill costs", "batchmill costs --by day --json"),
    "pause": ("batchmill pause labels",),
    "resume": ("batchmill resume labels", "batchmill resume labels --budget 20 --wait"),
    "cancel": ("batchmill cancel labels",),
    "retry": (
        "batchmill retry labels",
        "batchmill retry labels --status failed,invalid \\\n    -m gpt-4.1 --param temperature=0",
    ),
    "rm": ("batchmill rm labels",),
    "up": ("batchmill up", "batchmill up --port 6380 --flower-port 8080", "batchmill up --no-flower"),
    "down": ("batchmill down",),
    "status": ("batchmill status", "batchmill status --json | jq .queues"),
    "flower": ("batchmill flower", "batchmill flower --port 8080 --address 0.0.0.0 --url-prefix flower"),
    "worker api": ("batchmill worker api", "batchmill worker api --accounts openai,deepseek --processes 2"),
    "worker gpu": ("batchmill worker gpu -m smollm2 --devices cpu", "batchmill worker gpu -m llama --devices 0,1"),
    "simulate": (
        "batchmill simulate --port 8765",
        "batchmill simulate --port 8765 --latency 200ms --rpm 600 \\\n    --fail 429:0.05,500:0.01",
    ),
    "doctor": ("batchmill doctor", "batchmill doctor --json", "batchmill doctor --verify labels"),
    "db upgrade": ("batchmill db upgrade",),
}


def examples(command: str) -> str:
    """What stands below the help of a command; markup in it is shown as it stands."""
    word = "Examples" if len(EXAMPLES[command]) > 1 else "Example"
    return escape(f"{word}:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command]))
