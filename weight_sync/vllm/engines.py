"""Asks all engines of a server. A data-parallel server has several, and vLLM's own calls answer for the first alone.

The engines of a dense model know nothing of each other. Those of a mixture of experts step together, as each forward
pass moves tokens between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import RouteError, status_of

T = TypeVar("T")

# An engine answers between two steps; one that takes longer does not count as alive.
LOOK_TIMEOUT_S = 4.0


class Answers(Generic[T]):
    """The answers of all workers.

    Attributes:
        engines: Answers of each engine's workers, by engine and by rank.
    """

    def __init__(self, engines: list[list[T]]) -> None:
        self.engines = engines

    def __iter__(self) -> Iterator[T]:
        return (answer for workers in self.engines for answer in workers)

    def named(self) -> Iterator[tuple[str, T]]:
        """Yield each answer with its worker's name, "" where the server has a single one."""
        for engine, workers in enumerate(self.engines):
            of_engine = [f"engine {engine}"] if len(self.engines) > 1 else []
            for rank, answer in enumerate(workers):
                yield ", ".join([*of_engine, *([f"worker {rank}"] if len(workers) > 1 else [])]), answer


async def ask_workers(engine: EngineClient, method: str, *args: Any) -> Answers[Any]:
    """Call a method of all workers of all engines, which is any of `slipstream.weight_sync.vllm.worker`.

    Raises:
        RouteError: 500 if it raised in a worker; the text names the engine.
    """
    replies = await engine.engine_core.call_utility_all_async("slipstream_workers", method, args)
    failed = [(place, reply["error"]) for place, reply in enumerate(replies) if reply["error"] is not None]
    if failed:
        raise RouteError(500, _of_engines(failed, len(replies)))
    return Answers([reply["answers"] for reply in replies])


async def ask_states(engine: EngineClient, timeout_s: float | None = None) -> list[dict[str, Any]] | None:
    """Return each engine's `engine_core.state`.

    Returns:
        None if not all have answered within `timeout_s`, by default `LOOK_TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S if timeout_s is None else timeout_s):
            states = await engine.engine_core.call_utility_all_async("slipstream_state")
    except TimeoutError:
        return None
    except Exception as error:
        # A dead engine raises vLLM's own error, which is no answer.
        if getattr(engine, "errored", False):
            return None
        raise RouteError(500, f"the engine cannot say its state: {error}") from error
    status_of(engine).step_s = max((state["step_s"] for state in states), default=0.0)
    return states


def label_of(states: list[dict[str, Any]]) -> str:
    """Return the label of the weights that serve. Engines that differ are named, which makes a label of no run."""
    labels = [state["label"] for state in states]
    if len(set(labels)) == 1:
        return str(labels[0])
    return ", ".join(f"engine {place}: {label}" for place, label in enumerate(labels))


def reason_not_to_serve(engine: EngineClient) -> str | None:
    """Return why a server was started in a way that Slipstream cannot control, None if it can."""
    parallel = engine.vllm_config.parallel_config
    if (processes := parallel._api_process_count) > 1:
        return (
            f"it has {processes} API processes, and each would know of its own pauses and swaps alone: start it with "
            f"--api-server-count 1"
        )
    if parallel.local_engines_only and parallel.data_parallel_size > 1:
        return (
            f"it is one of several servers that share {parallel.data_parallel_size} data-parallel engines, and can "
            f"stop its own alone: start it without --data-parallel-external-lb, --data-parallel-hybrid-lb and "
            f"--data-parallel-rank"
        )
    return None


async def swap(engine: EngineClient, label: str, clear_cache: bool) -> dict[str, Any]:
    """Swap in all engines, once every one of them is ready.

    Returns:
        The fields of `engine_core.swap`, over all engines.
    """
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        return (await _swapped(engine, "slipstream_swap", label, clear_cache))[0]
    for worker, report in (await ask_workers(engine, "slipstream_staging")).named():
        if report["stage"] != "ready":
            error = f"{worker} is not ready to swap: {report['error'] or report['stage']}"
            return {"whole": True, "error": error, "pause_s": 0.0, "exchange_s": 0.0}
    if not engine.vllm_config.model_config.is_moe:
        return _over_all(await _swapped(engine, "slipstream_swap", label, clear_cache))
    core, began = engine.engine_core, time.monotonic()
    paused = await core.is_scheduler_paused_async()
    await core.pause_scheduler_async("keep", False)
    result = _over_all(await _swapped(engine, "slipstream_exchange", label, clear_cache))
    if not paused and result["whole"]:
        await core.resume_scheduler_async()
    return {**result, "pause_s": time.monotonic() - began}


async def _swapped(engine: EngineClient, method: str, label: str, clear_cache: bool) -> list[dict[str, Any]]:
    return await engine.engine_core.call_utility_all_async(method, label, clear_cache)


def _over_all(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one result of all engines'. If only some have swapped, the server's model is not whole."""
    failed = [(place, result["error"]) for place, result in enumerate(results) if result["error"]]
    return {
        "whole": all(result["whole"] for result in results) and len(failed) in (0, len(results)),
        "error": _of_engines(failed, len(results)) or None,
        "pause_s": max(result["pause_s"] for result in results),
        "exchange_s": max(result["exchange_s"] for result in results),
    }


def _of_engines(errors: list[tuple[int, str]], engines: int) -> str:
    return "; ".join(f"engine {place}: {error}" if engines > 1 else error for place, error in errors)
