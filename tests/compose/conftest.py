"""Fixtures of the tests in containers; run them with `make test-compose`."""

from __future__ import annotations

import pytest

from tests.compose.engine import build_image


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this tree, built once per run."""
    return build_image()
