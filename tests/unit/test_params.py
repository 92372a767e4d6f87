"""Parameters that look misspelt are told, and sent as they are."""

from __future__ import annotations

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_producers.params import check_params, doubts


def test_a_parameter_that_looks_misspelt_is_doubted() -> None:
    assert list(doubts({"max_token": 5, "temperature": 0})) == [
        "parameter 'max_token' is sent as it is; did you mean 'max_tokens'?"
    ]


def test_a_providers_own_parameter_is_not_doubted() -> None:
    assert list(doubts({"safe_prompt": True, "thinking": {}})) == []


def test_a_parameter_that_batchmill_sets_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'stream' is set by Batchmill itself"):
        check_params({"stream": True})
