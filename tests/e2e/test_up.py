"""A whole run on a real vLLM under `slipstream up`, which starts again whatever is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import psutil
import pytest

from slipstream.protocol.status import Status
from tests.e2e.conftest import SmallRun
from tests.e2e.test_run import SMALL, check_ledger, metrics, summary

STEPS = 9

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def at_step(step: int) -> Callable[[Status], bool]:
    return lambda now: now.step >= step


def process_of(run: SmallRun, word: str) -> int:
    """The child of `up` with `word` on its command line."""
    (pid,) = [
        child.pid for child in psutil.Process(run.processes.running["up"].pid).children() if word in child.cmdline()
    ]
    return int(pid)


@pytest.mark.parametrize("run_of_its_own", [[*SMALL, "--learner.steps", str(STEPS)]], indirect=True)
def test_i1_a_run_under_up_outlives_a_worker_the_queue_and_the_server(run_of_its_own: SmallRun) -> None:
    run = run_of_its_own
    run.processes.slipstream("up", "up", str(run.run_file))
    for step, word in ((2, "worker"), (4, "queue"), (6, "vllm.entrypoints.openai.api_server")):
        run.wait_for(at_step(step))
        os.kill(process_of(run, word), signal.SIGKILL)
    assert run.wait("up") == 0
    told = run.processes.log("up")
    for name in ("worker-0", "queue", "vllm-0"):
        assert re.search(rf"slipstream: {name} ended with code 137 \(SIGKILL\).*; starting it again in 1 s", told), told
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    result = summary(run)
    assert result["steps"] == STEPS
    assert result["staleness_max"] <= run.config.queue.max_staleness
    assert check_ledger(run)["trained"] == result["groups_trained"]
