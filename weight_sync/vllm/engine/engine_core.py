"""Adds the swap to vLLM's engine core, and keeps prefix caches of different weights apart (I5).

The swap is one utility call between two steps of the engine. The step boundary is the pause: while the call runs
nothing is generated, and nothing outside holds a pause that it could forget to end (I6). A person's pause is not
touched.

A turn that begins under new weights must not read keys and values of older ones, neither from the prefix cache nor from
the part of its own prompt that was computed before. The engine, not the caller, decides under which salt a prompt is
cached, as the caller learns of a swap late. vLLM hashes a request's blocks on the thread that reads its socket, when a
swap may still be ahead in the queue; so the salt is compared again on the engine's own thread, and the blocks are
hashed again if the weights have changed.

Embedded images are kept by their hashes alone. Where the weights that embed them change, all are dropped.

Turns that have tokens already keep their cache: each token has its own label, and the blocks that they fill go under
the old salt, where no new turn looks. Requests whose keys and values come from another server are left alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any

from slipstream.weight_sync.vllm.engine.contract import EngineCore, RecordsOfScheduler, Request

logger = logging.getLogger(__name__)

# Seconds after which half of a long step is forgotten.
HALF_LIFE_S = 300.0

_MARK = "weights "
# Changes of the weights in this process. A label alone would not do: weights that fail their proof share it with the
# next attempt.
_CHANGES = itertools.count(1)


# Tells this start of the engine from others.
BOOT = secrets.token_hex(6)


def install_prefix_salt() -> None:
    """Have the engine core salt every request, in front of the caller's own salt. May be called again."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "slipstream_salt"):
        return
    EngineCore.slipstream_salt = f"{_MARK}0"
    EngineCore.slipstream_tower = False
    preprocess, add, label = EngineCore.preprocess_add_request, EngineCore.add_request, EngineCore.set_weight_version

    @wraps(preprocess)
    def preprocess_add_request(core: EngineCore, request: Request) -> Any:
        given = request.cache_salt
        request.cache_salt = _salted(core, given)
        try:
            return preprocess(core, request)
        finally:
            request.cache_salt = given

    @wraps(add)
    def add_request(core: EngineCore, request: Request, *wave: Any, **named: Any) -> None:
        _renew(core, request)
        add(core, request, *wave, **named)

    # Every transport labels through this call while nothing generates, those that load in place too.
    @wraps(label)
    def set_weight_version(core: EngineCore, weight_version: str) -> None:
        label(core, weight_version)
        core.slipstream_salt = f"{_MARK}{weight_version} {next(_CHANGES)}"
        begin_anew(core)
        if core.slipstream_tower:
            # After `begin_anew`: whoever still needs an image computes it again.
            core.reset_encoder_cache()

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.add_request = add_request
    EngineCore.set_weight_version = set_weight_version


def begin_anew(core: EngineCore) -> None:
    """Have all requests without a token compute their prompts again under the present weights. Between two steps."""
    scheduler = core.scheduler
    now = time.monotonic()
    # The last first, as each is put at the head of the queue.
    without = [request for request in reversed(scheduler.running) if not request.num_output_tokens]
    for request in without:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        # It may be scheduled in the very next step, and must not look as if it had been in the previous one.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    _forget_records(core, [request.request_id for request in without])
    for request in scheduler.waiting:
        if not request.num_output_tokens:
            _renew(core, request)


def _forget_records(core: EngineCore, request_ids: list[str]) -> None:
    """Drop what servers of a mixture have recorded of requests that begin again (`--enable-return-routed-experts`).

    vLLM would tell its workers in the next step that they are finished. They may be scheduled in the same one, which
    its workers refuse.
    """
    records: RecordsOfScheduler | None = getattr(core.scheduler, "aux_output_connector", None)
    if records is None or not request_ids:
        return
    for request_id in request_ids:
        records._finished_requests.pop(request_id, None)
    core.collective_rpc("slipstream_forget_records", args=(request_ids,))


def _renew(core: EngineCore, request: Request) -> None:
    """Hash the blocks of a request again if its salt is of other weights. Nothing of it is computed yet."""
    salt = _salted(core, request.cache_salt)
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()


def _salted(core: EngineCore, salt: str | None) -> str:
    """Return the salt of the present weights. `salt`: the caller's, or one that was made for other weights."""
    given = salt or ""
    if given.startswith(_MARK):
        given = given.partition("|")[2]
    return f"{core.slipstream_salt}|{given}"


def install_swap() -> None:
    """Add the calls below to vLLM's engine core. Runs in each of vLLM's processes, and may be called again."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.slipstream_state = state
    EngineCore.slipstream_workers = workers
    EngineCore.slipstream_swap = swap
    EngineCore.slipstream_exchange = exchange
    install_prefix_salt()
    install_step_times()


class StepTimes:
    """Remembers how long the engine's steps take: the longest one, which fades with `HALF_LIFE_S`.

    Attributes:
        generated: Tokens that all steps sampled.
        stopped: Whether the process was stopped during the present step and continued (SIGSTOP, SIGCONT).
    """

    def __init__(self) -> None:
        self._longest_s = self._at = 0.0
        self.generated = 0
        self.stopped = False

    def continues(self, *_: object) -> None:
        """Handle SIGCONT: the present step's time says nothing."""
        self.stopped = True

    def note(self, took_s: float, now: float) -> None:
        """Note a step that ended `now` (`time.monotonic`)."""
        self._longest_s, self._at = max(took_s, self.longest_s(now)), now

    def longest_s(self, now: float) -> float:
        return self._longest_s * math.exp2((self._at - now) / HALF_LIFE_S)


_steps = StepTimes()


def install_step_times() -> None:
    """Have the engine core time its steps. May be called again."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "slipstream_timed"):
        return
    EngineCore.slipstream_timed = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCONT, _steps.continues)
    EngineCore.step, EngineCore.step_with_batch_queue = timed(EngineCore.step), timed(EngineCore.step_with_batch_queue)


def timed(step: Callable[[EngineCore], Any]) -> Callable[[EngineCore], Any]:
    """Return a step that is timed."""

    @wraps(step)
    def timed_step(core: EngineCore) -> Any:
        began, _steps.stopped = time.monotonic(), False
        try:
            outputs, executed = step(core)
        finally:
            now = time.monotonic()
            if not _steps.stopped:
                _steps.note(now - began, now)
        for of_client in (outputs or {}).values():
            _steps.generated += sum(len(output.new_token_ids) for output in of_client.outputs)
        return outputs, executed

    return timed_step


def state(core: EngineCore) -> dict[str, Any]:
    """Return boot, label, whether the engine is paused or asleep, its numbers of requests, a `place` that is another
    one after each step, the seconds of its longest step lately, and the tokens that it has sampled. An answer also
    shows that it lives."""
    scheduler = core.scheduler
    running, waiting = scheduler.get_request_counts()
    first = next((request.request_id for request in scheduler.waiting), "")
    return {
        "boot": BOOT,
        "label": core.get_weight_version(),
        "paused": core.is_scheduler_paused(),
        "asleep": bool(core.model_executor.is_sleeping),
        "running": running,
        "waiting": waiting,
        "place": [running, waiting, first, sum(request.num_computed_tokens for request in scheduler.running)],
        "step_s": _steps.longest_s(time.monotonic()),
        "generated": _steps.generated,
    }


def workers(core: EngineCore, method: str, args: list[Any]) -> dict[str, Any]:
    """Call a method of every worker.

    An error is answered, not raised: vLLM's client would not say which engine it comes from.

    Returns:
        `answers` by rank, and `error`: None, or why there are none.
    """
    try:
        return {"answers": core.collective_rpc(method, args=tuple(args)), "error": None}
    except Exception as error:
        logger.exception("%s failed in a worker", method)
        return {"answers": [], "error": f"{type(error).__name__}: {error}"}


def swap(core: EngineCore, label: str, clear_cache: bool) -> Any:
    """Exchange the weights of all workers for those that they have staged, and label them.

    Args:
        clear_cache: Whether to drop all cached keys and values; requests in flight compute theirs again.

    Returns:
        As `_result`, or a future of that.
    """
    from vllm.v1.core.sched.interface import PauseState

    if not core.batch_queue:
        return exchange(core, label, clear_cache)
    # Running steps sample with the old weights, so their tokens must be labelled before the label changes.
    before = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    done: Future[dict[str, Any]] = Future()

    def when_idle(core: EngineCore, began: float) -> None:
        try:
            result = exchange(core, label, clear_cache, began)
        except BaseException as error:
            result = _result(began, 0.0, f"{type(error).__name__}: {error}", whole=False)
        if result["whole"]:
            core.scheduler.set_pause_state(before)
        done.set_result(result)

    core._idle_state_callbacks.append(partial(when_idle, began=time.monotonic()))
    return done


def exchange(core: EngineCore, label: str, clear_cache: bool, began: float | None = None) -> dict[str, Any]:
    """Swap while no step is running. If a worker fails in it, generation stays paused for good."""
    from vllm.v1.core.sched.interface import PauseState

    began = time.monotonic() if began is None else began
    reports = core.collective_rpc("slipstream_staging")
    core.slipstream_tower = any(report.get("tower") for report in reports)
    for rank, report in enumerate(reports):
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
    """Make the answer to a swap.

    Args:
        began: When generation stopped (`time.monotonic`), from which `pause_s` counts.
        exchange_s: Seconds that changed the model.
        error: Why nothing was swapped, or what left the live model unknown; None if all went well.
        whole: Whether the live model is whole.
    """
    return {"pause_s": time.monotonic() - began, "exchange_s": exchange_s, "error": error, "whole": whole}
