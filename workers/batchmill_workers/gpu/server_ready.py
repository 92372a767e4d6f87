"""Whether a server is ready, and which models it serves: small GETs by ``requests``, off the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests

HEALTH_PATH = "/health"
_TIMEOUT_S = 5.0
_NO_SUCH_PATH = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that a server says it serves. ``context_tokens`` is None where it does not say."""

    name: str
    context_tokens: int | None = None


class ReadyCheck:
    """Asks one server, at ``root`` such as ``http://127.0.0.1:8000``. Blocks: to be called in a thread.

    No proxy of the environment is used and no redirect followed: the server is on this host.
    """

    def __init__(self, root: str, *, ready_path: str | None, base_path: str) -> None:
        self._root = root
        self._ready_path = ready_path
        self._models_path = f"{base_path}/models"

    def why_not(self) -> str | None:
        """None when the server is ready, else what it lacks, in words.

        A ``/health`` that says no decides, since vLLM and llama.cpp listen before their model is loaded; a server
        without one is ready when it lists its models.
        """
        if self._ready_path is not None:
            return self._refused(self._ready_path)
        health = self._status(HEALTH_PATH)
        if isinstance(health, int) and health in _NO_SUCH_PATH:
            return self._refused(self._models_path)
        return _words(HEALTH_PATH, health)

    def served(self) -> list[Served]:
        """The models that it lists; none where it lists none, or in another way than OpenAI's."""
        try:
            with _session() as session:
                answer = session.get(self._root + self._models_path, timeout=_TIMEOUT_S, allow_redirects=False)
                listed = answer.json().get("data")
        except (requests.RequestException, ValueError, AttributeError):
            return []
        return [_served(one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []

    def _refused(self, path: str) -> str | None:
        return _words(path, self._status(path))

    def _status(self, path: str) -> int | str:
        """The HTTP status of a path, or why there is none."""
        try:
            with (
                _session() as session,
                session.get(self._root + path, timeout=_TIMEOUT_S, allow_redirects=False, stream=True) as answer,
            ):
                return answer.status_code
        except requests.Timeout:
            return f"it does not answer within {_TIMEOUT_S:.0f} s"
        except requests.ConnectionError:
            return "it does not listen yet"
        except requests.RequestException as fault:
            return f"it does not answer in HTTP ({type(fault).__name__})"


def _words(path: str, status: int | str) -> str | None:
    if isinstance(status, str):
        return status
    return None if 200 <= status < 300 else f"it answers {status} to GET {path}"


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


def _served(listed: dict[str, Any]) -> Served:
    """``max_model_len`` is vLLM's."""
    context = listed.get("max_model_len")
    fits = isinstance(context, int) and not isinstance(context, bool) and context > 0
    return Served(name=str(listed.get("id", "")), context_tokens=context if fits else None)
