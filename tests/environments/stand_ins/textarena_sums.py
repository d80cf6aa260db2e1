"""The sums as a game of TextArena."""

from __future__ import annotations

from typing import Any

import textarena
from textarena.core import ObservationType

from tests.environments.stand_ins.sums import Sums


class TextArenaSums(textarena.Env):
    def __init__(self, fault: str = "") -> None:
        self.sums = Sums(fault)

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=9)
        self.total = 0.0
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: self.sums.reset())

    def step(self, action: str) -> tuple[bool, Any]:
        self.state.add_observation(action, ObservationType.PLAYER_ACTION, from_id=0)
        observation, reward, is_over = self.sums.step(action)
        self.total += reward
        if is_over or self.sums.fault == "nan":
            self.state.set_outcome(reward=self.total, reason="over")
        else:
            self.state.add_observation(observation, ObservationType.GAME_MESSAGE)
        return self.state.step()


textarena.envs.registration.register("Sums-v0", TextArenaSums)
