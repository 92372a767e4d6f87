"""A streamed chat answer: server-sent events fed in pieces of any size, put together to one Completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchmill_core.errors import CallState, MalformedResponse
from batchmill_core.request import Completion

from .faults import error_of
from .headers import request_id_of
from .json_body import parse, start_of
from .reported import usage_of
from .wire import check_whole, error_midway, finish_of, text_of

_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")
_BOM = b"\xef\xbb\xbf"
_RAW_BYTES = 8_000


class EventReader:
    """Cuts bytes into the data of server-sent events. Source: WHATWG HTML, 9.2.6."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line that has not ended; joined once, so that long lines stay linear
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that ``piece`` completes."""
        self._rest.append(piece)
        if b"\n" not in piece and b"\r" not in piece:
            return
        text = b"".join(self._rest)
        if self._at_start:
            text, self._at_start = text.removeprefix(_BOM), False
        end = 0
        for line in _LINE.finditer(text):
            if line.group(2) == b"\r" and line.end() == len(text):
                break  # its line feed may be in the next piece
            end = line.end()
            yield from self._line(line.group(1))
        self._rest = [text[end:]]

    def close(self) -> Iterator[bytes]:
        """The last event, where a server did not end it with an empty line."""
        yield from self._line(b"".join(self._rest).rstrip(b"\r"))
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            yield data


class StreamedAnswer:
    """One chat answer while it streams in. ``feed`` pieces, then ``finish`` gives the Completion or raises.

    ``begun`` turns True with the first token, ``done`` when the server said that nothing follows.
    """

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._headers = headers
        self._events = EventReader()
        self._raw = b""
        self._texts: list[str] = []
        self._refusals: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: Any = None
        self._usage: Any = None
        self._model: str | None = None
        self._id: str | None = None
        self._error: Any = None
        self._garbled = False
        self.begun = False
        self.done = False

    def feed(self, piece: bytes) -> None:
        if len(self._raw) < _RAW_BYTES:
            self._raw += piece[:_RAW_BYTES]
        for data in self._events.feed(piece):
            self._event(data)

    def finish(self, *, now: float, latency_ms: int = 0, ttft_ms: int | None = None) -> Completion:
        """The whole answer. Raises a CallError if the stream was cut, garbled or held an error."""
        garbled = self._garbled
        for data in self._events.close():
            self._event(data)
        self._garbled = garbled  # a last event that was cut says no more than that the stream was
        if self._error is not None:
            raise self._translated_error(now=now, latency_ms=latency_ms)
        if self._garbled or not (self.done or self._finish is not None):
            raise self._cut(latency_ms)
        completion = Completion(
            text="".join(self._texts) or self._tool_calls() or ("" if self._texts else None),
            finish_reason=finish_of(self._finish),
            refusal="".join(self._refusals) or None,
            usage=usage_of(self._usage),
            latency_ms=latency_ms,
            ttft_ms=ttft_ms,
            model=self._model,
            request_id=request_id_of(self._headers) or self._id,
        )
        check_whole(completion, self._raw)
        return completion

    def _event(self, data: bytes) -> None:
        if self.done or self._error is not None or not data.strip():
            return
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            chunk = parse(data)
        except ValueError:
            self._garbled = True
            return
        if isinstance(chunk, dict):
            self._chunk(chunk)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error") or chunk.get("object") == "error":
            self._error = chunk.get("error") or chunk
            return
        self._model = self._model or _string(chunk.get("model"))
        self._id = self._id or _string(chunk.get("id"))
        self._usage = chunk.get("usage") or self._usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        if choice.get("error"):
            self._error = choice["error"]
            return
        self._finish = choice.get("finish_reason") or self._finish
        delta = choice.get("delta") or choice.get("message")
        if not isinstance(delta, dict):
            return
        text, refusal = text_of({"content": delta.get("content"), "refusal": delta.get("refusal")})
        if text is not None:
            self._texts.append(text)
        if refusal:
            self._refusals.append(refusal)
        self._add_tool_calls(delta.get("tool_calls"))
        if text or refusal or self._calls or delta.get("reasoning_content") or delta.get("reasoning"):
            self.begun = True

    def _add_tool_calls(self, deltas: Any) -> None:
        for place, delta in enumerate(deltas if isinstance(deltas, list) else ()):
            if not isinstance(delta, dict):
                continue
            index = delta.get("index")
            call = self._calls.setdefault(index if isinstance(index, int) else place, {"function": {}})
            call.update({k: v for k, v in delta.items() if k in ("id", "type") and v})
            function = delta.get("function")
            for name, value in function.items() if isinstance(function, dict) else ():
                if isinstance(value, str):
                    call["function"][name] = call["function"].get(name, "") + value

    def _tool_calls(self) -> str | None:
        calls = [self._calls[i] for i in sorted(self._calls)]
        return json.dumps(calls, ensure_ascii=False) if calls else None

    def _translated_error(self, *, now: float, latency_ms: int) -> Exception:
        if self.begun:
            return error_midway(self._status, self._headers, self._error, None, now=now, latency_ms=latency_ms)
        body = json.dumps({"error": self._error}).encode()
        return error_of(self._status, self._headers, body, now=now, latency_ms=latency_ms)

    def _cut(self, latency_ms: int) -> MalformedResponse:
        what = "a stream with an event that is not JSON" if self._garbled else "a stream that was cut before its end"
        return MalformedResponse(
            f"the provider sent {what}",
            raw=start_of(self._raw),
            request_id=request_id_of(self._headers) or self._id,
            http_status=self._status,
            latency_ms=latency_ms,
            ledger=CallState.UNKNOWN,
        )


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
