"""The commands that keep things running: `up`, `down`, `status`, `flower`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchmill_core.settings import Settings, load_settings

from .help_examples import examples
from .options import JsonOption
from .running import attached
from .terminal import print_json, say, tell

if TYPE_CHECKING:
    from batchmill_ops.flower_folder import Running
    from batchmill_ops.flower_login import Login
    from batchmill_ops.up import Standing

# What a command runs is imported by the command: all of it together takes a second, which `--help` need not.

_PANEL = "Operating"
FLOWER_PORT = 5555
AddressOption = Annotated[
    str, typer.Option("--address", metavar="A", help="Where Flower listens; 0.0.0.0 for other hosts to reach it.")
]
PrefixOption = Annotated[
    str, typer.Option("--url-prefix", metavar="PATH", help="Flower's path behind a proxy, such as flower.")
]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module, in the order that help lists them."""
    for name in ("up", "down", "status", "flower"):
        app.command(name, rich_help_panel=_PANEL, epilog=examples(name))(globals()[f"{name}_command"])


def up_command(
    port: Annotated[int | None, typer.Option("--port", metavar="P", min=1, max=65535, help="The broker's; by default any free one.")] = None,
    flower_port: Annotated[int, typer.Option("--flower-port", metavar="P", min=0, max=65535, help="Flower's; 0 for any free one.")] = FLOWER_PORT,
    address: AddressOption = "127.0.0.1",
    url_prefix: PrefixOption = "",
    no_flower: Annotated[bool, typer.Option("--no-flower", help="The stack alone.")] = False,
) -> None:  # fmt: skip
    """Keep this folder's embedded stack running, with Flower, until `batchmill down`.

    Jobs that are submitted meanwhile are worked on at once: workers start for every queue that has work.
    """
    from batchmill_ops.flower import Place
    from batchmill_ops.flower_login import login_for
    from batchmill_ops.stack_folder import StackFolder
    from batchmill_ops.up import Wish, standing, start

    settings = load_settings()
    running = standing(settings)
    if running is not None:
        say("it runs already, as it was started; to change it: batchmill down, then batchmill up")
        _tell_standing(running, settings, None)
        return
    place = None if no_flower else Place(port=flower_port, address=address, prefix=url_prefix)
    login = None
    if place is not None and settings.embedded:
        StackFolder(path=settings.state_folder).prepare()
        login = login_for(settings)
        _show_new_password(login)
    _tell_standing(start(settings, Wish(port=port, flower=place)), settings, login)


def _tell_standing(running: Standing, settings: Settings, login: Login | None) -> None:
    tell(f"broker   127.0.0.1:{running.broker_port} (process {running.pid} keeps it)")
    if running.flower is not None:
        tell(f"flower   {running.flower.url}  {_password_place(settings, login)}")
    say("submit jobs in this folder; `batchmill status` shows what runs, `batchmill down` ends it")


def _show_new_password(login: Login) -> None:
    """Once, to whoever made it; later it is found where `_password_place` says."""
    if login.is_new:
        tell(f"password {login.password}  (user {login.user}; made now, shown this once)")


def _password_place(settings: Settings, login: Login | None) -> str:
    if settings.flower_password is not None:
        return "user batchmill, the password is the configured flower_password"
    shown = " and above" if login is not None and login.is_new else ""
    return f"user batchmill, the password is in {settings.state_folder / 'flower.json'}{shown}"


def down_command() -> None:
    """End what `batchmill up` started. Calls in flight may finish; Ctrl-C ends them at once."""
    from batchmill_ops.stack import is_running
    from batchmill_ops.up import standing, stop

    settings = load_settings()
    if standing(settings) is not None:
        say("draining: calls in flight may finish; press Ctrl-C to end them at once")
    ended = stop(settings, impatient=lambda: say("ending at once; calls in flight are lost, their cost is unknown"))
    left = is_running(settings)
    if ended is None:
        tell("nothing runs here by `batchmill up`" + (_for_others() if left else ""))
        return
    tell("it is down" + (_for_others() if left else "; what was answered is saved, jobs go on with the next `up`"))


def _for_others() -> str:
    return "; the stack goes on for a `batchmill run` or another program that uses it"


def status_command(as_json: JsonOption = False) -> None:
    """Show what runs here: processes, ports, workers, Flower's address, and the queues with work."""
    from batchmill_ops.status import read_status

    from .status_table import status_table

    status = read_status(load_settings())
    if as_json:
        print_json(status.as_dict())
        return
    for part in status_table(status):
        tell(part)


def flower_command(
    port: Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="0 for any free one.")] = FLOWER_PORT,
    address: AddressOption = "127.0.0.1",
    url_prefix: PrefixOption = "",
) -> None:  # fmt: skip
    """Run Flower here, until Ctrl-C: workers, tasks with their results, and metrics for Prometheus.

    On the configured broker, else on this folder's embedded stack, which it keeps running. A login is needed for every
    page: user batchmill, password from BATCHMILL_FLOWER_PASSWORD, else a generated one. BATCHMILL_METRICS_TOKEN lets
    Prometheus read /metrics with a bearer token.
    """
    from batchmill_ops.flower import Place, run_flower

    settings = load_settings()

    def ready(running: Running, login: Login) -> None:
        _show_new_password(login)
        tell(f"flower   {running.url}  {_password_place(settings, login)}")
        say("Ctrl-C ends it")

    with attached(settings) as stack:
        run_flower(stack.settings, Place(port=port, address=address, prefix=url_prefix), ready=ready)
