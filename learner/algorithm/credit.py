"""Credit: which tokens of a rollout share an advantage, and which rewards each of them answers for.

A credit rule is a pure function of a step's rollouts. With one reward at the end of each rollout and
`credit_discount = 1`, "turn" gives what "episode" does, to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from slipstream.learner.algorithm import advantages
from slipstream.learner.algorithm.advantages import Advantage, GroupAdvantage
from slipstream.learner.algorithm.step_data import Floats, StepRollouts, StepTurns
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import are_equal


class Credit(ABC):
    """The interface of a credit rule.

    Attributes:
        by_turn: Whether each turn has an advantage of its own; the rule then reads `StepRollouts.turns`.
    """

    by_turn: ClassVar[bool] = True

    def __init__(self, section: LearnerSection, advantage: Advantage) -> None:
        self.section = section
        self.advantage = advantage

    @abstractmethod
    def __call__(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """Compute the advantages of a step.

        Args:
            rollouts: The step's rollouts, with finite rewards.

        Returns:
            float32 [S], one per rollout; [U], one per turn, where the rule is `by_turn`.
        """

    def stays_flat(self, group: StepRollouts) -> bool:
        """Say whether a group is known before the step to have no gradient."""
        return not self(group).any()


class EpisodeCredit(Credit):
    """All tokens of a rollout have the advantage of its reward, the sum of all that it was given.

    Choose it first.
    """

    by_turn = False

    def __call__(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        return self.advantage(rollouts)

    def stays_flat(self, group: StepRollouts) -> bool:
        return self.advantage.stays_flat(group)


class ByTurn(Credit):
    """The interface of a rule that gives each turn its own advantage: a formula of one group, in `of_group`."""

    def __init__(self, section: LearnerSection, advantage: Advantage) -> None:
        super().__init__(section, advantage)
        if not isinstance(advantage, GroupAdvantage):
            raise TypeError(f"{type(self).__name__} needs an advantage of one group at a time")
        self.group_advantage = advantage

    def __call__(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        if rollouts.turns is None:
            raise ValueError(f"rollouts.turns is None: {type(self).__name__} needs it")
        found = np.zeros(len(rollouts.turns))
        returns = rollouts.turns.returns(self.section.credit_discount)
        for members in rollouts.by_group():
            turns = rollouts.turns.of(members)
            found[turns] = self.of_group(rollouts.rewards[members], rollouts.turns.take(members), returns[turns])
        return found.astype(np.float32)

    @abstractmethod
    def of_group(self, rewards: Floats, turns: StepTurns, returns: Floats) -> Floats:
        """Compute the formula for the G rollouts that are compared with each other.

        Args:
            rewards: float64 [G].
            turns: Their U turns.
            returns: float64 [U], return of each turn.

        Returns:
            float64 [U].
        """

    def compared(self, values: Floats) -> Floats:
        """Return `learner.advantage` of values that are compared with each other, float64 [n]; exactly 0 where they are
        equal, as rounding must not make a gradient."""
        return np.zeros(len(values)) if are_equal(values) else self.group_advantage.of_group(values)


class TurnCredit(ByTurn):
    """All tokens of turn t have the advantage of its return, the sum over k >= t of `credit_discount`^(k - t) r_k,
    among the group's returns at turn t: rewards to go (arXiv:2505.11821). A rollout that ended before is compared by
    its last return, so that one reward at the end gives what "episode" does.

    Choose it where rewards are given at turns: the luck of the turns before no longer hides what a turn was worth. A
    lower `credit_discount` also hides less of it behind what follows.
    """

    def of_group(self, rewards: Floats, turns: StepTurns, returns: Floats) -> Floats:
        found = np.zeros(len(turns))
        lasts = turns.firsts + turns.counts - 1
        for turn in range(int(turns.counts.max())):
            places = np.minimum(turns.firsts + turn, lasts)
            has = turn < turns.counts
            found[places[has]] = self.compared(returns[places])[has]
        return found


class Gigpo(ByTurn):
    """A(rollout) + `gigpo_weight` A(turn): the advantage of the rollout's reward, plus that of the turn's return, as of
    "turn", among all turns of the group before which the policy saw the same (GiGPO, arXiv:2505.10978, eq. 8). What it
    saw are the tokens and images since its turn before, such as an environment's answer, or the prompt. A state that
    came once adds nothing.

    Choose it where the episodes of a group come through the same states, as in games, also with one reward at the end;
    the paper takes `credit_discount = 0.95`.
    """

    def of_group(self, rewards: Floats, turns: StepTurns, returns: Floats) -> Floats:
        found = np.repeat(self.compared(rewards), turns.counts)
        order = np.argsort(turns.states, kind="stable")
        for equal in np.split(order, np.flatnonzero(np.diff(turns.states[order])) + 1):
            found[equal] += self.section.gigpo_weight * self.compared(returns[equal])
        return found


CREDITS: dict[str, type[Credit]] = {
    "episode": EpisodeCredit,
    "turn": TurnCredit,
    "gigpo": Gigpo,
}


def build(section: LearnerSection) -> Credit:
    """Make the variant that `learner.credit` names, over the one that `learner.advantage` names."""
    return CREDITS[section.credit](section, advantages.build(section))
