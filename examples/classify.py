"""Labels reviews, with a schema that every answer has to keep: an answer is data, or the row says why it is not.

python examples/classify.py
"""

from __future__ import annotations

from collections import Counter

from practice import REVIEWS, practice

import batchmill

MODEL = "sim-chat"  # or "gpt-4.1-mini", with OPENAI_API_KEY set: this line is all there is to change

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "enum": ["positive", "negative", "neutral"]},
        "about": {"type": "string", "enum": ["quality", "price", "delivery", "support", "other"]},
    },
    "required": ["label", "about"],
    "additionalProperties": False,
}

if __name__ == "__main__":
    with practice():
        job = batchmill.submit(
            REVIEWS,
            model=MODEL,
            prompt="How does this customer feel, and about what? Answer in JSON. Review: {{ text }}",
            schema=SCHEMA,
            params={"max_tokens": 60, "temperature": 0},
            limit=60,
            budget_usd=1,
            name="classify",
        )
        job.wait(progress=True)
        pairs = [(r.output["label"], r.input["stars"]) for r in job.results(status="ok")]
        print(f"{len(pairs)} of 60 reviews keep the schema, for ${job.cost().settled}")
        for label, count in Counter(label for label, _ in pairs).most_common():
            stars = [s for named, s in pairs if named == label]
            print(f"{label:<9}{count:>4}   {sum(stars) / len(stars):.1f} stars on average")
        for result in job.results(status="invalid"):
            print(f"row {result.row}: {result.error}")
