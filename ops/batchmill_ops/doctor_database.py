"""The checks of the database: does it answer, may it be written, has it our schema, and what stands in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchmill_core.errors import BatchmillError, ConfigurationError
from batchmill_core.settings import Settings
from batchmill_db import access, migrate
from batchmill_db.session import Database, DatabaseError

from .doctor_check import Check, Level, fail, how_to_set, ok, place_of, refused, warn
from .doctor_jobs import check_jobs

_NAME = "database"


def check_database(settings: Settings) -> Iterator[Check]:
    """Whether the database answers with the schema of this code; then, which jobs cannot go on."""
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        yield ok(_NAME, "embedded: made when needed")
        return
    try:
        database = Database(settings.database_address, pool_size=1)
    except BatchmillError as fault:
        yield refused(_NAME, fault)
        return
    try:
        yield from _check(database, settings)
    except DatabaseError as fault:
        yield fail(_NAME, _first_clause(fault), _advice(database, fault, settings))
    finally:
        database.close()


def _check(database: Database, settings: Settings) -> Iterator[Check]:
    if not database.run(access.may_write, patience_s=0):
        yield fail(
            _NAME,
            f"{database.address} may only be read: it is a standby, or default_transaction_read_only is on",
            f"name the primary: {how_to_set('database_url', _with(database), settings)}; or "
            f"`{_psql(database)} -c 'ALTER DATABASE \"{database.url.database}\" RESET default_transaction_read_only'`",
        )
        return
    yield ok(_NAME, f"{database.address} answers")
    schema = _check_schema(database, settings)
    yield schema
    if schema.level is Level.OK:
        yield from check_jobs(database, settings)


def _check_schema(database: Database, settings: Settings) -> Check:
    try:
        migrate.check(database)
    except ConfigurationError as fault:
        detail, _, advice = str(fault).partition("; ")
        if "newer" in detail:
            return fail("schema", detail, f"{advice}: `pip install --upgrade batchmill`")
        if settings.database_url is None:  # its own file is brought up to date by whichever command comes next
            return warn("schema", detail, f"{advice}; the next `batchmill run` does it too")
        return fail("schema", detail, advice)
    return ok("schema", f"version {migrate.version(database)}")


def _advice(database: Database, fault: DatabaseError, settings: Settings) -> str:
    text = f"{fault} {getattr(fault.__cause__, 'orig', '')}"
    return (
        _advice_for_file(database, text)
        if database.dialect == "sqlite"
        else _advice_for_server(database, text, settings)
    )


def _advice_for_file(database: Database, text: str) -> str:
    path = Path(database.url.database or "")
    if "may only be read" in text:
        return f'`sudo chown "$USER" {path.parent} {path}*` and `chmod u+rwx {path.parent}; chmod u+rw {path}*`'
    if not path.parent.is_dir():
        return f"`mkdir -p {path.parent}`"
    if "not a database" in text or "malformed" in text:
        return f"put a backup in its place, or set it aside and begin anew: `mv {path} {path}.damaged`"
    if "is full" in text:
        return f"`df -h {path.parent}` shows the disk: make room"
    return f"`fuser -v {path}` shows who holds it: end that, or wait"


def _advice_for_server(database: Database, text: str, settings: Settings) -> str:
    url, where = database.url, place_of("database_url", settings)
    if ("password" in text and "authentication" in text) or "no password supplied" in text:
        return f"correct the password: {how_to_set('database_url', _with(database, password='PASSWORD'), settings)}"
    if "role" in text and "does not exist" in text:
        return f"correct the user in {where}, or make it: `createuser -h {url.host} -p {_port(database)} --pwprompt {url.username}`"
    if "does not exist" in text:
        return f"make it: `createdb -h {url.host} -p {_port(database)} -U {url.username} {url.database}`, then `batchmill db upgrade`"
    if "resolve" in text or "not known" in text:
        return f"correct the host name in {where}"
    if "too many" in text:
        return f'`{_psql(database)} -c "ALTER SYSTEM SET max_connections = 300"` and restart it, or run fewer workers'
    return f"start it: `docker compose up -d postgres` or `sudo systemctl start postgresql`; or correct {where}"


def _with(database: Database, *, password: str | None = None) -> str:
    url = database.url.set(password=password or database.url.password)
    return url.render_as_string(hide_password=password is None)


def _port(database: Database) -> int:
    return database.url.port or 5432


def _psql(database: Database) -> str:
    url = database.url
    return f"psql -h {url.host} -p {_port(database)} -U {url.username} -d {url.database}"


def _first_clause(fault: Exception) -> str:
    return str(fault).partition("; ")[0]
