"""The simulator's command line as a module, and the way back from a config to its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from batchmill_core.errors import ConfigurationError

from .config import LatencyShape, SimulatorConfig, parse_faults, parse_latency
from .server import run_simulator


def main(argv: Sequence[str] | None = None) -> int:
    """Serves; returns the exit code: 0 when told to stop, 2 when the configuration is wrong."""
    options = _parser().parse_args(argv)
    try:
        config = SimulatorConfig(
            latency_s=parse_latency(options.latency),
            latency_jitter=options.latency_jitter,
            latency_shape=LatencyShape(options.latency_shape),
            requests_per_minute=options.rpm,
            tokens_per_minute=options.tpm,
            faults=parse_faults(options.fail),
            seed=options.seed,
            api_key=options.api_key,
            context_tokens=options.context_tokens,
            kept_calls=options.kept_calls,
        )
        run_simulator(
            config, options.host, options.port, ready_file=options.ready_file, with_parent=options.with_parent
        )
    except ConfigurationError as error:
        sys.stderr.write(f"simulate: {error}\n")
        return 2
    return 0


def arguments_of(config: SimulatorConfig) -> list[str]:
    """The command line that ``main`` reads as ``config``."""
    given: dict[str, object] = {
        "latency": f"{config.latency_s:.9f}s",
        "latency-jitter": config.latency_jitter,
        "latency-shape": config.latency_shape,
        "rpm": config.requests_per_minute,
        "tpm": config.tokens_per_minute,
        "fail": ",".join(f"{fault.kind}:{fault.probability!r}" for fault in config.faults),
        "seed": config.seed,
        "api-key": config.api_key,
        "context-tokens": config.context_tokens,
        "kept-calls": config.kept_calls,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulate", description="An OpenAI-compatible provider that costs nothing.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: a free one")
    add("--latency", default="100ms", help="mean latency, as 100ms or 1.5s")
    add("--latency-jitter", type=float, default=0.0, help="spread relative to the mean, as 0.2")
    add("--latency-shape", choices=[shape.value for shape in LatencyShape], default=LatencyShape.LOGNORMAL.value)
    add("--rpm", type=int, help="requests per minute")
    add("--tpm", type=int, help="tokens per minute")
    add("--fail", default="", help="kind:probability,…; an HTTP status, cut, hang, malformed, nousage or empty")
    add("--seed", type=int, default=0)
    add("--api-key", help="refuse every other key")
    add("--context-tokens", type=int, default=131_072)
    add("--kept-calls", type=int, default=250_000, help="calls that GET /bill?calls=1 can list")
    add("--ready-file", type=Path, help="write the base URL here when listening")
    add("--with-parent", action="store_true", help="stop when standard input closes")
    return parser
