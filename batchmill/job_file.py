"""Job files: what `run`, `submit` and `estimate` take as options, in a TOML file of its own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings_check import Count, Table, check
from batchmill_producers.source_urls import is_url

_STANDARD_STREAM = "-"
_EXCLUSIVE = {"prompt": "prompt_file", "prompt_file": "prompt"}


class JobFile(Table):
    """The keys of a job file. They mean what the options of the same name mean; paths are relative to the file."""

    dataset: str
    model: str | None = None
    prompt: str | None = None
    prompt_file: str | None = None
    system: str | None = None
    messages_column: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    schema_: Annotated[str | None, Field(alias="schema")] = None
    task: Literal["chat", "embed", "classify"] | None = None
    stream: bool | None = None
    id_column: str | None = None
    limit: Count | None = None
    encoding: str | None = None
    skip_bad_rows: bool | None = None
    eager: bool | None = None
    name: str | None = None
    key: str | None = None
    budget: int | float | str | None = None
    priority: Annotated[int, Field(ge=0, le=9)] | None = None
    chunk_size: Count | None = None
    output: str | None = None
    format: Literal["jsonl", "csv", "parquet", "openai"] | None = None
    columns: str | list[str] | None = None
    excel_safe: bool | None = None
    give_up_after: int | float | str | None = None


KEYS = tuple(field.alias or name for name, field in JobFile.model_fields.items())


def is_job_file(dataset: str) -> bool:
    """Whether what stands in the place of a data set is a job file: its name ends in .toml."""
    return dataset.lower().endswith(".toml")


def with_job_file(options: Mapping[str, Any], *, is_given: Callable[[str], bool]) -> dict[str, Any]:
    """Options with the job file that ``dataset`` names read into those that were not given on the command line.

    Of ``params`` each parameter is overridden by itself. Keys that a command has no option for (``output`` of `submit`)
    are left alone, so that one file serves all commands. Raises ConfigurationError naming the file and the key.
    """
    merged = dict(options)
    found = _read(Path(options["dataset"]))
    for name, value in found.items():
        overridden = name in _EXCLUSIVE and is_given(_EXCLUSIVE[name])
        if name == "param":
            merged[name] = [*_not_named_in(options[name] or (), value), *(options[name] or ())]
        elif name == "dataset" or (name in options and not is_given(name) and not overridden):
            merged[name] = value
    return merged


def _read(path: Path) -> dict[str, Any]:
    """What a job file says, as the values that the options would have."""
    file = _checked(path)
    told = {name: value for name, value in file.model_dump(by_alias=True).items() if value is not None}
    values: dict[str, Any] = {"param": [_param(path, k, v) for k, v in told.pop("params").items()], **told}
    for name in ("dataset", "prompt_file", "schema", "output"):
        if name in values:
            values[name] = _beside(path, values[name])
    for name in ("prompt_file", "schema"):
        if name in values:
            values[name] = Path(values[name])
    for name in ("budget", "give_up_after"):
        if name in values:
            values[name] = str(values[name])
    if isinstance(values.get("columns"), list):
        values["columns"] = ",".join(values["columns"])
    return values


def _checked(path: Path) -> JobFile:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as fault:
        raise ConfigurationError(f"the job file {path} cannot be read: {fault.strerror} (from {Path.cwd()})") from fault
    except UnicodeDecodeError as fault:
        raise ConfigurationError(f"the job file {path} is not UTF-8 text (byte {fault.start})") from fault
    except tomllib.TOMLDecodeError as fault:
        raise ConfigurationError(f"the job file {path} is not valid TOML: {fault}") from fault
    for key in data:
        if key not in KEYS:
            raise ConfigurationError(f"{path}: {key} is not a key of a job file{nearest(key, KEYS)}")
    file = check(JobFile, data, where=lambda key: f"{path}: {key}", folder=path.parent, strict=True)
    if file.prompt is not None and file.prompt_file is not None:
        raise ConfigurationError(f"{path}: prompt and prompt_file are both there; keep one of them")
    return file


def _beside(path: Path, named: str) -> str:
    """A path of a job file as seen from where the command runs."""
    if named == _STANDARD_STREAM or is_url(named):
        return named
    return str(path.parent / Path(named).expanduser())


def _param(path: Path, name: str, value: Any) -> str:
    try:
        return f"{name}={json.dumps(value)}"
    except TypeError as fault:
        raise ConfigurationError(f"{path}: params.{name} holds what JSON cannot: {fault}") from fault


def _not_named_in(given: Sequence[str], params: Sequence[str]) -> list[str]:
    named = {text.partition("=")[0].strip() for text in given}
    return [text for text in params if text.partition("=")[0] not in named]
