"""The scripted server: what it sends is exactly what the script says."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.scripted_server import ScriptedServer, scripted


def ask(server: ScriptedServer, body: bytes = b"{}") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=10)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer k"})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def test_the_nth_request_gets_the_nth_response_and_the_last_one_repeats() -> None:
    script: list[dict[str, Any]] = [
        {"status": 429, "headers": {"Retry-After": 2}, "text": "wait"},
        {"json": {"ok": True}},
    ]

    with scripted(script) as server:
        first, second, third = ask(server), ask(server), ask(server)

    assert (first[0], first[1]["retry-after"], first[2]) == (429, "2", b"wait")
    assert second[2] == third[2] == b'{"ok":true}'
    assert second[1]["content-type"] == "application/json"


def test_requests_are_recorded_as_they_arrive() -> None:
    with scripted({"json": {}}) as server:
        ask(server, b'{"model": "m"}')

    (request,) = server.requests
    assert (request.method, request.path, request.json) == ("POST", "/v1/chat/completions", {"model": "m"})
    assert request.headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_cut_body_breaks_off_where_the_script_says(chunked: bool) -> None:
    script = {"text": "0123456789" * 4, "cut_after": 20, "chunked": chunked}

    with scripted(script) as server, pytest.raises(http.client.IncompleteRead) as caught:
        ask(server)

    assert caught.value.partial == b"01234567890123456789"


def test_a_body_in_chunks_arrives_whole_with_the_content_type_of_the_script() -> None:
    script = {
        "text": "data: 1\r\n\r\n" * 9,
        "headers": {"content-type": "text/event-stream"},
        "chunked": True,
        "close": True,
    }

    with scripted(script) as server:
        status, headers, body = ask(server)

    assert (status, headers["content-type"], headers["transfer-encoding"]) == (200, "text/event-stream", "chunked")
    assert body == b"data: 1\r\n\r\n" * 9


def test_a_server_with_a_hanging_request_still_stops() -> None:
    with scripted({"hang": True}) as server:
        connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=0.1)
        connection.request("GET", "/v1/models")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        connection.close()

    assert [request.path for request in server.requests] == ["/v1/models"]


def test_a_misspelt_key_of_the_script_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no key"), scripted({"jsno": {}}):
        pass
