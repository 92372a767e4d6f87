"""Checks a submission against the catalogue and the first row, before the data set is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.errors import ConfigurationError, PromptError, SourceError
from batchmill_core.job import Spec, Step
from batchmill_core.prices import price_for
from batchmill_core.request import Request, Row, TaskKind
from batchmill_core.settings import Settings

from .answer_schema import check_schema
from .messages import are_messages
from .params import check_params, doubts
from .prompts import MESSAGES_COLUMN, Prompt, compile_prompt
from .sources import Source, open_source
from .submission import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A submission checked against the catalogue and the first row, ready to be read."""

    source: Source
    prompt: Prompt
    spec: Spec
    entry: ModelEntry
    account: Account | None
    notes: tuple[str, ...] = ()  # what the user should know, though nothing is wrong

    def requests(self) -> Iterator[tuple[Row, Request]]:
        """Each accepted row with its request, numbered without gaps; rows that cannot be rendered are bad rows."""
        index = 0
        for row in self.source:
            try:
                request = self.prompt.render(row)
                if request.task is not self.spec.task:
                    raise PromptError(
                        f"asks for {request.task.value}, unlike the rows before it ({self.spec.task.value})"
                    )
            except PromptError as fault:
                if not self.source.skips_bad_rows:
                    raise
                self.source.reject(row.line, str(fault))
                continue
            yield (row if row.index == index else replace(row, index=index)), request
            index += 1
        if index == 0:
            raise SourceError("no rows are left: every row was bad")


def prepare(submission: Submission, settings: Settings) -> Prepared:
    """Checks everything that can be checked before rows are read. Raises a UserError that says what to do."""
    source = open_source(
        submission.dataset,
        encoding=submission.encoding,
        limit=submission.limit,
        skip_bad_rows=submission.skip_bad_rows,
        id_column=submission.id_column,
    )
    own_task = source.task
    task = submission.task or own_task or TaskKind.CHAT
    if own_task is not None and submission.task not in (None, own_task):
        raise ConfigurationError(f"the data set is an OpenAI batch file of {own_task.value} requests; leave --task out")
    notes = list(doubts(submission.params))
    if own_task is not None and (submission.prompt is not None or submission.system is not None):
        notes.append("the data set is an OpenAI batch file: its rows are requests already, so the prompt is ignored")
    entry = settings.catalog.model(submission.model or _own_model(source))
    account = None if entry.account is None else settings.catalog.account(entry.account)
    _check_task(task, entry)
    messages = source.first_input.get(submission.messages_column or MESSAGES_COLUMN)
    prompt = compile_prompt(
        None if own_task is not None else submission.prompt,
        system=None if own_task is not None else submission.system,
        messages_column=submission.messages_column,
        columns=source.columns,
        task=task,
        json_messages=submission.messages_column is not None and are_messages(messages),
    )
    if own_task is None:
        notes += _notes_on(prompt, submission, source.columns, messages)
    if not source.skips_bad_rows:
        prompt.render(source.first_row)
    check_params(submission.params)
    _check_schema(submission.schema, task)
    step = make_step(entry, account)
    spec = Spec(
        task=task, steps=(step,), params=dict(submission.params), schema=submission.schema, stream=submission.stream
    )
    if submission.budget_nanousd is not None:
        check_budget(spec)
    return Prepared(source=source, prompt=prompt, spec=spec, entry=entry, account=account, notes=tuple(notes))


def _notes_on(prompt: Prompt, submission: Submission, columns: Sequence[str], messages: Any) -> Iterator[str]:
    """What a user should know who meant something else than what is asked."""
    if prompt.asks_the_same:
        column = next((c for c in columns if c.isidentifier()), "column")
        yield f"the prompt takes nothing from the rows: all ask the same. A column is written {{{{ {column} }}}}"
    takes_messages = submission.prompt is None and submission.messages_column is None
    if takes_messages and are_messages(messages):
        yield (
            f"the column {MESSAGES_COLUMN!r} holds JSON as text, which is sent as it stands; "
            f"with --messages-column {MESSAGES_COLUMN} it is read as messages"
        )


def _check_task(task: TaskKind, entry: ModelEntry) -> None:
    if task is TaskKind.CLASSIFY and entry.engine is None:
        raise ConfigurationError(
            f'task classify needs a classification model on a device of yours, such as engine = "transformers"; model '
            f"{entry.name!r} belongs to account {entry.account!r}. Use chat with --schema"
        )


def make_step(entry: ModelEntry, account: Account | None) -> Step:
    """Freezes what a worker has to know of a model; the account's address and key stay with the workers."""
    retries = entry.max_retries if entry.max_retries is not None else (5 if account is None else account.max_retries)
    timeout_s = entry.timeout_s if entry.timeout_s is not None else (600.0 if account is None else account.timeout_s)
    return Step(
        model=entry.name,
        upstream=entry.upstream,
        queue=entry.queue,
        account=entry.account,
        engine=entry.engine,
        price=price_for(account, entry),
        device_nanousd_per_hour=entry.device_nanousd_per_hour,
        max_retries=retries,
        timeout_s=timeout_s,
    )


def check_budget(spec: Spec) -> None:
    """Raises ConfigurationError unless every call's cost can be bounded before it is sent."""
    for step in spec.steps:
        if not step.has_price:
            raise ConfigurationError(
                f"a budget needs a known price, and model {step.model!r} has none; add price = {{ input = …, output = … }} "
                f'under [models."{step.model}"] in batchmill.toml'
            )
    bounded = spec.task is not TaskKind.CHAT or {"max_tokens", "max_completion_tokens"} & spec.params.keys()
    if not bounded and spec.steps[0].price is not None:
        raise ConfigurationError("a budget needs an explicit bound of the answer's length: add --param max_tokens=N")


def _own_model(source: Source) -> str:
    """The model that the rows of an OpenAI batch file name."""
    body = source.first_input.get("body", {})
    model = body.get("model") if isinstance(body, Mapping) else None
    if not isinstance(model, str):
        raise ConfigurationError("no model is given; add --model NAME (a model of batchmill.toml)")
    return model


def _check_schema(schema: Mapping[str, Any] | None, task: TaskKind) -> None:
    if schema is None:
        return
    if task is not TaskKind.CHAT:
        raise ConfigurationError(f"task {task} has no schema, its answers have one shape; leave --schema out")
    check_schema(schema)
