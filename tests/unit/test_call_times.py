"""The times of one call to a local engine, and its share of the device."""

from __future__ import annotations

import time
from contextlib import suppress

from batchmill_workers.gpu.call_times import CallTimes
from batchmill_workers.gpu.meter import DeviceMeter


def test_a_call_that_never_reached_the_device_is_charged_nothing() -> None:
    times = CallTimes(DeviceMeter())
    with times.running():
        pass

    assert times.device_ns is None


def test_the_device_is_charged_from_the_first_sign_until_the_call_ends_with_an_error_too() -> None:
    meter = DeviceMeter()
    times = CallTimes(meter)
    with suppress(RuntimeError), times.running():
        times.charge()
        times.charge()
        running = meter.running
        raise RuntimeError

    assert (running, meter.running) == (1, 0)
    assert times.device_ns == meter.busy_ns


def test_a_call_that_did_not_begin_has_no_times() -> None:
    times = CallTimes(DeviceMeter())

    assert (times.began_at_s, times.latency_ms, times.ms_until(time.monotonic_ns())) == (None, 0, None)


def test_moments_are_counted_from_the_begin_and_never_before_it() -> None:
    times = CallTimes(DeviceMeter())
    before_s = time.monotonic()
    with times.running():
        began_at_s = times.began_at_s
        moment_ns = time.monotonic_ns()

    assert began_at_s is not None
    assert before_s <= began_at_s <= moment_ns / 1e9
    assert times.ms_until(round(began_at_s * 1e9) + 5_500_000) == 5
    assert times.ms_until(0) == 0
