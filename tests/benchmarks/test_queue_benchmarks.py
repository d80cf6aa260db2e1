"""The queue's benchmarks run, in a small form: they start real queues, and their figures are of what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.queue_process import ROOT


def run(benchmark: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=120).stdout)


def test_the_cost_of_a_cycle_is_measured_beside_two_echos() -> None:
    (found,) = run(
        "queue_cost", "cycle", "--stores", ":memory:", "--kilobytes", "8", "--groups", "400", "--rounds", "1"
    )
    programs = {"new :memory:", "echo uvicorn", "echo starlette"}
    assert all(found[figure].keys() == programs for figure in ("cpu_ms_per_group", "wall_ms_per_group", "ratio"))
    assert 8 * 1024 < found["group_bytes"] < 10 * 1024
    assert found["ratio"]["echo starlette"] == 1


def test_groups_that_fill_a_queue_all_come_out_again() -> None:
    (found,) = run("queue_cost", "memory", "--groups", "70", "--kilobytes", "8")
    assert found["queue"] == "new sqlite"
    assert found["groups"] == 70
    assert found["puts_per_s"] > 0
    assert found["leases_per_s"] > 0
    assert 0 < found["rss_mb_empty"] <= found["rss_mb"] < 1000


def test_open_pages_are_measured_beside_none() -> None:
    arguments = ("--stores", ":memory:", "--kilobytes", "8", "--groups", "300", "--rounds", "1", "--idle-s", "1")
    (found,) = run("queue_cost", "page", *arguments)
    assert found["viewers"] == [0, 3]
    figures = ("cpu_ms_per_group", "groups_per_s", "cpu_share_idle", "/healthz_p50_p99_ms", "/v1/status_p50_p99_ms")
    assert all(len(found[figure]) == 2 for figure in figures)
    assert all(0 < middle <= late for middle, late in found["/v1/status_p50_p99_ms"])


@pytest.mark.wide
def test_a_queue_that_is_killed_keeps_its_promises() -> None:
    (found,) = run("queue_faults", "--schedules", "sqlite_kills", "--faults", "1")
    assert found["violations"] == []
    assert found["faults"] == 1
    assert found["trained"] > 0
