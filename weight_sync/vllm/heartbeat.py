"""Whether the engine lives: asked now and then, so that one that hangs in a collective does not stay behind a server
that still answers.

Silence is counted in questions, not in time: a process that was stopped and goes on has missed one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from weight_sync.vllm.engine_state import EngineStatus

logger = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
# A dead engine is known without a question. vLLM ends soon after it, and does not say why.
LOOK_EVERY_S = 0.5
# An engine answers between two steps, and the longest prefill is one step.
ANSWER_WITHIN_S = 15.0
QUESTIONS = 8


async def watch(engine: Any, condition: EngineStatus, ask: Callable[[Any, float], Awaitable[Any]]) -> None:
    """Break the server down when the engine is dead, or has not answered `QUESTIONS` times in a row.

    While a publication holds the pause its lease counts, not this. `ask(engine, timeout_s)`: None where no answer came.
    """
    silent, asked_at = 0, time.monotonic()
    while condition.broken is None:
        await asyncio.sleep(min(LOOK_EVERY_S, ASK_EVERY_S))
        if (why := how_it_died(engine)) is not None:
            condition.break_down(why)
            return
        if time.monotonic() - asked_at < ASK_EVERY_S:
            continue
        if getattr(engine, "errored", False):
            condition.break_down("the engine died")
            return
        try:
            answered = await ask(engine, ANSWER_WITHIN_S) is not None
        except Exception as error:  # asked again; a failing question is no answer
            logger.warning("the engine could not be asked: %s", error)
            answered = False
        asked_at = time.monotonic()
        silent = 0 if answered or condition.lease_ends is not None else silent + 1
        if silent >= QUESTIONS:
            condition.break_down(f"the engine did not answer {QUESTIONS} times in a row, {ANSWER_WITHIN_S:g} s each")


def how_it_died(engine: Any) -> str | None:
    """Of an engine one of whose processes ended unasked; None: it lives, or is being shut down. vLLM knows the exit
    code, and tells nobody."""
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    name = getattr(manager, "failed_proc_name", None)
    code = manager.finished_procs().get(name) if manager is not None and name is not None else None
    if code is None:
        return None
    return f"its EngineCore process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
