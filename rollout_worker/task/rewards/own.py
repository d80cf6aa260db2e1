"""The reward that an episode brings itself: its agent returned it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_worker.task.rewards.base import RewardBatch, Values


class OwnReward:
    """A component `name` of what each episode has brought, None where it has not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, row: Mapping[str, Any]) -> None:
        """It needs no column."""

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        return Values(list(batch.own))
