"""Who may look at Flower: everything is closed but to the login, and metrics also to a token."""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

from batchmill_core.settings import Settings

from .flower_folder import USER, FlowerFolder

REALM = "Batchmill"
_FOR_MACHINES = ("/metrics", "/healthcheck")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Login:
    """What a request has to show. ``is_new``: the password was made just now, so its user has not seen it yet."""

    user: str = USER
    password: str
    is_new: bool = False
    token: str | None = None

    @property
    def credentials(self) -> str:
        """As HTTP's basic authentication joins them."""
        return f"{self.user}:{self.password}"

    def admits(self, path: str, authorization: str) -> bool:
        """Whether a request for ``path`` (without a URL prefix) with this header may pass."""
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() == "basic":
            return _same(_decoded(shown), self.credentials)
        if scheme.lower() == "bearer" and self.token is not None and path in _FOR_MACHINES:
            return _same(shown.strip().encode(), self.token)
        return False


def login_for(settings: Settings) -> Login:
    """The configured password, else the one that the folder keeps, which is made at the first time."""
    password, is_new = settings.flower_password, False
    if password is None:
        password, is_new = FlowerFolder(path=settings.state_folder).password()
    return Login(password=password, is_new=is_new, token=settings.metrics_token)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _same(shown: bytes, wanted: str) -> bool:
    """In a time that tells nothing of how much was right."""
    return hmac.compare_digest(shown, wanted.encode())
