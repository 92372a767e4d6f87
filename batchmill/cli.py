"""The command line: its commands, and how errors become one line and an exit code."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

import typer

from batchmill_core.errors import BatchmillError, JobStopped

from . import cli_gpus, cli_jobs, cli_ops, cli_run, cli_stack, cli_watch
from .output import ReaderGone
from .terminal import say
from .version import __version__

EXIT_USAGE, EXIT_STOPPED, EXIT_INTERRUPTED = 2, 3, 130

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"batchmill {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Grind data sets through models: durable, counted, fast.

    Exit codes: 0 done, 1 some rows ended badly, 2 usage or configuration, 3 the job is stopped.
    """
    if context.invoked_subcommand is None:
        from .welcome import welcome

        sys.stdout.write(welcome())


cli_run.add_commands(app)
cli_watch.add_commands(app)
cli_jobs.add_commands(app)
cli_stack.add_commands(app)
cli_ops.add_commands(app)
cli_gpus.add_commands(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; answers the exit code. Everything that is raised on purpose becomes one line."""
    logging.basicConfig(level=logging.WARNING, format="batchmill: %(message)s")
    try:
        code = app(args=arguments, prog_name="batchmill", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as fault:
        return _refuse(_usage(fault), EXIT_USAGE)
    except JobStopped as stop:
        return _refuse(str(stop), EXIT_STOPPED)
    except BatchmillError as fault:
        return _refuse(str(fault), EXIT_USAGE)
    except (BrokenPipeError, ReaderGone):
        return _quiet_end()
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _refuse(message: str, code: int) -> int:
    if message:
        say(f"batchmill: {message}")
    return code


def _usage(fault: typer.TyperException) -> str:
    """What typer says, with where to read more; nothing when it has printed the help by itself."""
    message = _with_nearest(fault.format_message().replace("Value error, ", ""))
    context = getattr(fault, "ctx", None)
    return f"{message} (see `{context.command_path} --help`)" if message and context is not None else message


def _with_nearest(message: str) -> str:
    """A refused choice with the nearest one that there is; the options that typer thinks of, in our words."""
    message = re.sub(r"\(Possible options: (.*)\)", lambda found: f"Did you mean {_either(found[1])}?", message)
    choice = re.search(r"'([^']*)' is not one of ('.*')\.", message)
    near = get_close_matches(choice[1], choice[2].strip("'").split("', '"), n=1) if choice else []
    return f"{message} Did you mean {near[0]!r}?" if near else message


def _either(names: str) -> str:
    return " or ".join(names.split(", "))


def _quiet_end() -> int:
    """Who read our output has had enough of it. What is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
