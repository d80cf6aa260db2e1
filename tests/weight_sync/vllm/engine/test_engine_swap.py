"""The swap inside the engine core: all workers or none, the label last, and never a step with half a model."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

READY = {"stage": "ready", "error": None}


class Core:
    """vLLM's engine core, as far as the swap uses it; `done` is what was done, in its order."""

    def __init__(self, reports: list[dict[str, Any]] | None = None, exchange: Exception | str | None = None) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.done: list[str] = []
        self.batch_queue: list[Any] = []
        self.pause_state = PauseState.UNPAUSED
        self.scheduler = self
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self._idle_state_callbacks: list[Any] = []
        self._reports = reports or [READY, READY]
        self._exchange = exchange

    def collective_rpc(self, method: str) -> list[Any]:
        self.done.append(method)
        if method == "slipstream_staging":
            return self._reports
        if isinstance(self._exchange, Exception):
            raise self._exchange
        if self._exchange is not None:
            return [0.001, self._exchange]
        return [0.001, 0.002]

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def _reset_caches(self) -> None:
        self.done.append("cleared")

    def set_weight_version(self, label: str) -> None:
        self.done.append(f"labelled {label}")

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state


@pytest.fixture
def swap() -> Any:
    pytest.importorskip("vllm")
    from slipstream.weight_sync.vllm.engine import engine_core

    return engine_core.swap


def test_the_label_changes_after_the_weights_and_within_the_same_step_boundary(swap: Any) -> None:
    core = Core()
    result = swap(core, "7", True)
    assert core.done == ["slipstream_staging", "cleared", "slipstream_exchange", "labelled 7"]
    assert (result["whole"], result["error"], result["exchange_s"]) == (True, None, 0.002)
    assert core.pause_state.name == "UNPAUSED"


def test_one_worker_that_is_not_ready_leaves_all_with_the_old_weights(swap: Any) -> None:
    core = Core([READY, {"stage": "failed", "error": "no place"}])
    result = swap(core, "7", False)
    assert core.done == ["slipstream_staging"]
    assert result["whole"]
    assert result["error"] == "worker 1 is not ready to swap: no place"


def test_i6_an_exchange_that_raises_is_never_labelled_and_never_resumed(swap: Any) -> None:
    core = Core(exchange=RuntimeError("boom"))
    result = swap(core, "7", False)
    assert not result["whole"]
    assert "labelled 7" not in core.done
    assert core.pause_state.name == "PAUSED_ALL"


def test_the_cause_of_an_exchange_that_fails_is_the_worker_s_own_words(swap: Any) -> None:
    """The message is ours: vLLM's sends the reader to a stack trace."""
    core = Core(exchange="OSError: no room")
    result = swap(core, "7", False)
    assert (result["whole"], result["error"]) == (False, "worker 1: OSError: no room")
    assert "labelled 7" not in core.done
    assert core.pause_state.name == "PAUSED_ALL"


def test_a_worker_says_why_its_exchange_failed(caplog: pytest.LogCaptureFixture) -> None:
    from slipstream.weight_sync.vllm.worker import SlipstreamWorker

    class Worker(SlipstreamWorker):
        def finish_weight_update(self) -> None:
            raise OSError("no room")

    assert Worker().slipstream_exchange() == "OSError: no room"
    assert "the exchange of the weights failed" in caplog.text


@pytest.mark.parametrize("before", ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"])
def test_steps_under_way_end_before_the_swap_and_a_persons_pause_stands(swap: Any, before: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    core = Core()
    core.batch_queue.append("a step")
    core.pause_state = PauseState[before]
    future = swap(core, "7", False)
    assert core.done == []
    assert core.pause_state.name == "PAUSED_ALL"
    for callback in core._idle_state_callbacks:
        callback(core)
    assert future.result(1)["whole"]
    assert core.pause_state.name == before
    assert core.done[-1] == "labelled 7"


def test_a_step_in_which_the_process_was_stopped_is_no_long_step() -> None:
    pytest.importorskip("vllm")
    program = """
import os, subprocess, time
from types import SimpleNamespace
from slipstream.weight_sync.vllm.engine import engine_core
engine_core.install_step_times()
stop = f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
def step(core):
    if core.stops:
        subprocess.Popen(["bash", "-c", stop])
    began = time.monotonic()
    while time.monotonic() < began + core.seconds or core.stops and not engine_core._steps.stopped:
        time.sleep(0.01)
    return {0: SimpleNamespace(outputs=[SimpleNamespace(new_token_ids=[1, 2])])}, True
engine_core.timed(step)(SimpleNamespace(seconds=0.9, stops=True))
stopped = engine_core._steps.longest_s(time.monotonic())
engine_core.timed(step)(SimpleNamespace(seconds=0.2, stops=False))
print(stopped, engine_core._steps.longest_s(time.monotonic()), engine_core._steps.generated)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    stopped, longest, generated = (float(text) for text in done.stdout.split()[-3:])
    assert stopped == 0.0
    assert longest >= 0.2
    assert generated == 4


def test_the_longest_step_is_remembered_and_fades() -> None:
    pytest.importorskip("vllm")
    from slipstream.weight_sync.vllm.engine.engine_core import HALF_LIFE_S, StepTimes

    steps = StepTimes()
    steps.note(8.0, 100.0)
    steps.note(0.1, 100.1)
    assert steps.longest_s(100.1) == pytest.approx(8.0, rel=1e-3)
    assert steps.longest_s(100.0 + HALF_LIFE_S) == pytest.approx(4.0, rel=1e-3)
    steps.note(5.0, 100.0 + HALF_LIFE_S)
    assert steps.longest_s(100.0 + HALF_LIFE_S) == 5.0
