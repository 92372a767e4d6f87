"""What may keep Batchmill from working here, checked one by one, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings

from .doctor_broker import check_broker
from .doctor_catalog import check_account, check_settings
from .doctor_check import Check, Level, refused
from .doctor_database import check_database
from .doctor_host import check_disk, check_flower, check_versions
from .doctor_models import check_model

__all__ = ["Check", "Level", "examine", "exit_code"]


def examine(load: Callable[[], Settings]) -> Iterator[Check]:
    """All checks in order, each as soon as it is done. ``load`` reads the settings."""
    yield check_versions()
    try:
        settings = load()
    except ConfigurationError as fault:
        yield refused("settings", fault)
        return
    catalog = settings.catalog
    yield check_settings(settings)
    yield check_disk(settings)
    yield check_broker(settings)
    yield from check_database(settings)
    for account in catalog.accounts.values():
        yield from check_account(account, settings, [m for m in catalog.models.values() if m.account == account.name])
    for model in catalog.models.values():
        if model.engine is not None:
            yield check_model(model)
    yield check_flower(settings)


def exit_code(checks: Iterable[Check]) -> int:
    """0 when nothing failed, 2 when something has to be set right, 3 when only jobs cannot go on."""
    return min((c.exit_code for c in checks if c.exit_code), default=0)
