"""Computes the figures of each way that `benchmarks.worker` compares."""

from __future__ import annotations

import asyncio
import time


class LagProbe:
    """Measures the event loop's lag by yielding to it again and again.

    Time that passes during a yield was spent by other tasks.
    """

    def __init__(self) -> None:
        self._cpu_ms: list[float] = []
        self._wall_ms: list[float] = []

    async def run(self) -> None:
        while True:
            cpu, wall = time.thread_time(), time.perf_counter()
            await asyncio.sleep(0)
            self._cpu_ms.append(1000 * (time.thread_time() - cpu))
            self._wall_ms.append(1000 * (time.perf_counter() - wall))
            await asyncio.sleep(0.001)

    def figures(self) -> dict[str, float]:
        return {"lag_p99_ms": _p99(self._cpu_ms), "lag_wall_p99_ms": _p99(self._wall_ms)}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def figures(episodes: int, tokens: int, cpu_s: float, wall_s: float, loop_s: float = 0.0) -> dict[str, float]:
    """Compute the cost per episode and per token.

    Args:
        episodes: Number of episodes.
        tokens: Number of sampled tokens.
        cpu_s: CPU seconds of the process.
        wall_s: Wall-clock seconds.
        loop_s: CPU seconds of the event loop's thread.

    Returns:
        The figures by name.
    """
    return {
        "loop_cpu_ms_per_episode": 1000 * loop_s / episodes,
        "cpu_ms_per_episode": 1000 * cpu_s / episodes,
        "cpu_us_per_token": 1e6 * cpu_s / tokens,
        "wall_ms_per_episode": 1000 * wall_s / episodes,
        "episodes_per_s": episodes / wall_s,
        "tokens_per_episode": tokens / episodes,
    }
