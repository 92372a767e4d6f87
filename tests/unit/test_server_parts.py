"""The parts of the server engine that need no server of the user's own: readiness, pulse, last words, endings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.settings import HOME_VARIABLE
from batchmill_workers.gpu.server_log import last_words, log_path
from batchmill_workers.gpu.server_process import how_it_ended
from batchmill_workers.gpu.server_pulse import FAULTS, UNREACHABLE_FOR_S, Pulse
from batchmill_workers.gpu.server_ready import ReadyCheck, Served
from tests.scripted_server import RecordedRequest, scripted
from tests.servers import free_port


def answers(**by_path: Mapping[str, Any]) -> Any:
    """A server that knows these paths, written with two underscores for a slash."""
    known = {f"/{name.replace('__', '/')}": answer for name, answer in by_path.items()}

    def answer(request: RecordedRequest) -> Mapping[str, Any]:
        return known.get(request.path, {"status": 404})

    return scripted(answer)


def why_not(base_url: str, ready_path: str | None = None) -> str | None:
    root = base_url.removesuffix("/v1")
    return ReadyCheck(root, ready_path=ready_path, base_path="/v1").why_not()


@pytest.mark.parametrize(
    ("paths", "lacks"),
    [
        ({"health": {"status": 200}}, None),
        ({"v1__models": {"json": {"data": []}}}, None),
        ({"health": {"status": 503}, "v1__models": {"json": {}}}, "it answers 503 to GET /health"),
        ({"health": {"status": 405}, "v1__models": {"status": 500}}, "it answers 500 to GET /v1/models"),
        ({}, "it answers 404 to GET /v1/models"),
        ({"health": {"status": 302, "headers": {"location": "/"}}}, "it answers 302 to GET /health"),
    ],
    ids=["health", "models", "still loading", "models fail", "knows neither", "redirects"],
)
def test_health_decides_and_a_server_without_it_is_ready_when_it_lists_models(
    paths: dict[str, Any], lacks: str | None
) -> None:
    with answers(**paths) as server:
        assert why_not(server.base_url) == lacks


def test_a_path_of_the_users_decides_alone() -> None:
    with answers(health={"status": 200}, up={"status": 500}) as server:
        assert why_not(server.base_url, "/up") == "it answers 500 to GET /up"
        assert why_not(server.base_url, "/health") is None


def test_a_server_that_does_not_listen_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    assert why_not(f"http://127.0.0.1:{free_port()}/v1") == "it does not listen yet"


@pytest.mark.parametrize(
    ("listed", "served"),
    [
        (
            {"json": {"data": [{"id": "a", "max_model_len": 512}, {"id": "b", "max_model_len": "much"}, 7]}},
            [Served(name="a", context_tokens=512), Served(name="b")],
        ),
        ({"json": {"models": ["a"]}}, []),
        ({"json": ["a"]}, []),
        ({"text": "a"}, []),
        ({"status": 404}, []),
    ],
    ids=["openai", "another way", "a list", "no json", "none"],
)
def test_models_are_read_where_they_are_listed_as_openai_does(listed: dict[str, Any], served: list[Served]) -> None:
    with answers(v1__models=listed) as server:
        check = ReadyCheck(server.base_url.removesuffix("/v1"), ready_path=None, base_path="/v1")

        assert check.served() == served


def test_a_server_that_answered_others_meanwhile_does_not_hang() -> None:
    pulse = Pulse()
    pulse.answered(5.0)

    assert not pulse.silent_since(4.0)
    assert pulse.silent_since(5.0)


def test_a_server_is_asked_in_vain_from_the_first_call_that_nothing_followed() -> None:
    pulse = Pulse()
    idle_s = pulse.in_vain_s(1000.0)
    pulse.sent(1000.0)
    pulse.sent(1008.0)
    asked_s = pulse.in_vain_s(1010.0)
    pulse.answered(1011.0)

    assert (idle_s, asked_s, pulse.in_vain_s(1012.0)) == (0.0, 10.0, 0.0)


def test_faults_in_a_row_are_counted_until_something_is_answered_well() -> None:
    pulse = Pulse()
    for _ in range(FAULTS - 1):
        pulse.answered(1.0, fault=True)
    before = pulse.only_faults
    pulse.answered(2.0, fault=True)
    after = pulse.only_faults
    pulse.answered(3.0)

    assert (before, after, pulse.only_faults) == (False, True, False)


def test_a_server_that_takes_no_connections_for_long_is_not_waited_for() -> None:
    pulse = Pulse()

    assert not pulse.unreachable(100.0)
    assert not pulse.unreachable(99.0 + UNREACHABLE_FOR_S)
    assert pulse.unreachable(100.0 + UNREACHABLE_FOR_S)
    pulse.answered(121.0)
    assert not pulse.unreachable(122.0)


def test_last_words_are_the_last_lines_since_it_began_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("an earlier life\n")
    begin = path.stat().st_size
    path.write_text("an earlier life\n" + "".join(f"line {n}\n\n" for n in range(20)) + "\x1b[31mred   end\x1b[0m")

    assert last_words(path, begin) == "line 15 | line 16 | line 17 | line 18 | line 19 | red end"
    assert last_words(path, path.stat().st_size) == ""
    assert last_words(tmp_path / "none.log") == ""


def test_each_slot_has_a_log_of_its_own_in_the_home(tmp_path: Path) -> None:
    home = {HOME_VARIABLE: str(tmp_path)}

    assert log_path("org/m", home) == tmp_path / ".batchmill" / "logs" / "server-org-m-cpu.log"
    assert log_path("m", {**home, "CUDA_VISIBLE_DEVICES": "GPU-1"}).name == "server-m-GPU-1.log"


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with exit status 0"), (-9, "was killed by signal 9 (SIGKILL)"), (-64, "was killed by signal 64")],
)
def test_how_a_server_ended_is_said_in_words(status: int, words: str) -> None:
    assert words in how_it_ended(status)
