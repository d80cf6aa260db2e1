"""The sums as an environment of Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy

from tests.environments.stand_ins.sums import Sums


class GymnasiumSums(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, fault: str = "") -> None:
        self.sums = Sums(fault)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self.sums.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, is_over = self.sums.step(str(action))
        if self.sums.fault == "image":
            observation = numpy.zeros((64, 64, 3))
        return observation, reward, is_over, False, {}


class Unreadable(GymnasiumSums):
    """Its actions are no text."""

    action_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})


for name, cls in (("Sums-v0", GymnasiumSums), ("Unreadable-v0", Unreadable)):
    gymnasium.register(id=name, entry_point=cls, disable_env_checker=True, order_enforce=False)
