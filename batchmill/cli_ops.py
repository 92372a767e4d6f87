"""The commands of running it: `worker api`, `worker gpu`, `simulate`, `doctor`, `db upgrade`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from batchmill_core.errors import ConfigurationError, JobStopped
from batchmill_core.settings import HOME_VARIABLE, Settings, load_settings
from batchmill_db import counters, jobs
from batchmill_db.session import Connection, Database

from .completing import account_names, job_references, local_model_names
from .doctor_lines import check_lines
from .help_examples import examples
from .opening import opened
from .options import JsonOption
from .running import attached
from .terminal import facts, print_json, say, tell

if TYPE_CHECKING:
    from batchmill_db.verify import Violation
    from batchmill_ops.doctor import Check
    from batchmill_workers.launch import ProcessPlan, Supervisor

# What a command runs is imported by the command: all of it together takes a second, which `--help` need not.

_PANEL = "Operating"
_LOOK_EVERY_S = 0.2


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module, in the order that help lists them."""
    worker = typer.Typer(help="Start workers on this host, until Ctrl-C or SIGTERM drains them.", no_args_is_help=True)
    worker.command("api", epilog=examples("worker api"))(worker_api_command)
    worker.command("gpu", epilog=examples("worker gpu"))(worker_gpu_command)
    app.add_typer(worker, name="worker", rich_help_panel=_PANEL)
    app.command("simulate", rich_help_panel=_PANEL, epilog=examples("simulate"))(simulate_command)
    app.command("doctor", rich_help_panel=_PANEL, epilog=examples("doctor"))(doctor_command)
    db = typer.Typer(help="The database.", no_args_is_help=True)
    db.command("upgrade", epilog=examples("db upgrade"))(db_upgrade_command)
    app.add_typer(db, name="db", rich_help_panel=_PANEL)


def worker_api_command(
    accounts: Annotated[str | None, typer.Option("--accounts", metavar="A,B", help="By default all whose key is to be had.", autocompletion=account_names)] = None,
    processes: Annotated[int, typer.Option("--processes", metavar="N", min=1, help="How many; limits are kept by each of them apart.")] = 1,
) -> None:  # fmt: skip
    """Serve provider accounts: send the rows of their queues as HTTP calls.

    The first Ctrl-C or SIGTERM lets calls in flight finish, the second stops at once.
    """
    from batchmill_workers.launch import plan_api

    settings = load_settings()
    names = None if accounts is None else [a.strip() for a in accounts.split(",") if a.strip()]
    _work(settings, plan_api(settings, names, processes=processes))


def worker_gpu_command(
    model: Annotated[str, typer.Option("--model", "-m", metavar="M", help="A model of batchmill.toml that has an engine.", autocompletion=local_model_names)],
    devices: Annotated[str, typer.Option("--devices", metavar="D", help="all, 0,1 (one process each), 0+1 (one process over both) or cpu.")] = "all",
) -> None:  # fmt: skip
    """Serve one model with one process per device of this host, pinned to it."""
    from batchmill_workers.launch import plan_gpu

    settings = load_settings()
    _work(settings, plan_gpu(settings, model, devices))


def _work(settings: Settings, plans: Sequence[ProcessPlan]) -> None:
    """Runs worker processes until a signal, or until none of them can start."""
    from batchmill_workers.launch import Supervisor

    logging.getLogger("batchmill_workers.launch").setLevel(logging.INFO)
    with attached(settings) as stack:
        where = {HOME_VARIABLE: str(settings.home), "BATCHMILL_BROKER_URL": stack.broker_url}
        supervisor = Supervisor(plans, settings=stack.settings, environment=where)
        supervisor.start()
        processes = "one worker process serves" if len(plans) == 1 else f"{len(plans)} worker processes serve"
        say(f"{processes} {', '.join(plans[0].queues)}; Ctrl-C drains and ends")
        try:
            _watch(supervisor, len(plans))
        except KeyboardInterrupt:
            say("draining: calls in flight may finish; press Ctrl-C again to stop at once")
        finally:
            _end(supervisor)


def _watch(supervisor: Supervisor, processes: int) -> None:
    never = threading.Event()
    while not never.wait(_LOOK_EVERY_S):
        if len(supervisor.unfit) >= processes:
            raise ConfigurationError(f"no worker could start: {'; '.join(dict.fromkeys(supervisor.unfit))}")


def _end(supervisor: Supervisor) -> None:
    try:
        supervisor.stop()
    except KeyboardInterrupt:
        supervisor.kill()
        raise JobStopped(
            "stopped at once; rows in flight go to other workers, their cost is booked as unknown"
        ) from None


def simulate_command(
    port: Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="0: a free one.")] = 0,
    latency: Annotated[str, typer.Option("--latency", metavar="T", help="Mean, as 100ms or 1.5s.")] = "100ms",
    latency_jitter: Annotated[float, typer.Option("--latency-jitter", metavar="X", help="Spread relative to the mean, as 0.2.")] = 0.0,
    rpm: Annotated[int | None, typer.Option("--rpm", metavar="N", help="Requests per minute.")] = None,
    tpm: Annotated[int | None, typer.Option("--tpm", metavar="N", help="Tokens per minute.")] = None,
    fail: Annotated[str, typer.Option("--fail", metavar="K:P,…", help="Kind:probability; an HTTP status, cut, hang, malformed, nousage or empty.")] = "",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same faults.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
) -> None:  # fmt: skip
    """Run a simulated OpenAI-compatible provider: the models sim-chat and sim-embed, and GET /bill."""
    from batchmill_ops.simulator import SimulatorConfig, parse_faults, parse_latency, run_simulator

    config = SimulatorConfig(
        latency_s=parse_latency(latency),
        latency_jitter=latency_jitter,
        requests_per_minute=rpm,
        tokens_per_minute=tpm,
        faults=parse_faults(fail),
        seed=seed,
    )
    try:
        run_simulator(config, host, port)
    except OSError as fault:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {fault.strerror or fault}; try another port"
        ) from fault


def doctor_command(
    verify_job: Annotated[str | None, typer.Option("--verify", metavar="JOB", help="Check the invariants of this job's data instead.", autocompletion=job_references)] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Check what may be wrong here, and say what to type: settings, disk, broker, database, jobs, keys, models, Flower.

    Exit code 2 when something has to be set right, 3 when only a job cannot go on (no worker for its queue, or its
    account is stopped); with --verify, 1 when an invariant is broken.
    """
    from batchmill_ops.doctor import examine, exit_code

    if verify_job is not None:
        _verify(verify_job, as_json=as_json)
        return
    checks = []
    for check in examine(load_settings):
        checks.append(check)
        if not as_json:
            _tell_check(check)
    if as_json:
        print_json([c.as_dict() for c in checks])
    else:
        say(_summary(checks))
    raise typer.Exit(exit_code(checks))


def _tell_check(check: Check) -> None:
    console = facts()
    for line in check_lines(check, console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)


def _summary(checks: Sequence[Check]) -> str:
    failed = sum(c.level.value == "fail" for c in checks)
    warned = sum(c.level.value == "warn" for c in checks)
    if failed:
        return f"{failed} of {len(checks)} checks failed; begin with the first, later ones may follow from it"
    return f"nothing is broken; {warned} to look at" if warned else "all is well"


def _verify(reference: str, *, as_json: bool) -> None:
    from batchmill_db.verify import verify

    def work(conn: Connection) -> tuple[str, list[Violation]]:
        job = jobs.find(conn, reference)
        counters.sum_counters(conn, [job.id])
        return job.public_id, verify(conn, job.id)

    with opened(load_settings()) as database:
        job_id, violations = database.run(work)
    if as_json:
        found = [{"name": v.name, "detail": v.detail, "example": v.example} for v in violations]
        print_json({"job_id": job_id, "violations": found})
    for v in violations if not as_json else ():
        tell(Text.assemble(("fail ", "red"), (v.name, "bold"), f": {v.detail} ({v.example})"))
    if violations:
        raise typer.Exit(1)
    if not as_json:
        tell(f"job {job_id}: every invariant holds")


def db_upgrade_command() -> None:
    """Bring the database to the schema of this version. Safe when many processes start at once."""
    from batchmill_db import migrate

    settings = load_settings()
    if settings.database_url is None:
        settings.state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = Database(settings.database_address)
    try:
        database.run(lambda _: None, patience_s=10)
        before = migrate.upgrade(database)
        now = migrate.version(database)
    finally:
        database.close()
    done = f"has schema {now} already" if before == now else f"is at schema {now} (before: {before or 'none'})"
    sys.stdout.write(f"{database.address} {done}\n")
