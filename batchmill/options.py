"""The options that `run`, `submit` and `estimate` share, and how their texts become a Submission."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from batchmill_core.errors import ConfigurationError
from batchmill_producers.submit import Submission

from .asked import make_submission
from .job_file import is_job_file, with_job_file

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Its id, its key, or its name (the newest of it).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
ParamOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="K=V", help="A sampling parameter, such as max_tokens=64. Repeatable."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="USD", help="Pause before more than this is spent.")
]
ExcelSafeOption = Annotated[
    bool,
    typer.Option("--excel-safe", help="In CSV, put an apostrophe before text that a spreadsheet takes for a formula."),
]
_ASK, _READ, _JOB = "What is asked", "How the data set is read", "The job"


def submission_of(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder, a 'pattern/*.csv' or a URL; - reads JSONL from stdin; a job.toml holds it with its options.")],
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="M", help="A model of batchmill.toml.", rich_help_panel=_ASK)] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="T", help="A template: 'Label: {{ text }}' takes the column text.", rich_help_panel=_ASK)] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", metavar="FILE", help="The template, from a file.", rich_help_panel=_ASK)] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="T", help="A template for the system message.", rich_help_panel=_ASK)] = None,
    messages_column: Annotated[str | None, typer.Option("--messages-column", metavar="C", help="A column that holds chat messages.", rich_help_panel=_ASK)] = None,
    param: Annotated[list[str] | None, typer.Option("--param", metavar="K=V", help="A sampling parameter, such as max_tokens=64. Repeatable.", rich_help_panel=_ASK)] = None,
    schema: Annotated[Path | None, typer.Option("--schema", metavar="FILE", help="A JSON schema that every answer has to keep.", rich_help_panel=_ASK)] = None,
    task: Annotated[Literal["chat", "embed"] | None, typer.Option("--task", help="Chat (the default) or embeddings.", rich_help_panel=_ASK)] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Let the provider stream answers; tells the time to the first token.", rich_help_panel=_ASK)] = False,
    id_column: Annotated[str | None, typer.Option("--id-column", metavar="C", help="A column that names each row; its values must differ.", rich_help_panel=_READ)] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Take the first N rows only.", rich_help_panel=_READ)] = None,
    encoding: Annotated[str, typer.Option("--encoding", help="Of text files.", rich_help_panel=_READ)] = "utf-8",
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out, instead of refusing the data set.", rich_help_panel=_READ)] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; by default the data set's.", rich_help_panel=_JOB)] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="K", help="Same key, same job: run it again and nothing is done twice.", rich_help_panel=_JOB)] = None,
    budget: Annotated[str | None, typer.Option("--budget", metavar="USD", help="Pause before more than this is spent.", rich_help_panel=_JOB)] = None,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="0 goes first.", rich_help_panel=_JOB)] = 5,
    chunk_size: Annotated[int | None, typer.Option("--chunk-size", metavar="N", min=1, help="Rows per chunk; by default 5 to 10 s of work.", rich_help_panel=_JOB)] = None,
) -> Submission:  # fmt: skip
    """The Submission that these options describe. Raises ConfigurationError naming the option that is wrong."""
    if prompt is not None and prompt_file is not None:
        raise ConfigurationError("--prompt and --prompt-file are both given; keep one of them")
    return make_submission(
        dataset,
        model=model,
        prompt=prompt if prompt_file is None else read_text(prompt_file, "--prompt-file"),
        system=system,
        messages_column=messages_column,
        params=parse_params(param or ()),
        schema=None if schema is None else _read_schema(schema),
        task=task,
        name=name,
        key=key,
        budget_usd=budget,
        priority=priority,
        chunk_size=chunk_size,
        id_column=id_column,
        limit=limit,
        encoding=encoding,
        skip_bad_rows=skip_bad_rows,
        stream=stream,
    )


def takes_submission(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, whose first parameter is a Submission, the options that make one, before its own.

    A job file in the place of the data set fills in what the command line leaves out.
    """
    shared = inspect.signature(submission_of, eval_str=True).parameters
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
