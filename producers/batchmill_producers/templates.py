"""Compiles one Jinja2 template in a sandbox that bounds what it can read, repeat and print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmill_core.errors import PromptError

from .missing_values import Missing, MissingValue
from .sanitize import sanitize_text
from .template_bounds import check_numbers, check_product, check_width, without_large_numbers, without_long_width

MAX_STEPS = 1_000_000  # loop turns and calls of one rendering: about half a second
MAX_CHARS = 64_000_000
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "wordwrap")
# What a template's own code can raise; anything else is our fault and must be seen as such.
_RENDER_FAULTS = (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


class Template:
    """One compiled template. Renders one row at a time; not for use by several threads at once.

    Values print as in Jinja2, except that None and NaN print as nothing, and lists and mappings as JSON. Rendered
    data is never rendered again.
    """

    def __init__(self, source: str, *, called: str) -> None:
        """``called`` names the template in errors. Raises PromptError with the line of a syntax error."""
        self._called = called
        self._environment = _Environment()
        try:
            tree = self._environment.parse(sanitize_text(source))
            self._pieces = _plain_pieces(tree)
            self.is_constant = not find_undeclared_variables(tree)
            _count_loops(tree)
            self._template = self._environment.from_string(tree)
            # One plain dict in place of a chain of two, which costs a third of a short rendering.
            self._template.globals = dict(self._template.globals)
        except TemplateSyntaxError as error:
            raise PromptError(
                f"the {called} template, line {error.lineno}: {error.message}{_two_words(source)}"
            ) from error
        except (SyntaxError, RecursionError) as error:
            raise PromptError(f"the {called} template is nested too deeply") from error

    def render(self, row: Mapping[str, Any]) -> str:
        """The text for one row. Raises PromptError; MissingValue when a name it uses is not in the row."""
        if self._pieces is not None:
            try:
                return "".join([_printed(row[p.name]) if isinstance(p, _Name) else p for p in self._pieces])
            except (KeyError, TypeError):
                pass  # the full way below finds the value elsewhere, or says what is wrong
        return self._render_in_full(row)

    def _render_in_full(self, row: Mapping[str, Any]) -> str:
        self._environment.steps = self._environment.chars = 0
        context = self._template.new_context({"row": row, **row})
        try:
            return sanitize_text("".join(self._environment.bounded(self._template.root_render_func(context))))
        except SecurityError as error:
            raise PromptError(f"the {self._called} template is not allowed to do this: {error}") from error
        except UndefinedError as error:
            within = getattr(error.args[0], "within", None) if error.args else None
            raise MissingValue(f"the {self._called} template: {error}", _last_quoted(str(error)), within) from error
        except _RENDER_FAULTS as error:
            raise PromptError(f"the {self._called} template failed: {_words(error)}") from error


def _two_words(source: str) -> str:
    """What to write where a template names a column with a space or a dash bare, which no grammar allows."""
    bare = re.search(r"\{\{\s*(\w+(?:[ -]+\w+)+)\s*\}\}", source)
    return f"; a column of that name is written {{{{ row[{bare[1]!r}] }}}}" if bare else ""


class _Name:
    """A place in a plain template where one column goes."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def _plain_pieces(tree: nodes.Template) -> list[str | _Name] | None:
    """Texts and columns of a template that is nothing else, which renders several times faster so; else None."""
    pieces: list[str | _Name] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for node in output.nodes:
            if isinstance(node, nodes.TemplateData):
                pieces.append(node.data)
            elif isinstance(node, nodes.Name) and node.name != "self":
                pieces.append(_Name(node.name))
            else:
                return None
    return pieces


def _count_loops(tree: nodes.Template) -> None:
    """Lets every loop count its turns."""
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with bounds on turns, calls, text and numbers."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=Missing, autoescape=False, keep_trailing_newline=True, finalize=_final, cache_size=0)
        self.steps = 0
        self.chars = 0
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted
        self.filters["format"] = without_long_width(self.filters["format"])
        for name in _SIZED_FILTERS:
            self.filters[name] = without_large_numbers(self.filters[name])

    def spend(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps for one row; shorten its loops")

    def bounded(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.chars += len(piece)
            if self.chars > MAX_CHARS:
                raise SecurityError(f"it prints more than {MAX_CHARS:,} characters for one row")
            yield piece

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Jinja2 would find dict.items before a key called "items", and print a method into the prompt.
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            check_numbers((*args, *kwargs.values()))
            if method.__name__ in ("format", "format_map"):
                check_width(text)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend()
        check_product(operator, left, right, max_chars=MAX_CHARS)
        return super().call_binop(context, operator, left, right)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value


def _final(value: Any) -> Any:
    """What is printed for a value of an expression."""
    if isinstance(value, str | Undefined):
        return value  # an Undefined raises when it is made into text
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, Mapping | list | tuple):
        return _tojson(value)
    if callable(value):
        raise TypeError(f"it prints a function ({getattr(value, '__name__', value)}); call it with ()")
    return _tojson(list(value)) if hasattr(value, "__next__") else value


def _printed(value: Any) -> str:
    return value if type(value) is str else str(_final(value))


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as it is, where Jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _last_quoted(message: str) -> str:
    quoted = re.findall(r"'([^']*)'", message)
    return quoted[-1] if quoted else ""


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    return f"{error}" if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
