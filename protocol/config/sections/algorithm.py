"""What an optimiser step does with rewards and log-probs: the parts of an algorithm, and presets of them by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from protocol.config.sections.base import Section, setting
from protocol.config.sections.presets import PRESETS


class AlgorithmSection(Section):
    """A part of [learner]."""

    algorithm: Literal[
        "grpo",
        "trl_grpo",
        "async_grpo",
        "dr_grpo",
        "dapo",
        "bnpo",
        "rloo",
        "gdpo",
        "gspo",
        "luspo",
        "cispo",
        "dppo",
        "sapo",
        "vespo",
        "tis",
        "icepop",
        "decoupled_ppo",
    ] = setting(
        "grpo",
        description="a preset of the settings of docs/algorithms.md, each of which may be set beside it",
        why="the one that most people know",
    )
    advantage: Literal["grpo", "async_grpo", "dr_grpo", "rloo", "batch", "gdpo"] = setting(
        "grpo",
        description="of a reward r in its group: grpo (r - mean) / std; async_grpo as grpo, with the population's std; "
        "dr_grpo r - mean; rloo r - mean of the others; batch (r - mean) / std of the step; gdpo as grpo for each "
        "reward function, summed, and then normalised over the step",
        why="what most people mean by GRPO",
    )
    advantage_epsilon: float = setting(1e-4, gt=0, le=1, description="(reward - mean) / (std + epsilon)", why="TRL's")
    reward_clip: tuple[float, float] | None = setting(
        None,
        strict=False,
        description="rewards are held within [low, high] before advantages are computed",
        why="a reward means what it says",
    )
    normalise_advantages: bool = setting(
        False,
        description="advantages are shifted and scaled to mean 0 and deviation 1 over the step",
        why="the advantage has its own scale; TRL's",
    )
    objective: Literal["ppo_clip"] = setting(
        "ppo_clip",
        description="the loss of a token, from its ratio and advantage",
        why="a bounded ratio needs no second model and no second forward pass",
    )
    clip_low: float = setting(
        0.2, gt=0, lt=1, description="PPO clip: the ratio stays above 1 - clip_low", why="PPO's own"
    )
    clip_high: float = setting(
        0.28,
        gt=0,
        le=1000,
        description="PPO clip: the ratio stays below 1 + clip_high",
        why="DAPO's: leaves rare tokens room to grow",
    )
    normaliser: Literal["tokens", "sequences", "constant", "rollouts"] = setting(
        "tokens",
        description="what the sum of the losses is divided by: tokens, all tokens of the step; sequences, each "
        "rollout's own tokens and then the number of rollouts; constant, rollouts x rollout.max_episode_tokens; "
        "rollouts, the number of rollouts",
        why="every token counts alike, in long answers too (DAPO)",
    )
    correction: Literal["none"] = setting(
        "none",
        description="what is done about tokens that an older version sampled, beside the objective's own ratio",
        why="the clip bounds the ratio to the policy that sampled",
    )

    @field_validator("reward_clip")
    @classmethod
    def _clip_in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the first must be below the second, else all rewards are the same")
        return value

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("algorithm", "grpo")), {})
        return {**preset, **values}
