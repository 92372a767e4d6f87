"""Error answers in the shapes that real providers and the proxies in front of them send."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

JSON = "application/json"
HTML = "text/html"

# status: (type, code, message) in OpenAI's shape
_OPENAI: Mapping[int, tuple[str, str | None, str]] = {
    400: ("invalid_request_error", None, "Invalid request (simulated fault)."),
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    402: ("insufficient_quota", "insufficient_quota", "Insufficient balance."),
    403: (
        "invalid_request_error",
        "unsupported_country_region_territory",
        "Country, region, or territory not supported.",
    ),
    404: ("invalid_request_error", "not_found", "Not found."),
    405: ("invalid_request_error", "method_not_supported", "Method not allowed."),
    408: ("timeout", None, "Request timed out."),
    409: ("conflict", None, "The resource was updated by another request; please try again."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached. Please try again later."),
    500: ("server_error", None, "The server had an error while processing your request. Sorry about that!"),
    503: ("service_unavailable_error", None, "The engine is currently overloaded, please try again later."),
}
_GATEWAY = {502: "Bad Gateway", 504: "Gateway Time-out", 520: "Web server is returning an unknown error"}
_OVERLOADED = 529  # Anthropic's


class BadRequest(Exception):
    """A request that the provider refuses; becomes an error answer in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = openai_error(status, message=message, param=param, code=code, kind=kind)


def openai_error(
    status: int,
    *,
    message: str | None = None,
    param: str | None = None,
    code: str | None = None,
    kind: str | None = None,
) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``, with what is usual for ``status`` where nothing is given."""
    fallback = ("server_error" if status >= 500 else "invalid_request_error", None, f"Simulated fault {status}.")
    usual_kind, usual_code, usual_message = _OPENAI.get(status, fallback)
    error = {
        "message": message or usual_message,
        "type": kind or usual_kind,
        "param": param,
        "code": code or usual_code,
    }
    return orjson.dumps({"error": error})


def fault_body(status: int) -> tuple[str, bytes]:
    """Content type and body of a drawn fault: a proxy's page for 502 and 504, Anthropic's shape for 529, else OpenAI's."""
    if status in _GATEWAY:
        title = f"{status} {_GATEWAY[status]}"
        page = f"<html>\r\n<head><title>{title}</title></head>\r\n<body>\r\n<center><h1>{title}</h1></center>\r\n"
        return HTML, (page + "<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n").encode()
    if status == _OVERLOADED:
        return JSON, orjson.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    return JSON, openai_error(status)
