"""The lanes of this process, one per queue that it serves."""

from __future__ import annotations

from collections.abc import Mapping

from batchmill_core.engine import Engine
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings

from .api_lane import ApiLane
from .lane import Lane
from .local_lane import LocalLane


def lanes_for(settings: Settings, queues: tuple[str, ...], device: str) -> Mapping[str, Lane]:
    """A lane per queue, not started. Raises ConfigurationError for a queue that the catalogue does not have."""
    catalog = settings.catalog
    lanes: dict[str, Lane] = {}
    for name in queues:
        wing, _, rest = name.partition(".")
        if wing == "api":
            lanes[name] = ApiLane(catalog.account(rest), catalog, settings)
        elif wing == "gpu":
            lanes[name] = LocalLane(catalog.model(rest), device)
        else:
            raise ConfigurationError(f"queue {name!r} is neither api.ACCOUNT nor gpu.MODEL")
    return lanes


def local_engines(lanes: Mapping[str, Lane]) -> Mapping[str, Engine]:
    """The engines of these lanes that run on a device of this host, by model."""
    return {name.partition(".")[2]: lane.engine for name, lane in lanes.items() if isinstance(lane, LocalLane)}
