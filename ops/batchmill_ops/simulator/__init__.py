"""A simulated OpenAI-compatible provider with latency, limits, faults by seed, and a bill of its own."""

from .config import FaultRate, LatencyShape, SimulatorConfig, parse_faults, parse_latency
from .prices import CHAT_MODEL, EMBED_MODEL, PRICES, USD_PER_MTOK
from .process import SimulatorHandle, simulated
from .server import Simulator, run_simulator

__all__ = [
    "CHAT_MODEL",
    "EMBED_MODEL",
    "PRICES",
    "USD_PER_MTOK",
    "FaultRate",
    "LatencyShape",
    "Simulator",
    "SimulatorConfig",
    "SimulatorHandle",
    "parse_faults",
    "parse_latency",
    "run_simulator",
    "simulated",
]
