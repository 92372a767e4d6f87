"""What engines in processes of their own share: messages on an event loop, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchmill_workers.gpu.chat_template import prompt_tokens
from batchmill_workers.gpu.engine_process import _reap
from batchmill_workers.gpu.frames import Channel, Frame, deliver_frames, encode


def test_messages_are_delivered_on_the_event_loop_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    taken: list[Frame] = []

    def take(frame: Frame) -> None:
        taken.append(frame)
        if len(taken) == 1:
            ours.sendall(encode({"id": 2})[3:])
        else:
            ours.close()

    ours.sendall(encode({"id": 1}) + encode({"id": 2})[:3])
    with theirs, pytest.raises(EOFError):
        asyncio.run(asyncio.wait_for(deliver_frames(Channel(theirs), take), 30))

    assert taken == [{"id": 1}, {"id": 2}]


def test_an_error_of_the_taker_ends_the_delivery() -> None:
    ours, theirs = socket.socketpair()

    def refuse(frame: Frame) -> None:
        raise ValueError(frame["id"])

    ours.sendall(encode({"id": 7}))
    with ours, theirs, pytest.raises(ValueError, match="7"):
        asyncio.run(asyncio.wait_for(deliver_frames(Channel(theirs), refuse), 30))


def test_what_an_engines_process_left_behind_ends_with_it() -> None:
    command = ["sh", "-c", "sleep 600 >&- & echo $!; kill -9 $$"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        how = _reap(process)

    assert how == "the engine's process was killed by signal 9"
    deadline = time.monotonic() + 30
    while _runs(left):
        assert time.monotonic() < deadline
        time.sleep(0.02)


SHARING = """
import os, signal, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=64)
print(memory.name, flush=True)
if os.fork() == 0:  # lives on, as vLLM's processes do
    time.sleep(600)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_of_a_killed_engines_processes_is_freed() -> None:
    command = [sys.executable, "-c", SHARING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        memory = Path("/dev/shm") / process.stdout.readline().strip()
        existed = memory.is_file()
        _reap(process)

    assert existed
    deadline = time.monotonic() + 30
    while memory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether the process runs; one that ended and that nobody waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Tokenizer:
    """A tokenizer that keeps what its template was given."""

    def __init__(self) -> None:
        self.given: dict[str, object] = {}

    def apply_chat_template(self, messages: object, **variables: object) -> str:
        self.given = variables
        return "text"

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(text), int(add_special_tokens)]}


def test_a_template_gets_further_variables_but_not_in_place_of_ours() -> None:
    tokenizer = Tokenizer()

    ids = prompt_tokens(
        tokenizer, [{"role": "user", "content": "Hi"}], variables={"enable_thinking": False, "tokenize": True}
    )

    assert ids == [4, 0]
    assert tokenizer.given == {
        "enable_thinking": False,
        "chat_template": None,
        "tokenize": False,
        "add_generation_prompt": True,
    }
