"""The game that all of them play."""

from __future__ import annotations

import time
from typing import Any

FAULTS = ("image", "nan", "flood", "hang")
FLOOD = "flood " * 2_000_000
# Longer than any time limit of these tests.
HANG_S = 6.0


class Sums:
    """Two sums, one after the other. `fault`: what goes wrong after the first answer; empty for nothing."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.asked = 0

    def reset(self) -> str:
        self.asked = 1
        return "What is 2 + 2?"

    def step(self, text: str) -> tuple[Any, float, bool]:
        """Return the observation, the reward and whether it is over."""
        right = "4" if self.asked == 1 else "6"
        reward, is_over = float(right in text), self.asked == 2
        self.asked += 1
        if self.fault == "hang":
            time.sleep(HANG_S)
        if self.fault == "nan":
            return "And 3 + 3?", float("nan"), False
        if self.fault == "flood":
            return FLOOD, reward, is_over
        return "And 3 + 3?", reward, is_over
