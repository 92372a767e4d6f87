"""The options that `run`, `submit` and `estimate` share, and how their texts become a Submission."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from batchmill_core.errors import ConfigurationError
from batchmill_producers.submit import Submission

from .asked import PANEL_ASK, Options, make_submission, parameters
from .completing import job_references
from .job_file import is_job_file, with_job_file

DATA_PANEL = "Data sets through models"  # the part of `--help` for what takes a data set
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Its id, its key, or its name (the newest of it).", autocompletion=job_references
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
ParamOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="K=V", help="A sampling parameter, such as max_tokens=64. Repeatable."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="USD", help="Pause before more than this is spent.")
]
GiveUpOption = Annotated[
    str | None,
    typer.Option(
        "--give-up-after",
        metavar="T",
        help="End with 3 after so long without a live worker, as 30s or 10m; by default it waits for one.",
    ),
]
ExcelSafeOption = Annotated[
    bool,
    typer.Option("--excel-safe", help="In CSV, put an apostrophe before text that a spreadsheet takes for a formula."),
]
DatasetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        help="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder, a 'pattern/*.csv' or a URL; - reads JSONL "
        "from stdin; a job.toml holds it with its options.",
    ),
]
PromptFileOption = Annotated[
    Path | None,
    typer.Option("--prompt-file", metavar="FILE", help="The template, from a file.", rich_help_panel=PANEL_ASK),
]


def _hints() -> dict[str, Any]:
    """The options by their names on the command line, in its order, typed as texts can be."""
    hints: dict[str, Any] = {"dataset": DatasetArgument}
    for name, hint in get_type_hints(Options, include_extras=True).items():
        shown, kind = _AS_TEXT.get(name, (name, get_args(hint)[0]))
        hints[shown] = Annotated[kind, get_args(hint)[1]]
        if name == "prompt":
            hints["prompt_file"] = PromptFileOption
    return hints


# What has another name, or is given in another form, as text.
_AS_TEXT: Mapping[str, tuple[str, Any]] = {
    "params": ("param", list[str] | None),
    "schema": ("schema", Path | None),
    "budget_usd": ("budget", str | None),
}


def submission_of(dataset: str, **texts: Any) -> Submission:
    """The Submission that these options describe. Raises ConfigurationError naming the option that is wrong."""
    prompt_file, schema = texts.pop("prompt_file", None), texts.pop("schema", None)
    if prompt_file is not None:
        if texts.get("prompt") is not None:
            raise ConfigurationError("--prompt and --prompt-file are both given; keep one of them")
        texts["prompt"] = read_text(prompt_file, "--prompt-file")
    return make_submission(
        dataset,
        params=parse_params(texts.pop("param", None) or ()),
        schema=None if schema is None else _read_schema(schema),
        budget_usd=texts.pop("budget", None),
        **texts,
    )


submission_of.__signature__ = inspect.Signature(parameters(_hints()))  # type: ignore[attr-defined]  # see takes_submission


def takes_submission(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, whose first parameter is a Submission, the options that make one, before its own.

    A job file in the place of the data set fills in what the command line leaves out.
    """
    shared = inspect.signature(submission_of).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    def wrapper(context: typer.Context, **values: Any) -> None:
        if is_job_file(values["dataset"]):
            values = with_job_file(values, is_given=lambda name: _is_given(context, name))
        command(submission_of(**{name: values.pop(name) for name in shared}), **values)

    asks_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared.values(), *own)]
    parameters = [asks_context, *options]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it by inspect
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def parse_params(texts: Sequence[str]) -> dict[str, Any]:
    """Parameters from ``name=value`` texts; a value is JSON where it can be read so, else a string."""
    params: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"--param {text!r} is not name=value; write for example --param max_tokens=64")
        if name in params:
            raise ConfigurationError(f"--param {name} is given twice; keep one of them")
        params[name] = _value(value)
    return params


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def read_text(path: Path, option: str) -> str:
    """The text of a file that an option names. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as fault:
        raise ConfigurationError(f"{option} {path} cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise ConfigurationError(f"{option} {path} is not UTF-8 text (byte {fault.start}); save it as UTF-8") from fault


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(read_text(path, "--schema"))
    except ValueError as fault:
        raise ConfigurationError(f"--schema {path} is not JSON: {fault}") from fault
    if not isinstance(schema, dict):
        raise ConfigurationError(f"--schema {path} must hold a JSON object, such as {{'type': 'object', …}}")
    return schema
