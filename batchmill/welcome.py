"""What `batchmill` alone says: what it is, and three commands that make sense here and now."""

from __future__ import annotations

from collections.abc import Iterator

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, load_settings
from batchmill_core.settings_file import FILE_NAME

from .version import __version__

_WHAT = """\
Batchmill {version} grinds data sets through models: it asks a model about every
row of a file, on as many workers and hosts as you start. No row is lost, what
is saved is never paid for again, every call is counted.
"""
_MORE = """\
batchmill --help lists all commands, each with --help and examples.
batchmill --install-completion makes TAB complete commands, models and jobs.
"""


def welcome() -> str:
    """A screen for whoever typed no command."""
    try:
        steps = list(_steps(load_settings()))
    except ConfigurationError as fault:
        steps = [("batchmill doctor", f"the settings here are wrong: {fault}"), *_FIRST[1:]]
    shown = "\n".join(f"  {command}\n      {why}" for command, why in steps)
    return f"{_WHAT.format(version=__version__)}\nNext:\n{shown}\n\n{_MORE}"


_FIRST = (
    ("batchmill doctor", "what is set up here, what is missing, and what to type"),
    ("batchmill simulate --port 8765", "a provider to try things with: no key, no cost"),
    ("batchmill run --help", "the one command you need: a file in, answers out"),
)


def _steps(settings: Settings) -> Iterator[tuple[str, str]]:
    catalog = settings.catalog
    if not catalog.models:
        yield ("batchmill doctor", f"no model in {FILE_NAME} yet: what is set up here, what is missing")
        yield from _FIRST[1:]
        return
    model = next(iter(catalog.models))
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        yield ("batchmill doctor", f"check the keys and models of {FILE_NAME} before the first job")
        yield (f"batchmill estimate FILE -m {model} -p 'Label: {{{{ text }}}}'", "what it would come to, with no call")
        yield (f"batchmill run FILE -m {model} -p 'Label: {{{{ text }}}}' -o out.csv", "do it: a file in, answers out")
        return
    yield ("batchmill jobs", "what there is, and how it stands")
    yield ("batchmill watch", "the newest job that is not done, live")
    yield (f"batchmill run FILE -m {model} -p 'Label: {{{{ text }}}}' -o out.csv", "the next one")
