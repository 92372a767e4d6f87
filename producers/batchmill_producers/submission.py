"""What somebody wants done with a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmill_core.request import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What somebody wants done. ``dataset`` is what `open_source` takes; ``model`` None takes the data set's own.

    ``eager`` opens the job with its first rows, while the others are still being read.
    """

    dataset: Any
    model: str | None = None
    prompt: str | None = None
    system: str | None = None
    messages_column: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    task: TaskKind | None = None
    name: str | None = None
    key: str | None = None
    budget_nanousd: int | None = None
    priority: int = 5
    chunk_size: int | None = None
    id_column: str | None = None
    limit: int | None = None
    encoding: str = "utf-8"
    skip_bad_rows: bool = False
    stream: bool = False
    eager: bool = False

    def identity(self) -> dict[str, Any]:
        """What must be the same for the same key: all that changes what is asked, but neither data nor name."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "system": self.system,
            "messages_column": self.messages_column,
            "params": dict(self.params),
            "schema": self.schema,
            "task": None if self.task is None else self.task.value,
            "id_column": self.id_column,
            "limit": self.limit,
            "encoding": self.encoding,
            "skip_bad_rows": self.skip_bad_rows,
            "stream": self.stream,
        }
