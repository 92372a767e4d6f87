"""Keys are read afresh from where the account says, and only real ones are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill_core.catalog import Account
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import api_key

KEY = "sk-proj-4f9Qz7Lw2"


def account(**where: str) -> Account:
    return Account(name="openai", base_url="https://api.openai.com/v1", **where)  # type: ignore[arg-type]  # only the two api_key_ fields


def test_a_server_that_wants_no_key_gets_none(tmp_path: Path) -> None:
    assert api_key(account(), {}, tmp_path) is None


def test_a_key_comes_from_the_environment_without_its_white_space(tmp_path: Path) -> None:
    assert api_key(account(api_key_env="K"), {"K": f" {KEY}\n"}, tmp_path) == KEY


def test_a_key_comes_from_dotenv_and_dollar_signs_stay(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("K=a$b${c}d\n")

    assert api_key(account(api_key_env="K"), {}, tmp_path) == "a$b${c}d"


def test_the_environment_wins_over_dotenv(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("K=old")

    assert api_key(account(api_key_env="K"), {"K": KEY}, tmp_path) == KEY


def test_a_key_is_read_afresh_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n")
    first = api_key(account(api_key_file="key"), {}, tmp_path)
    file.write_text(f"{KEY}\n")

    assert (first, api_key(account(api_key_file="key"), {}, tmp_path)) == ("first", KEY)


def test_a_missing_variable_is_named_with_how_to_set_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        api_key(account(api_key_env="OPENAI_API_KEY"), {}, tmp_path)

    assert str(caught.value) == (
        "account 'openai' needs a key, but OPENAI_API_KEY is not set; "
        "run `export OPENAI_API_KEY=…` or add the line OPENAI_API_KEY=… to .env"
    )


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="key of account 'openai' does not exist; write the key into it"):
        api_key(account(api_key_file="key"), {}, tmp_path)


@pytest.mark.parametrize(
    "placeholder",
    [
        "YOUR_OPENAI_API_KEY",
        "YOUR_HOLYSHEEP_API_KEY",
        "your-key-here",
        "<your key>",
        "sk-...",
        "sk-…",
        "sk-xxxxxxxx",
        "sk-abc...",
        "changeme",
        "CHANGE_ME",
        "OPENAI_API_KEY",
        "$OPENAI_API_KEY",
        "${OPENAI_API_KEY}",
        "xxx",
        "TODO",
    ],
)
def test_a_placeholder_is_no_key(tmp_path: Path, placeholder: str) -> None:
    with pytest.raises(ConfigurationError, match="K of account 'openai' holds a placeholder, not a key"):
        api_key(account(api_key_env="K"), {"K": placeholder}, tmp_path)


@pytest.mark.parametrize("key", [KEY, "EMPTY", "ollama", "dummy", "gsk_abcXYZ123", "AIzaSyD-1234", "a" * 200])
def test_what_servers_really_take_is_a_key(tmp_path: Path, key: str) -> None:
    assert api_key(account(api_key_env="K"), {"K": key}, tmp_path) == key


@pytest.mark.parametrize("text", [f"Bearer {KEY}", f"{KEY}\nX-Evil: 1", f"{KEY}é", f"{KEY}\x00"])
def test_what_cannot_stand_in_a_header_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="set it to the key alone") as caught:
        api_key(account(api_key_env="K"), {"K": text}, tmp_path)

    assert KEY not in str(caught.value)
