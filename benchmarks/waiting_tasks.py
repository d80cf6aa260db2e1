"""Defines the multiply example's task with waits, for `benchmarks.waiting`.

`task` is unchanged, `judged` has a judge of 1 s, and `tail` has a tool with heavy-tailed time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path
from typing import Any

from slipstream import Task

JUDGE_S = 1.0
# Pareto distribution, seconds: at least a tenth of a second, and sometimes many times that.
MIN_S, SHAPE, MAX_S = 0.1, 1.2, 8.0

_FILE = Path(__file__).parent.parent / "examples" / "multiply" / "task.py"
_SPEC = importlib.util.spec_from_file_location("multiply_task", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_EXAMPLE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_EXAMPLE)

_tool_times = random.Random(1)


async def judge(completions: list[list[dict[str, Any]]], answer: list[int], **columns: Any) -> list[float]:
    """Wait JUDGE_S seconds, then return the example's rewards."""
    await asyncio.sleep(JUDGE_S)
    found: list[float] = _EXAMPLE.accuracy(completions, answer, **columns)
    return found


async def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    await asyncio.sleep(min(MAX_S, MIN_S * _tool_times.paretovariate(SHAPE)))
    return a * b


_ROWS = _EXAMPLE.rows(4096, seed=1)
task = Task(dataset=_ROWS, tools=[_EXAMPLE.multiply], rewards=[_EXAMPLE.accuracy])
judged = Task(dataset=_ROWS, tools=[_EXAMPLE.multiply], rewards=[judge])
tail = Task(dataset=_ROWS, tools=[multiply], rewards=[_EXAMPLE.accuracy])
