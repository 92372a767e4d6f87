"""What is told of the command that starts a server of the user's own."""

from __future__ import annotations

import pytest

from batchmill_workers.gpu.server_launch import shown


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["serve", "--api-key", "sk-1", "--port", "1"], "serve --api-key *** --port 1"),
        (["serve", "--api-key=sk-1"], "serve --api-key=***"),
        (["serve", "--hf-token", "two words"], "serve --hf-token ***"),
        (["env", "HF_TOKEN=hf_1", "serve"], "env HF_TOKEN=*** serve"),
        (["sh", "-c", "exec serve --api-key sk-1 --port 1"], "sh -c 'exec serve --api-key *** --port 1'"),
        (
            ["serve", "--max-tokens", "5", "--tokenizer-mode", "slow", "key", "x"],
            "serve --max-tokens 5 --tokenizer-mode slow key x",
        ),
    ],
)
def test_a_command_is_told_without_its_keys(command: list[str], told: str) -> None:
    assert shown(command) == told
