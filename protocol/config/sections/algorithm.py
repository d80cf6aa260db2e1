"""What an optimiser step does with rewards and log-probs: the parts of an algorithm, and presets of them by name."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from protocol.config.sections.base import Section, setting

# What each preset sets; where nothing stands, a setting has its own default. A run file's own settings go first.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "normaliser": "constant"},
}


class AlgorithmSection(Section):
    """A part of [learner]."""

    algorithm: Literal["grpo", "dr_grpo"] = setting(
        "grpo",
        description="a preset of the settings of docs/algorithms.md, each of which may be set beside it",
        why="the one that most people know",
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] = setting(
        "grpo",
        description="of a reward r in its group: grpo (r - mean) / std, dr_grpo r - mean, rloo r - mean of the others",
        why="what most people mean by GRPO",
    )
    advantage_epsilon: float = setting(1e-4, gt=0, le=1, description="(reward - mean) / (std + epsilon)", why="TRL's")
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
    correction: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
        "decoupled",
    ] = setting(
        "none",
        description="what is done about tokens that an older version sampled, from r = proximal / sampler: token_* "
        "weight each token by its r, sequence_* by that of the whole rollout; *_truncate keep the weight within the "
        "bounds, *_mask leave out what is outside; geometric_mask leaves out rollouts by the mean of log r and weights "
        "nothing; decoupled is decoupled PPO",
        why="the clip bounds the ratio to the policy that sampled",
    )
    correction_low: float | None = setting(
        None,
        ge=0,
        le=1,
        description="the lower bound of the correction's ratio; without it, the correction's own",
        why="each correction has a bound of its own: 0.5 for token_mask, 0.99 for geometric_mask, else 0",
    )
    correction_high: float | None = setting(
        None,
        ge=1,
        le=1e6,
        description="the upper bound of the correction's ratio; without it, the correction's own",
        why="each correction has a bound of its own: 2 for token_truncate, 5 for token_mask and decoupled, 3 for "
        "sequence_*, 1.01 for geometric_mask",
    )
    proximal: Literal["recomputed", "last_step", "interpolated"] = setting(
        "recomputed",
        description="the policy between sampler and learner, for a correction: recomputed, as the step begins; "
        "last_step, before the last optimiser step (a copy of the weights and a forward pass); interpolated, "
        "guessed from a token's age (A-3PO)",
        why="needs neither a copy of the weights nor a pass",
    )
    off_policy_mask_threshold: float | None = setting(
        None,
        gt=0,
        le=1000,
        description="rollouts of negative advantage are left out where the mean of log sampler - log policy over their "
        "tokens is above this",
        why="off; DeepSeek-V3.2 and TRL have the same switch, and 0.5 is a usual value",
    )
    top_entropy_quantile: float = setting(
        1.0,
        ge=0,
        le=1,
        description="only this share of the step's tokens is learnt from: those where the policy's entropy is highest",
        why="all; 0.2 in the paper on forking tokens, at the price of a forward pass for steps of several rows",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("algorithm", "grpo")), {})
        return {**preset, **values}

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.correction == "none":
            unused = {
                "correction_low": self.correction_low,
                "correction_high": self.correction_high,
                "proximal": None if self.proximal == "recomputed" else self.proximal,
            }
            for name, value in unused.items():
                if value is not None:
                    raise ValueError(
                        f"{name} = {value} has no effect with correction = none: set correction to one of those that "
                        f"docs/algorithms.md lists, or leave {name} out"
                    )
        if self.correction_low == self.correction_high == 1:
            raise ValueError(
                "correction_low = 1 and correction_high = 1 leave no room for any ratio but 1: every token that an "
                "older version sampled would be left out or lose its weight; lower the one or raise the other"
            )
        return self
