"""What an optimiser step does with rewards and log-probs: the parts of an algorithm, and presets of them by name."""

from __future__ import annotations

from typing import Any, Literal

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
    correction: Literal["none"] = setting(
        "none",
        description="what is done about tokens that an older version sampled, beside the objective's own ratio",
        why="the clip bounds the ratio to the policy that sampled",
    )

    router_aux_loss_coef: float = setting(
        0.0,
        ge=0,
        le=1,
        description="for mixtures of experts: weight of the loss that keeps experts evenly used, over all tokens of "
        "the step; 0: none",
        why="a short run moves the routers little; the model's own config names what it was trained with",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("algorithm", "grpo")), {})
        return {**preset, **values}
