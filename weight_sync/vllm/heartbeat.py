"""Whether the engine lives: asked now and then, so that one that hangs in a collective does not stay behind a server
that still answers.

Silence is counted in questions, not in time: a process that was stopped and goes on has missed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from weight_sync.vllm.condition import Condition

logger = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
# An engine answers between two steps, and the longest prefill is one step.
ANSWER_WITHIN_S = 15.0
QUESTIONS = 8


async def watch(engine: Any, condition: Condition, ask: Callable[[Any, float], Awaitable[Any]]) -> None:
    """Break the server down when the engine is dead, or has not answered `QUESTIONS` times in a row.

    While a publication holds the pause its lease counts, not this. `ask(engine, timeout_s)`: None where no answer came.
    """
    silent = 0
    while condition.broken is None:
        await asyncio.sleep(ASK_EVERY_S)
        if getattr(engine, "errored", False):
            condition.break_down("the engine died")
            return
        try:
            answered = await ask(engine, ANSWER_WITHIN_S) is not None
        except Exception as error:  # asked again; a failing question is no answer
            logger.warning("the engine could not be asked: %s", error)
            answered = False
        silent = 0 if answered or condition.lease_ends is not None else silent + 1
        if silent >= QUESTIONS:
            condition.break_down(f"the engine did not answer {QUESTIONS} times in a row, {ANSWER_WITHIN_S:g} s each")
