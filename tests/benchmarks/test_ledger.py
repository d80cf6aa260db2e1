"""No decision of the ledger costs more with tickets, ready groups, workers or servers: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any, TypeVar

from benchmarks.ledger import Bench, Sizes

T = TypeVar("T")


class CountingBench(Bench):
    """Counts the instructions of Python's interpreter instead of the time."""

    def measured(self, name: str, operation: Callable[[], T]) -> T:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return operation()
        finally:
            sys.settrace(before)
            self.costs[name].append(count)


def costs(sizes: Sizes) -> dict[str, float]:
    bench = CountingBench(sizes)
    for number in range(3):
        bench.round(number)
    return {name: median(found) for name, found in bench.costs.items()}


def test_decisions_cost_the_same_at_every_size() -> None:
    small = costs(Sizes())
    for sizes in (Sizes(issued=1_000_000), Sizes(ready=2_000), Sizes(workers=500), Sizes(servers=200)):
        grown = {name: (small[name], cost) for name, cost in costs(sizes).items() if cost > 1.5 * small[name]}
        assert not grown, f"{sizes}: instructions at the smallest size, and here: {grown}"
