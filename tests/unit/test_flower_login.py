"""Who may look at Flower, and where the password comes from and stays."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from batchmill_ops.flower_folder import FlowerFolder, Running
from batchmill_ops.flower_login import Login, login_for

PASSWORD = "pl4nted-s3cret"
TOKEN = "t0ken-of-pr0metheus"
LOGIN = Login(password=PASSWORD, token=TOKEN)


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("path", ["/", "/tasks", "/metrics", "/healthcheck", "/api/workers"])
def test_the_password_opens_every_page(path: str) -> None:
    assert LOGIN.admits(path, basic(f"batchmill:{PASSWORD}"))


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Basic",
        "Basic ***",
        basic(""),
        basic("batchmill:"),
        basic(f"admin:{PASSWORD}"),
        basic(f"batchmill:{PASSWORD}x"),
        basic(f"batchmill:{PASSWORD[:-1]}"),
        basic("batchmill:pässwörd"),
        f"Bearer {PASSWORD}",
        f"Basic {TOKEN}",
        "Bearer ",
        "Negotiate abc",
    ],
)
def test_nothing_else_opens_a_page(shown: str) -> None:
    assert not LOGIN.admits("/metrics", shown)


def test_the_token_opens_what_machines_read() -> None:
    assert LOGIN.admits("/metrics", f"Bearer {TOKEN}")
    assert LOGIN.admits("/healthcheck", f"bearer {TOKEN}")


@pytest.mark.parametrize("path", ["/", "/tasks", "/api/workers", "/metrics/../tasks", "/task/metrics"])
def test_the_token_opens_no_page_of_people(path: str) -> None:
    assert not LOGIN.admits(path, f"Bearer {TOKEN}")


def test_without_a_token_no_bearer_is_admitted() -> None:
    assert not Login(password=PASSWORD).admits("/metrics", "Bearer None")


def test_a_login_does_not_show_its_secrets() -> None:
    assert PASSWORD not in repr(LOGIN)
    assert TOKEN not in repr(LOGIN)


def test_a_generated_password_is_kept_for_the_next_start_and_is_its_users_alone(tmp_path: Path) -> None:
    (tmp_path / ".batchmill").mkdir()
    settings = Settings(home=tmp_path)

    first, second = login_for(settings), login_for(settings)

    file = tmp_path / ".batchmill" / "flower.json"
    assert first.is_new
    assert not second.is_new
    assert second.password == first.password
    assert len(first.password) >= 20
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text()) == {"user": "batchmill", "password": first.password}


def test_a_configured_password_wins_and_is_not_written_down(tmp_path: Path) -> None:
    login = login_for(Settings(home=tmp_path, flower_password=PASSWORD))

    assert (login.password, login.is_new) == (PASSWORD, False)
    assert not (tmp_path / ".batchmill").exists()


def test_a_password_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "flower.json").write_text("{}")

    with pytest.raises(ConfigurationError, match=r"flower\.json cannot be read .*; remove it"):
        FlowerFolder(path=tmp_path).password()


def test_a_second_flower_in_a_folder_is_told_where_the_first_is(tmp_path: Path) -> None:
    folder = FlowerFolder(path=tmp_path)

    with folder.held():
        folder.note_running(Running(pid=7, url="http://127.0.0.1:5555/", port=5555))
        with (
            pytest.raises(ConfigurationError, match=r"already, at http://127\.0\.0\.1:5555/ \(process 7\)"),
            folder.held(),
        ):
            pass

    assert folder.running() is None
