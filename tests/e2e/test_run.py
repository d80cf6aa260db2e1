"""Whole runs on a real vLLM: queue, worker and learner as processes, left alone or killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.rollout_queue.store import open_for_reading
from tests.e2e.conftest import SmallRun

# The waits end by themselves where nothing moves any more; the time-out is for what they cannot see.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop"

SMALL = [
    *("--rollout.group_size", "4"),
    *("--learner.groups_per_step", "4"),
    *("--learner.checkpoint_every", "4"),
    *("--queue.ticket_timeout_s", "4"),
    *("--queue.lease_timeout_s", "10"),
]
SHORT = [*SMALL, "--learner.steps", "12"]
LONG = [*SMALL, "--learner.steps", "16"]


def small(overrides: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("small_run", [overrides], indirect=True)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def summary(run: SmallRun) -> dict[str, Any]:
    return json.loads((run.config.run_dir / "summary.json").read_text())  # type: ignore[no-any-return]


def metrics(run: SmallRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.config.run_dir / "metrics.jsonl").read_text().splitlines()]


def newest_checkpoint(run: SmallRun) -> int:
    """Its step."""
    names = [folder.name.removeprefix("step-") for folder in (run.config.run_dir / "checkpoints").glob("step-*")]
    return max(int(name) for name in names if name.isdigit())


def check_ledger(run: SmallRun) -> Counter[str]:
    """I1: every ticket ended once, and no row of the data set was trained twice on the surviving time line."""
    rows = open_for_reading(run.config).read_ledger()
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
    seen = small_run.wait_for(lambda now: now.step >= 2)
    assert seen.groups.outstanding <= seen.groups.limit + small_run.config.learner.groups_per_step
    assert seen.workers[0].capacity == small_run.config.worker.episodes
    page = get(f"{small_run.config.queue.address}/metrics").decode()
    assert "slipstream_policy_version" in page
    shown = subprocess.run(
        [sys.executable, "-m", "slipstream.deploy.cli", "status", str(small_run.run_file)],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "staleness" in shown.stdout

    assert small_run.wait("learner") == 0
    assert small_run.wait("worker") == 0
    result = summary(small_run)
    assert result["steps"] == 12
    assert result["sync_count"] + result["sync_skipped"] == 13
    assert result["probe_max_abs_diff"] <= 1e-3
    assert 0 < result["staleness_max"] <= small_run.config.queue.max_staleness
    assert 0 < result["tokens_trained"] <= result["tokens_sampled"]
    assert result["groups_dropped"].get("overage", 0) == 0
    steps = metrics(small_run)
    assert [line["version"] for line in steps] == list(range(1, 13))
    assert check_ledger(small_run)["trained"] == result["groups_trained"]


@pytest.mark.parametrize(
    "small_run",
    [
        pytest.param([*SHORT, "--learner.steps", "6", "--learner.script", str(OWN_LOOP / name)], id=name, marks=marks)
        for name, marks in (("trainer.py", ()), ("fsdp.py", pytest.mark.wide))
    ],
    indirect=True,
)
def test_a_trainer_of_one_s_own_trains_on_a_real_vllm(small_run: SmallRun) -> None:
    small_run.start("queue", "worker", "learner")
    assert small_run.wait("learner") == 0
    assert small_run.wait("worker") == 0
    result = summary(small_run)
    assert result["steps"] == 6
    assert result["probe_max_abs_diff"] <= 1e-3
    assert result["staleness_max"] <= small_run.config.queue.max_staleness
    assert [line["version"] for line in metrics(small_run)] == list(range(1, 7))
    assert check_ledger(small_run)["trained"] == result["groups_trained"]
    assert (small_run.config.run_dir / "model" / "model.safetensors").is_file()


@small([*SHORT, "--learner.steps", "4", "--learner.ranks", "2", "--learner.shard_weights", "true"])
def test_i3_two_ranks_of_a_sharded_learner_each_send_their_share(small_run: SmallRun) -> None:
    small_run.start("queue", "worker", "learner")
    assert small_run.wait("learner") == 0
    result = summary(small_run)
    assert result["steps"] == 4
    assert result["sync_count"] + result["sync_skipped"] == 5
    # Of the whole model, whose first publication no rank has proven alone.
    assert result["probe_max_abs_diff"] <= 1e-3
    whole = Path(small_run.config.model.path, "model.safetensors").stat().st_size
    assert result["sync_whole_bytes"] == pytest.approx(result["sync_count"] * whole, rel=0.02)


@small(LONG)
def test_i1_worker_and_queue_are_killed_and_nothing_is_lost_or_trained_twice(small_run: SmallRun) -> None:
    processes = small_run.processes
    small_run.start("queue", "worker-a", "learner")
    small_run.wait_for(lambda now: now.step >= 3)
    small_run.kill_with_tickets("worker-a")
    small_run.start("worker-b")
    small_run.wait_for(lambda now: now.step >= 8)
    before = small_run.wait_for(lambda now: now.groups.ready + now.groups.leased > 0)
    processes.kill("queue")
    small_run.start("queue")
    after = small_run.wait_for(lambda now: now.step >= 9)
    assert after.version >= before.version
    assert small_run.wait("learner") == 0
    assert small_run.wait("worker-b") == 0
    result = summary(small_run)
    assert result["steps"] == 16
    assert result["staleness_max"] <= small_run.config.queue.max_staleness
    outcomes = check_ledger(small_run)
    assert outcomes["trained"] == result["groups_trained"]
    assert outcomes["reissued"] >= 1, "the killed worker's tickets were not issued again"


@small(LONG)
def test_i2_the_learner_is_killed_and_resumes_where_its_checkpoint_was(small_run: SmallRun) -> None:
    processes = small_run.processes
    small_run.start("queue", "worker", "learner")
    before = small_run.wait_for(lambda now: now.step >= 6 and now.checkpoint_step is not None)
    processes.kill("learner")
    at_death = small_run.wait_for(lambda now: True)
    newest = newest_checkpoint(small_run)
    small_run.start("learner", resume=True)
    after = small_run.wait_for(lambda now: now.version > at_death.version + 1)
    assert after.learner.session == before.learner.session + 1
    assert small_run.wait("learner") == 0
    assert small_run.wait("worker") == 0
    steps = metrics(small_run)
    assert [line["step"] for line in steps] == list(range(1, 17))
    versions = [line["version"] for line in steps]
    assert versions == sorted(set(versions))
    assert versions[-1] >= at_death.version + 16 - newest, "the versions of the lost steps were used again"
    result = summary(small_run)
    assert result["staleness_max"] <= small_run.config.queue.max_staleness
    assert check_ledger(small_run)["trained"] == sum(line["groups_trained"] for line in steps)
