"""What users say, as texts and numbers, as values: submissions, amounts, statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter
from typing import Annotated, Any, Literal, TypedDict

from typer import Option

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import nanousd
from batchmill_producers.submit import Submission

from .completing import model_names

PANEL_ASK, _READ, _JOB = "What is asked", "How the data set is read", "The job"


class Options(TypedDict, total=False):
    """What a data set is submitted with: the one list, for Python and the command line, in the order of its help.

    Defaults are those of `Submission`. What has another form as text says so in `batchmill.options`.
    """

    # fmt: off
    model: Annotated[str | None, Option("--model", "-m", metavar="M", help="A model of batchmill.toml.", autocompletion=model_names, rich_help_panel=PANEL_ASK)]
    prompt: Annotated[str | None, Option("--prompt", "-p", metavar="T", help="A template: 'Label: {{ text }}' takes the column text.", rich_help_panel=PANEL_ASK)]
    system: Annotated[str | None, Option("--system", "-s", metavar="T", help="A template for the system message.", rich_help_panel=PANEL_ASK)]
    messages_column: Annotated[str | None, Option("--messages-column", metavar="C", help="A column that holds chat messages.", rich_help_panel=PANEL_ASK)]
    params: Annotated[Mapping[str, Any] | None, Option("--param", metavar="K=V", help="A sampling parameter, such as max_tokens=64. Repeatable.", rich_help_panel=PANEL_ASK)]
    schema: Annotated[Mapping[str, Any] | None, Option("--schema", metavar="FILE", help="A JSON schema that every answer has to keep.", rich_help_panel=PANEL_ASK)]
    task: Annotated[Literal["chat", "embed", "classify"] | None, Option("--task", help="Chat (the default), embeddings or classification by a model's own labels.", rich_help_panel=PANEL_ASK)]
    stream: Annotated[bool, Option("--stream", help="Let the provider stream answers; tells the time to the first token.", rich_help_panel=PANEL_ASK)]
    id_column: Annotated[str | None, Option("--id-column", metavar="C", help="A column that names each row; its values must differ.", rich_help_panel=_READ)]
    limit: Annotated[int | None, Option("--limit", metavar="N", help="Take the first N rows only.", rich_help_panel=_READ)]
    encoding: Annotated[str, Option("--encoding", help="Of text files.", rich_help_panel=_READ)]
    skip_bad_rows: Annotated[bool, Option("--skip-bad-rows", help="Leave bad rows out, instead of refusing the data set.", rich_help_panel=_READ)]
    eager: Annotated[bool, Option("--eager", help="Begin while the data set is still being read; a fault in it then pauses the job.", rich_help_panel=_READ)]
    name: Annotated[str | None, Option("--name", help="Name of the job; by default the data set's.", rich_help_panel=_JOB)]
    key: Annotated[str | None, Option("--key", metavar="K", help="Same key, same job: run it again and nothing is done twice.", rich_help_panel=_JOB)]
    budget_usd: Annotated[float | str | None, Option("--budget", metavar="USD", help="Pause before more than this is spent.", rich_help_panel=_JOB)]
    priority: Annotated[int, Option("--priority", min=0, max=9, help="0 goes first.", rich_help_panel=_JOB)]
    chunk_size: Annotated[int | None, Option("--chunk-size", metavar="N", min=1, help="Rows per chunk; by default 5 to 10 s of work.", rich_help_panel=_JOB)]
    # fmt: on


def parameters(hints: Mapping[str, Any]) -> list[Parameter]:
    """These options as keyword-only parameters of a function, with the defaults of `Submission`."""
    defaults = {f.name: f.default for f in fields(Submission) if f.default is not MISSING}
    defaults["dataset"] = Parameter.empty
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint, default=defaults.get(name))
        for name, hint in hints.items()
    ]


def make_submission(
    dataset: Any, *, budget_usd: float | str | None = None, task: str | None = None, **options: Any
) -> Submission:
    """A Submission from `Options`. Raises ConfigurationError for an amount or task that is none."""
    if options.get("params") is None:
        options["params"] = {}
    return Submission(
        dataset=dataset,
        budget_nanousd=None if budget_usd is None else parse_budget(budget_usd),
        task=None if task is None else _task(task),
        **options,
    )


def statuses_of(status: str | Iterable[str] | None) -> list[RowStatus] | None:
    """Row statuses by name, from ``"failed,invalid"`` or several names. Raises ConfigurationError for an unknown one."""
    if status is None:
        return None
    names = [n.strip() for text in ([status] if isinstance(status, str) else status) for n in str(text).split(",")]
    unknown = [n for n in names if n and n not in set(RowStatus)]
    if unknown:
        raise ConfigurationError(
            f"there is no status {unknown[0]!r}{nearest(unknown[0], [s.value for s in RowStatus])}"
        )
    return [RowStatus(n) for n in names if n]


def parse_budget(amount: float | str) -> int:
    """Nano-USD of an amount of USD. Raises ConfigurationError."""
    try:
        return nanousd(amount)
    except ValueError as fault:
        raise ConfigurationError(f"the budget {fault}; write USD, such as 5 or 0.50") from None


def _task(task: str) -> TaskKind:
    try:
        return TaskKind(task)
    except ValueError:
        raise ConfigurationError(f"task {task!r} is not known; there are chat, embed and classify") from None
