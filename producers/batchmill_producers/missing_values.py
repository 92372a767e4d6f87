"""What a template asks for and is not there: the error, and how it knows the keys that are there instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined

from batchmill_core.errors import PromptError


class MissingValue(PromptError):
    """A template uses a name that is not there; ``name`` is it, ``within`` the object that lacks it if not the row."""

    def __init__(self, message: str, name: str, within: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.within = within


class Missing(StrictUndefined):
    """What is not there. Its error knows the object that lacks it, so that the keys there are can be told."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        message = str(super()._undefined_message)
        return _Lack(message, within=self._undefined_obj if isinstance(self._undefined_obj, Mapping) else None)


class _Lack(str):
    """The words of an UndefinedError, with the object that lacks the name."""

    within: Mapping[str, Any] | None

    def __new__(cls, words: str, *, within: Mapping[str, Any] | None) -> _Lack:
        made = super().__new__(cls, words)
        made.within = within
        return made
