"""Whole runs on a real vLLM: queue, worker and learner as processes, left alone or killed in the middle."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from protocol.client import QueueClient, QueueError
from protocol.status import Status
from rollout_queue.store.sqlite import read_ledger
from tests.e2e.conftest import SmallRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SMALL = [
    *("--rollout.group_size", "4"),
    *("--learner.groups_per_step", "4"),
    *("--learner.checkpoint_every", "4"),
    *("--queue.ticket_timeout_s", "4"),
    *("--queue.lease_timeout_s", "10"),
]
SHORT = [*SMALL, "--learner.steps", "12"]
LONG = [*SMALL, "--learner.steps", "24"]


def small(overrides: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("small_run", [overrides], indirect=True)


def status(run: SmallRun) -> Status | None:
    async def ask() -> Status:
        async with QueueClient(run.config.queue.url, patience_s=0.1, timeout_s=5) as client:
            return await client.status()

    try:
        return asyncio.run(ask())
    except QueueError:
        return None


def wait_for(run: SmallRun, reached: Callable[[Status], bool], timeout_s: float = 90) -> Status:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = status(run)
        if now is not None and reached(now):
            return now
        time.sleep(0.1)
    names = list(run.processes.running)
    pytest.fail("not reached:\n" + "\n".join(run.processes.log(name)[-1500:] for name in names))


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def summary(run: SmallRun) -> dict[str, Any]:
    return json.loads((run.config.run_dir / "summary.json").read_text())  # type: ignore[no-any-return]


def metrics(run: SmallRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.config.run_dir / "metrics.jsonl").read_text().splitlines()]


def check_ledger(run: SmallRun) -> Counter[str]:
    """I1: every ticket ended once, and no row of the data set was trained twice on the surviving time line."""
    rows = read_ledger(run.config.run_dir / "queue.db")
    assert len({row.ticket_id for row in rows}) == len(rows)
    trained = [row.index for row in rows if row.trained]
    assert len(trained) == len(set(trained))
    outcomes = Counter("trained" if row.trained else str(row.state) for row in rows)
    assert set(outcomes) <= {"trained", "dropped", "reissued"}, outcomes
    assert all(row.reason for row in rows if row.state == "dropped")
    return outcomes


@small(SHORT)
def test_the_whole_loop_trains_on_a_real_vllm(small_run: SmallRun) -> None:
    small_run.start("queue", "worker", "learner")
    seen = wait_for(small_run, lambda now: now.step >= 2)
    assert seen.groups.outstanding <= seen.groups.limit + small_run.config.learner.groups_per_step
    assert seen.workers[0].capacity == small_run.config.worker.episodes
    page = get(f"{small_run.config.queue.url}/metrics").decode()
    assert "slipstream_policy_version" in page
    shown = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "status", str(small_run.run_file)], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert "staleness" in shown.stdout

    assert small_run.processes.wait("learner", 120) == 0
    assert small_run.processes.wait("worker", 20) == 0
    result = summary(small_run)
    assert result["steps"] == 12
    assert result["sync_count"] == 13
    assert result["probe_max_abs_diff"] <= 1e-3
    assert 0 < result["staleness_max"] <= small_run.config.queue.max_staleness
    assert 0 < result["tokens_trained"] <= result["tokens_sampled"]
    assert result["groups_dropped"].get("overage", 0) == 0
    steps = metrics(small_run)
    assert [line["version"] for line in steps] == list(range(1, 13))
    assert check_ledger(small_run)["trained"] == result["groups_trained"]


@small(LONG)
def test_i1_worker_and_queue_are_killed_and_nothing_is_lost_or_trained_twice(small_run: SmallRun) -> None:
    processes = small_run.processes
    small_run.start("queue", "worker-a", "learner")
    wait_for(small_run, lambda now: now.step >= 3)
    processes.kill("worker-a")
    small_run.start("worker-b")
    wait_for(small_run, lambda now: now.step >= 8)
    before = wait_for(small_run, lambda now: now.groups.ready + now.groups.leased > 0)
    processes.kill("queue")
    small_run.start("queue")
    after = wait_for(small_run, lambda now: now.step >= 9)
    assert after.version >= before.version
    assert processes.wait("learner", 120) == 0
    assert processes.wait("worker-b", 20) == 0
    result = summary(small_run)
    assert result["steps"] == 24
    assert result["staleness_max"] <= small_run.config.queue.max_staleness
    outcomes = check_ledger(small_run)
    assert outcomes["trained"] == result["groups_trained"]
    assert outcomes["reissued"] >= 1, "the killed worker's tickets were not issued again"


@small(LONG)
def test_i2_the_learner_is_killed_and_resumes_where_its_checkpoint_was(small_run: SmallRun) -> None:
    processes = small_run.processes
    small_run.start("queue", "worker", "learner")
    before = wait_for(small_run, lambda now: now.step >= 6 and now.checkpoint_step is not None)
    processes.kill("learner")
    small_run.start("learner", resume=True)
    after = wait_for(small_run, lambda now: now.version > before.version + 1)
    assert after.learner.session == before.learner.session + 1
    assert processes.wait("learner", 120) == 0
    assert processes.wait("worker", 20) == 0
    steps = metrics(small_run)
    assert [line["step"] for line in steps] == list(range(1, 25))
    versions = [line["version"] for line in steps]
    assert versions == sorted(set(versions))
    assert versions[-1] > 24, "the versions of the lost steps were used again"
    result = summary(small_run)
    assert result["staleness_max"] <= small_run.config.queue.max_staleness
    assert check_ledger(small_run)["trained"] == sum(line["groups_trained"] for line in steps)
