"""Requests per second of one simulator process: it must not be what other benchmarks measure.

``python tests/benchmarks/bench_simulator.py`` takes about eight seconds. The client is as thin as a client can be: many
keep-alive connections that send the same bytes and look for the end of the answer. Besides what was reached, it prints
the CPU time per request of the server: on a busy machine, or where two virtual cores are one real one, that says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from typing import cast
from urllib.parse import urlsplit

import psutil
import uvloop

from batchmill_ops.simulator import SimulatorConfig, simulated

REVIEW = "I bought it in May and use it daily. The battery is excellent, the strap less so. " * 3


class _Caller(asyncio.Protocol):
    """Sends the next request as soon as the last answer is whole."""

    def __init__(self, request: bytes, done: list[int]) -> None:
        self._request = request
        self._done = done
        self._missing = 0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self._buffer.index(b"content-length: ") + 16
        length = int(self._buffer[at : self._buffer.index(b"\r", at)])
        if len(self._buffer) < end + 4 + length:
            return
        assert self._buffer.startswith(b"HTTP/1.1 200"), self._buffer
        self._buffer = b""
        self._done[0] += 1
        self._transport.write(self._request)

    def stop(self) -> None:
        self._transport.abort()


def request_bytes(address: str) -> bytes:
    messages = [
        {"role": "system", "content": "You label product reviews."},
        {"role": "user", "content": f"Is this review positive, negative or neutral? {REVIEW}"},
    ]
    body = json.dumps({"model": "sim-chat", "messages": messages, "max_tokens": 8, "temperature": 0}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer sk-bench\r\nAccept: */*\r\n"
        "Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\nContent-Type: application/json\r\n"
        f"Idempotency-Key: 00000000-0000-0000\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(
    address: str, *, connections: int, rounds: int, round_s: float, server: psutil.Process
) -> list[tuple[float, float]]:
    """Per round: requests per second, and server CPU seconds per request, once the connections are warm."""
    host, port = address.split(":")
    done, request = [0], request_bytes(address)
    loop = asyncio.get_running_loop()
    callers = [
        (await loop.create_connection(lambda: _Caller(request, done), host, int(port)))[1] for _ in range(connections)
    ]
    await asyncio.sleep(0.3)
    measured = []
    for _ in range(rounds):
        before, cpu_before, started = done[0], sum(server.cpu_times()[:2]), time.perf_counter()
        await asyncio.sleep(round_s)
        answered, taken = done[0] - before, time.perf_counter() - started
        measured.append((answered / taken, (sum(server.cpu_times()[:2]) - cpu_before) / max(1, answered)))
    for caller in callers:
        caller.stop()
    return measured


def measure(*, latency_s: float, connections: int, rounds: int) -> None:
    with simulated(SimulatorConfig(latency_s=latency_s, latency_jitter=0.2)) as handle:
        server = psutil.Process(handle.process.pid)
        address = urlsplit(handle.base_url).netloc
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            work = load(address, connections=connections, rounds=rounds, round_s=0.6, server=server)
            measured = runner.run(work)
        memory_mb = server.memory_info().rss / 1e6
    rates, cpu_s = [rate for rate, _ in measured], statistics.median(cpu_s for _, cpu_s in measured)
    print(
        f"latency {latency_s * 1000:3.0f} ms, {connections:4d} connections: median {statistics.median(rates):,.0f} requests/s "
        f"(best {max(rates):,.0f}), {cpu_s * 1e6:.0f} µs of CPU per request, {memory_mb:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of 0.6 s, per measurement")
    rounds = parser.parse_args().rounds
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    measure(latency_s=0.0, connections=64, rounds=rounds)
    measure(latency_s=0.1, connections=1500, rounds=rounds)


if __name__ == "__main__":
    main()
