"""The swap inside vLLM's engine core: one utility call, run between two steps of the engine.

A step boundary is the pause: while the call runs, nothing is generated, and nothing outside holds anything that it
could forget to give back (I6). A pause that a person asked for is not touched.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from weight_sync.vllm.engine import engine_core

BOOT = secrets.token_hex(6)
"""Of this process: another after each start of the engine."""


def install() -> None:
    """Give vLLM's engine core the calls below. Called in each of vLLM's processes, and harmless when called again."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.slipstream_state = state
    EngineCore.slipstream_swap = swap
    EngineCore.slipstream_exchange = exchange
    engine_core.install_prefix_salt()


def state(core: Any) -> dict[str, Any]:
    """What the engine is: its answer is the proof that it lives."""
    return {"boot": BOOT, "label": core.get_weight_version(), "paused": core.is_scheduler_paused()}


def swap(core: Any, label: str, clear_cache: bool) -> Any:
    """Exchange the weights of all workers for those that they have staged, and label them `label`.

    clear_cache: drop all cached keys and values; requests in flight compute theirs anew. Answers as `_result`.
    """
    from vllm.v1.core.sched.interface import PauseState

    if not core.batch_queue:
        return exchange(core, label, clear_cache)
    # Steps are under way: their tokens are the old weights', and must be labelled before the label changes.
    before = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    done: Future[dict[str, Any]] = Future()

    def when_idle(core: Any, began: float) -> None:
        try:
            result = exchange(core, label, clear_cache, began)
        except BaseException as error:
            result = _result(began, 0.0, f"{type(error).__name__}: {error}", whole=False)
        if result["whole"]:
            core.scheduler.set_pause_state(before)
        done.set_result(result)

    core._idle_state_callbacks.append(partial(when_idle, began=time.monotonic()))
    return done


def exchange(core: Any, label: str, clear_cache: bool, began: float | None = None) -> dict[str, Any]:
    """The swap, with nothing under way in the engine. Where a worker fails in it, generation stays paused for good."""
    from vllm.v1.core.sched.interface import PauseState

    began = time.monotonic() if began is None else began
    for rank, report in enumerate(core.collective_rpc("slipstream_staging")):
        if report["stage"] != "ready":
            error = f"worker {rank} is not ready to swap: {report['error'] or report['stage']}"
            return _result(began, 0.0, error, whole=True)
    if clear_cache:
        core._reset_caches()
    try:
        answers = core.collective_rpc("slipstream_exchange")
        failed = [f"worker {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    except BaseException as error:
        answers, failed = [], [f"{type(error).__name__}: {error}"]
    if failed:
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        return _result(began, 0.0, "; ".join(failed), whole=False)
    core.set_weight_version(label)
    return _result(began, max(answers), None, whole=True)


def _result(began: float, exchange_s: float, error: str | None, whole: bool) -> dict[str, Any]:
    """error: why nothing was swapped (`whole`), or what left the live model unknown (not `whole`). Seconds: `pause_s`
    without generation."""
    return {"pause_s": time.monotonic() - began, "exchange_s": exchange_s, "error": error, "whole": whole}
