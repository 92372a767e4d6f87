"""Turns a row into the Request that is stored: by template, by a messages column, or by a column of text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from batchmill_core.errors import PromptError
from batchmill_core.request import Request, Row, TaskKind

from .messages import InvalidMessages, check_messages, messages_in
from .missing_values import MissingValue
from .templates import Template

MESSAGES_COLUMN = "messages"
TEXT_COLUMNS = ("prompt", "text")
_SHOWN_COLUMNS = 50
_Values = Mapping[str, Any]
_Messages = tuple[Mapping[str, Any], ...]


class Prompt:
    """How each row of a job becomes a Request. Compiled once; ``render`` takes a few microseconds."""

    def __init__(
        self,
        task: TaskKind,
        *,
        text: Template | None,
        messages_column: str | None,
        system: Template | None,
        json_messages: bool = False,
    ) -> None:
        self.task = task
        self._text = text
        self._messages_column = messages_column
        self._system = system
        self._json_messages = json_messages

    @property
    def asks_the_same(self) -> bool:
        """Whether every row asks the same, since no template takes anything from it."""
        return self._text is not None and all(t is None or t.is_constant for t in (self._text, self._system))

    def render(self, row: Row) -> Request:
        """The request for one row. A row that already is a request (OpenAI batch file) keeps it.

        Raises PromptError naming the row, its line and the columns it has.
        """
        if row.request is not None:
            return self._own_request(row, row.request)
        try:
            if self._text is None:
                return Request(task=self.task, messages=self._from_column(row.input))
            text = self._text.render(row.input)
            if self.task is TaskKind.EMBED:
                return Request(task=self.task, inputs=(text,))
            return Request(task=self.task, messages=(*self._system_message(row.input), _message("user", text)))
        except MissingValue as error:
            raise PromptError(f"{_place(row)}: {error}{_columns_hint(error, row.input)}") from error
        except PromptError as error:
            raise PromptError(f"{_place(row)}: {error}") from error

    def _own_request(self, row: Row, request: Request) -> Request:
        if (request.task is TaskKind.EMBED) != (self.task is TaskKind.EMBED):
            raise PromptError(
                f"{_place(row)}: this is a request for {request.task}, but the job's task is {self.task}; "
                "put chat and embeddings into files of their own"
            )
        return request

    def _from_column(self, values: _Values) -> _Messages:
        column = self._messages_column
        if column is None:
            raise PromptError(
                f"nothing says what to ask: give a prompt (--prompt) or a column {_or(MESSAGES_COLUMN, *TEXT_COLUMNS)}; "
                f"columns here: {_listed(values)}"
            )
        if column not in values:
            raise MissingValue(f"there is no messages column {column!r}", column)
        return self._with_system(_column_messages(column, values[column], is_json=self._json_messages), values)

    def _with_system(self, messages: _Messages, values: _Values) -> _Messages:
        if self._system is None or any(m["role"] in ("system", "developer") for m in messages):
            return messages
        return (*self._system_message(values), *messages)

    def _system_message(self, values: _Values) -> _Messages:
        return () if self._system is None else (_message("system", self._system.render(values)),)


def compile_prompt(
    template: str | None,
    *,
    system: str | None = None,
    messages_column: str | None = None,
    columns: Iterable[str] = (),
    task: TaskKind = TaskKind.CHAT,
    json_messages: bool = False,
) -> Prompt:
    """Compiles what a job asks; ``columns`` are those of the first row, ``json_messages`` says that texts in the messages
    column are JSON.

    Without a template and a messages column it takes the column ``messages``, else ``prompt``, else ``text`` (for
    embeddings only the latter two). Where none of them is there, rendering a row says so, since the rows of an OpenAI
    batch file need no prompt. Raises PromptError for a template with a syntax error and for contradictions.
    """
    if template is not None and messages_column is not None:
        raise PromptError("a prompt and a messages column exclude each other; give one of them")
    if task is TaskKind.EMBED and (system is not None or messages_column is not None):
        raise PromptError("an embedding has no system prompt and no messages; give the text by --prompt")
    if task is TaskKind.CLASSIFY and system is not None:
        raise PromptError("a classification has no system prompt; leave --system out")
    there = set(columns)
    if template is None and messages_column is None:
        messages_column = _default_messages_column(there, task)
    text = _text_template(template, there if messages_column is None else set())
    return Prompt(
        task,
        text=text,
        messages_column=messages_column,
        system=None if system is None else Template(system, called="system"),
        json_messages=json_messages,
    )


def _default_messages_column(columns: set[str], task: TaskKind) -> str | None:
    return MESSAGES_COLUMN if MESSAGES_COLUMN in columns and task is not TaskKind.EMBED else None


def _text_template(template: str | None, columns: set[str]) -> Template | None:
    if template is not None:
        return Template(template, called="prompt")
    column = next((c for c in TEXT_COLUMNS if c in columns), None)
    return None if column is None else Template(f"{{{{ {column} }}}}", called="prompt")


def _column_messages(column: str, value: Any, *, is_json: bool) -> _Messages:
    """A list passes through unchanged; a bare string is one user message, whatever it looks like.

    Only where the user named the column and its first row holds messages as JSON does each text have to: else a text of
    somebody else could bring a system message of its own.
    """
    if isinstance(value, str) and not is_json:
        return (_message("user", value),)
    try:
        return messages_in(value) if isinstance(value, str) else check_messages(value)
    except InvalidMessages as error:
        link = ": " if str(error).startswith("message ") else " "
        raise PromptError(f"the messages column {column!r}{link}{error}") from error


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _place(row: Row) -> str:
    return f"row {row.index}" if row.line is None else f"row {row.index} ({row.source} line {row.line})"


def _columns_hint(missing: MissingValue, values: _Values) -> str:
    """The names that are there instead: those of the object that was asked, else of the row."""
    of_row = missing.within is None or missing.within == values
    there = values if of_row or missing.within is None else missing.within
    by_lower = {name.lower(): name for name in reversed(list(there))}
    close = difflib.get_close_matches(missing.name.lower(), list(by_lower), n=1)
    shown = _in_template if of_row else repr
    meant = f"; did you mean {shown(by_lower[close[0]])}?" if close else ";"
    return f"{meant} {'columns' if of_row else 'keys'} here: {_listed(there)}"


def _in_template(column: str) -> str:
    """How a template writes a column: a name that is no plain word, such as one with a space, needs ``row``."""
    return repr(column) if column.isidentifier() else f"row[{column!r}]"


def _listed(values: _Values) -> str:
    names = list(values)
    more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
    return ", ".join(names[:_SHOWN_COLUMNS]) + more if names else "none"


def _or(*names: str) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
