"""What helps somebody who does not know the commands: the first screen, `--help`, its examples, completion at TAB."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from batchmill.cli import app, main
from tests.prepared_jobs import CATALOGUE, PreparedFolder

PROGRAM = Path(sys.executable).with_name("batchmill")
WIDE = 80


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words, groups not counted."""
    for name, command in group.commands.items():
        words = (*before, name)
        yield from commands(command, words) if hasattr(command, "commands") else [(words, command)]


COMMANDS = dict(commands(typer.main.get_command(app)))


def examples(words: tuple[str, ...]) -> list[list[str]]:
    """The calls of our program in the examples of a command's help, each as its arguments."""
    shown = re.sub(r"\\(\[)", r"\1", COMMANDS[words].epilog or "").partition(":")[2].replace("\\\n", " ")
    calls: list[list[str]] = []
    for line in shown.splitlines():
        lexer = shlex.shlex(line.replace("$(", " ( "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        calls.append([])
        for token in lexer:
            if token == "batchmill" or set(token) <= set("();<>|&"):
                calls.append([])
            elif calls:
                calls[-1].append(token)
    return [call for call in calls if call and call[0] in {w[0] for w in COMMANDS}]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDE))


# The first screen


def test_without_a_command_it_says_what_it_is_and_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    said = capsys.readouterr().out
    assert "grinds data sets through models" in said
    assert re.findall(r"^  batchmill (\w+)", said, re.MULTILINE) == ["doctor", "simulate", "run"]
    assert max(map(len, said.splitlines())) < WIDE


def test_with_a_catalogue_the_commands_name_a_model_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batchmill.toml").write_text(CATALOGUE)

    main([])

    said = capsys.readouterr().out
    assert re.findall(r"^  batchmill (\w+)", said, re.MULTILINE) == ["doctor", "estimate", "run"]
    assert "batchmill run FILE -m sim-chat -p 'Label: {{ text }}' -o out.csv" in said


def test_with_jobs_the_commands_look_at_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PreparedFolder(tmp_path).database.close()

    main([])

    assert re.findall(r"^  batchmill (\w+)", capsys.readouterr().out, re.MULTILINE) == ["jobs", "watch", "run"]


def test_with_wrong_settings_the_first_command_is_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batchmill.toml").write_text("broker = 'x'")

    assert main([]) == 0

    assert "did you mean 'broker_url'?" in capsys.readouterr().out


def test_what_the_first_screen_shows_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batchmill.toml").write_text(CATALOGUE)
    main([])
    (tmp_path / "batchmill.toml").unlink()
    main([])
    shown = re.findall(r"^  (batchmill .*)$", capsys.readouterr().out, re.MULTILINE)

    assert len(shown) == 6
    for line in shown:
        understood(shlex.split(line)[1:])


# Help and its examples


def understood(arguments: list[str]) -> None:
    """Fails unless the commands take these arguments; runs nothing."""
    command: Any = typer.main.get_command(app)
    context, rest = None, arguments
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(
            command.make_context("batchmill", [], resilient_parsing=True), rest
        )
        assert command is not None, name
    if "--help" not in rest:
        context = command.make_context(arguments[0], list(rest))
        assert context.args == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert f"batchmill {' '.join(words)}" in re.split(r"Examples?: ", said)[-1]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_example_is_understood_by_the_commands(words: tuple[str, ...]) -> None:
    shown = examples(words)

    assert any(tuple(call[: len(words)]) == words for call in shown)
    for call in shown:
        understood(call)


def test_an_example_that_is_wrong_is_noticed() -> None:
    with pytest.raises(typer.TyperException, match="--modle"):
        understood(["run", "x.jsonl", "--modle", "m"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_line_of_an_example_is_broken_by_a_narrow_terminal(words: tuple[str, ...]) -> None:
    assert max(len(line) for line in COMMANDS[words].epilog.splitlines()) < WIDE


# Completion


def complete(*words: str, folder: Path) -> list[str]:
    """What bash offers for the last of these words, by the script that `--show-completion` prints."""
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    typed = " ".join(shlex.quote(word) for word in words)
    script = f"""
        eval "$(batchmill --show-completion bash)"
        COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
        "$(complete -p batchmill | sed 's/.*-F \\([^ ]*\\).*/\\1/')" batchmill
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**clean, "PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert complete("batchmill", "re", folder=tmp_path) == ["results", "resume", "retry"]
    assert complete("batchmill", "run", "--mod", folder=tmp_path) == ["--model"]


def test_bash_completes_models_and_jobs_of_the_folder(tmp_path: Path) -> None:
    folder = PreparedFolder(tmp_path)
    job = folder.submit()
    folder.database.close()

    assert complete("batchmill", "run", "x.jsonl", "-m", "sim", folder=tmp_path) == ["sim-chat"]
    assert complete("batchmill", "show", "", folder=tmp_path) == ["reviews", job.public_id]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("worker api --accounts ", ["sim"]),
        ("results x --status ok,tr", ["ok,truncated"]),
        ("results x --columns row,cu", ["row,custom_id"]),
        ("costs --by mo", ["model"]),
        ("worker gpu -m ", []),
    ],
)
def test_what_options_take_is_offered(
    typed: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batchmill.toml").write_text(CATALOGUE)

    assert offers(typed, monkeypatch, capsys) == offered


def test_a_folder_with_wrong_settings_offers_nothing_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batchmill.toml").write_text("broken")

    assert offers("show ", monkeypatch, capsys) == []
    assert capsys.readouterr().err == ""


def offers(typed: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What our program answers to bash."""
    words = ["batchmill", *typed.split(" ")]
    patch.setenv("COMP_WORDS", "\n".join(words))
    patch.setenv("COMP_CWORD", str(len(words) - 1))
    patch.setenv("_BATCHMILL_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_its_installation_writes(shell: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown, installed = (
        subprocess.run(
            [PROGRAM, option, shell], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for option in ("--show-completion", "--install-completion")
    )

    written = Path(installed.partition("installed in ")[2].splitlines()[0])
    assert written.is_relative_to(tmp_path)
    assert f"_BATCHMILL_COMPLETE=complete_{shell}" in shown
    assert written.read_text().strip() == shown.strip()


def test_completion_loads_neither_celery_nor_the_workers(tmp_path: Path) -> None:
    look = "import sys, atexit, batchmill.cli as c; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); c.main([])"
    env = {**os.environ, "COMP_WORDS": "batchmill ru", "COMP_CWORD": "1", "_BATCHMILL_COMPLETE": "complete_bash"}

    done = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["run"]
    assert not {"celery", "aiohttp", "requests", "batchmill_workers.launch"} & set(done.stderr.split())


def test_json_is_an_option_of_every_command_that_prints_facts() -> None:
    facts = ["run", "estimate", "watch", "jobs", "show", "costs", "resume", "retry", "status", "doctor"]

    assert [w for w in facts if "--json" not in json.dumps([p.opts for p in COMMANDS[w,].params])] == []
