"""Weights are staged on every core of the run, and generation keeps to the server's."""

from __future__ import annotations

import os
import threading

import pytest

from slipstream.weight_sync.transports.staging_cores import on_staging_cores, staging_environment

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no affinity")


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def test_a_thread_that_is_started_inside_may_use_all_cores_and_the_caller_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = cores()
    for name, value in staging_environment(every).items():
        monkeypatch.setenv(name, value)
    seen = []

    def server() -> None:
        os.sched_setaffinity(0, {min(every)})
        with on_staging_cores():
            inner = threading.Thread(target=lambda: seen.append(cores()))
            inner.start()
            inner.join()
        seen.append(cores())

    thread = threading.Thread(target=server)
    thread.start()
    thread.join()
    assert seen == [every, {min(every)}]


def test_a_server_that_nobody_gave_cores_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in staging_environment([0]):
        monkeypatch.delenv(name, raising=False)
    before = cores()
    with on_staging_cores():
        assert cores() == before
