"""Settings of the algorithm: advantage, objective, corrections, masks and regularisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slipstream.protocol.config.sections.base import CountOrZero, Section, setting, toml_value
from slipstream.protocol.config.sections.presets import PRESETS, SET_BY_PRESETS, TIED_TO

# The objectives with a clip: they read clip_low, clip_high and delta.
CLIPPED = ("ppo_clip", "gspo", "sequence_clip")
# Those whose bounded ratio weighs a token: they read clip_high.
WEIGHED = ("cispo", "sequence_cispo")


class ObjectiveSection(Section):
    """Settings of [learner] for advantage, objective, corrections and masks."""

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
        description="preset of the settings below (docs/algorithms.md); your own settings override it",
        why="the best-known algorithm",
    )
    advantage: Literal["grpo", "async_grpo", "dr_grpo", "rloo", "batch", "gdpo"] = setting(
        "grpo",
        description="advantage of a reward r in its group: grpo (r - mean) / std; async_grpo with the "
        "population's std; dr_grpo r - mean; rloo r - mean of the others; batch (r - mean) / std of "
        "the step; gdpo grpo per reward function, summed, then normalised over the step",
        why="the usual meaning of GRPO",
    )
    advantage_epsilon: float = setting(
        1e-4, gt=0, le=1, description="added to the standard deviation before division", why="TRL's"
    )
    reward_clip: tuple[float, float] | None = setting(
        None,
        strict=False,
        description="clip rewards to [low, high] before advantages",
        why="rewards count as they are",
    )
    normalise_advantages: bool = setting(
        False,
        description="normalise advantages to mean 0 and standard deviation 1 over the step",
        why="TRL's",
    )
    credit: Literal["episode", "turn", "gigpo"] = setting(
        "episode",
        description="rewards of which a token has the advantage: episode, the rollout's; turn, those since its turn, "
        "among the group's at that turn; gigpo, both, the latter among turns of the same state",
        why="needs no rewards at turns",
    )
    credit_discount: float = setting(
        1.0,
        ge=0,
        le=1,
        description="turn, gigpo: a reward k turns later counts this to the power of k",
        why="all count in full",
    )
    gigpo_weight: float = setting(
        1.0, gt=0, le=100, description="gigpo: weight of the advantage among equal states", why="the paper's"
    )
    objective: Literal[
        "ppo_clip",
        "gspo",
        "sequence_clip",
        "cispo",
        "sequence_cispo",
        "dppo",
        "sapo",
        "vespo",
        "importance",
        "reinforce",
    ] = setting(
        "ppo_clip",
        description="loss of a token, from its advantage and ratio (p of the trained policy / p of the sampler); "
        "formulas in docs/algorithms.md",
        why="needs no second model or forward pass",
    )
    clip_low: float = setting(
        0.2,
        gt=0,
        lt=1,
        description="ppo_clip, gspo, sequence_clip: the ratio stays above 1 - clip_low",
        why="PPO's; gspo wants about 3e-4",
    )
    clip_high: float = setting(
        0.28,
        gt=-1,
        le=1000,
        description="ppo_clip, gspo, sequence_clip, cispo, sequence_cispo: the ratio stays below 1 + clip_high; "
        "above 0, but for the last two",
        why="DAPO's: rare tokens may grow; cispo wants 4, gspo 4e-4",
    )
    delta: Annotated[float, Field(gt=1, le=1e6)] | Literal["none"] = setting(
        4.0,
        validate_default=True,
        description="ppo_clip, gspo, sequence_clip: maximum ratio at negative advantages, or none; beyond it a "
        "token has no gradient",
        why="INTELLECT-2's, for asynchronous training; the dual clip uses 3",
    )
    dppo_divergence: Literal["tv", "kl"] = setting(
        "tv",
        description="dppo: distance that a token moved: tv, difference of probabilities; kl, KL(old, policy) of "
        "the token and the rest",
        why="treats rare and common tokens alike",
    )
    dppo_threshold: Annotated[float, Field(gt=0, le=20)] | Literal["auto"] = setting(
        "auto",
        description="dppo: beyond this distance, in the direction of its advantage, a token has no gradient; "
        "auto: 0.15 for tv, 0.05 for kl",
        why="the authors' values",
    )
    sapo_temperature_pos: float = setting(
        1.0,
        gt=0,
        le=1000,
        description="sapo: how fast the gate closes as the ratio leaves 1, at positive advantages",
        why="the paper's; TRL's",
    )
    sapo_temperature_neg: float = setting(
        1.05,
        gt=0,
        le=1000,
        description="sapo: the same at negative advantages",
        why="the paper's; TRL's",
    )
    vespo_k_pos: float = setting(
        2.0,
        ge=0,
        le=100,
        description="vespo: power k in the weight w^k exp(lambda (1 - w)) of ratio w, at non-negative advantages",
        why="TRL's",
    )
    vespo_lambda_pos: float = setting(3.0, gt=0, le=100, description="vespo: lambda of the same", why="TRL's")
    vespo_k_neg: float = setting(3.0, ge=0, le=100, description="vespo: k at negative advantages", why="TRL's")
    vespo_lambda_neg: float = setting(
        2.0, gt=0, le=100, description="vespo: lambda at negative advantages", why="TRL's"
    )
    normaliser: Literal["tokens", "sequences", "constant", "rollouts"] = setting(
        "tokens",
        description="divisor of the summed losses: tokens, of the step; sequences, each rollout's tokens, then "
        "rollouts; constant, rollouts x rollout.max_episode_tokens; rollouts",
        why="all tokens count alike (DAPO)",
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
        description="correction for stale tokens by r = p of the proximal policy / p of the sampler: token_* use "
        "each token's r, sequence_* the whole rollout's; *_truncate bound it as a weight, *_mask "
        "leave out what is outside; geometric_mask leaves out rollouts by mean log r; decoupled is "
        "decoupled PPO",
        why="the clip bounds the ratio to the sampler",
    )
    correction_low: float | None = setting(
        None,
        ge=0,
        le=1,
        description="lower bound of the correction's ratio",
        why="the correction's: 0.5 for token_mask, 0.99 for geometric_mask, else 0",
    )
    correction_high: float | None = setting(
        None,
        ge=1,
        le=1e6,
        description="upper bound of the correction's ratio",
        why="the correction's: 2 for token_truncate, 5 for token_mask and decoupled, 3 for sequence_*, "
        "1.01 for geometric_mask",
    )
    proximal: Literal["recomputed", "last_step", "interpolated"] = setting(
        "recomputed",
        description="proximal policy of a correction: recomputed, at the start of the step; last_step, before the"
        " last step (a copy of the weights and a forward pass); interpolated, by a token's age "
        "(A-3PO)",
        why="needs no copy and no pass",
    )
    off_policy_mask_threshold: float | None = setting(
        None,
        gt=0,
        le=1000,
        description="leave out rollouts with negative advantage whose mean of log sampler - log policy exceeds this",
        why="off; DeepSeek-V3.2 and TRL have it, 0.5 is usual",
    )
    top_entropy_quantile: float = setting(
        1.0,
        ge=0,
        le=1,
        description="train only this share of the step's tokens, those of highest entropy",
        why="all; the paper uses 0.2; costs a forward pass for steps of several rows",
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
        return {**cls.preset_beside(values), **values} if isinstance(values, dict) else values

    @classmethod
    def preset_beside(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the preset of `values`, without those tied to a part that `values` replaces."""
        preset = PRESETS.get(str(values.get("algorithm", "grpo")), {})

        def has_its_part(name: str) -> bool:
            parts = {part: preset.get(part, cls.model_fields[part].default) for part in TIED_TO.get(name, ())}
            return all(values.get(part, variant) == variant for part, variant in parts.items())

        return {name: value for name, value in preset.items() if has_its_part(name)}

    @field_validator("clip_high")
    @classmethod
    def _clip_lets_the_ratio_grow(cls, value: float, info: ValidationInfo) -> float:
        if value <= 0 and info.data.get("objective") not in WEIGHED:
            raise ValueError("must be above 0")
        return value

    @field_validator("delta")
    @classmethod
    def _delta_is_beyond_the_clip(cls, value: float | str, info: ValidationInfo) -> float | str:
        highest = 1 + info.data.get("clip_high", 0.0)
        if isinstance(value, float) and value <= highest and info.data.get("objective") in CLIPPED:
            raise ValueError(
                f"must be above 1 + learner.clip_high = {highest:g}, or bad tokens would lose their gradient before "
                f"good ones are clipped: raise it, lower learner.clip_high, or write 'none'"
            )
        return value

    @field_validator("dppo_threshold")
    @classmethod
    def _some_token_is_beyond_the_threshold(cls, value: float | str, info: ValidationInfo) -> float | str:
        if isinstance(value, float) and value >= 1 and info.data.get("dppo_divergence") == "tv":
            raise ValueError(
                "would mask no token, as probabilities differ by less than 1: lower it, or set "
                "learner.dppo_divergence = 'kl'"
            )
        return value

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.correction_low == self.correction_high == 1:
            raise ValueError(
                "correction_low = 1 and correction_high = 1 leave no room for any ratio but 1: every token that an "
                "older version sampled would be left out or lose its weight; lower the one or raise the other"
            )
        return self


class AlgorithmSection(ObjectiveSection):
    """Settings of [learner] for the reference model and other terms of the loss."""

    kl_coef: float = setting(
        0.0,
        ge=0,
        le=100,
        description="adds this times KL(policy || reference) to the loss; above 0 the learner loads model.path "
        "again as the reference and makes one more forward pass",
        why="the clip suffices; a reference takes memory",
    )
    kl_in_reward: bool = setting(
        False,
        description="subtract a rollout's summed KL from its reward instead; rollouts.jsonl shows rewards and "
        "advantages without it",
        why="in the loss each token has its own",
    )
    kl_bias_correction: bool = setting(
        True,
        description="multiply each token's KL in the loss by p / p of the sampler",
        why="TRL's; without it stale tokens bias the KL's gradient",
    )
    reference_sync_steps: CountOrZero = setting(
        0,
        description="steps between moves of the reference towards the policy; 0: never. Checkpoints then hold the"
        " reference",
        why="KL to the initial model",
    )
    reference_mixup: float = setting(
        0.6,
        gt=0,
        le=1,
        description="the moved reference is this x policy + (1 - this) x reference",
        why="TRL's",
    )
    entropy_coef: float = setting(
        0.0,
        ge=0,
        le=10,
        description="subtracts this times the mean entropy of trained tokens, in nats, from the loss",
        why="a bonus can turn an idle policy into noise",
    )
    router_aux_loss_coef: float = setting(
        0.0,
        ge=0,
        le=1,
        description="mixtures of experts: weight of the load-balancing loss over the step's tokens; 0: none",
        why="short runs move routers little; see the model's config",
    )

    def chooses(self, name: str) -> bool:
        """Whether a setting differs from its default and from the preset's. Others may stand where nothing reads them,
        as in a run file that was printed whole."""
        default = AlgorithmSection.model_fields[name].default
        return getattr(self, name) not in (default, PRESETS[self.algorithm].get(name, default))

    def beside_preset(self) -> dict[str, Any]:
        """The algorithm's settings whose values differ from those without the run file's own."""
        preset = self.preset_beside(dict(self))
        unsaid = {name: preset.get(name, field.default) for name, field in AlgorithmSection.model_fields.items()}
        del unsaid["algorithm"]
        return {name: getattr(self, name) for name, value in unsaid.items() if getattr(self, name) != value}

    def left_to_preset(self) -> frozenset[str]:
        """The settings that a preset may set and that have this preset's values."""
        return SET_BY_PRESETS - self.beside_preset().keys()

    @model_validator(mode="after")
    def _reference_is_used(self) -> Self:
        """Check that the reference's settings have an effect; those of a preset may wait for `kl_coef`."""
        set_here = [
            f"{name} = {toml_value(getattr(self, name))}"
            for name in ("kl_in_reward", "kl_bias_correction", "reference_sync_steps", "reference_mixup")
            if self.chooses(name)
        ]
        if set_here and not self.kl_coef:
            raise ValueError(
                f"learner.{set_here[0]} does nothing with learner.kl_coef = 0, which loads no reference model: set "
                f"learner.kl_coef above 0, such as 0.04, or leave the other out"
            )
        if self.chooses("reference_mixup") and not self.reference_sync_steps:
            raise ValueError(
                f"learner.reference_mixup = {self.reference_mixup:g} does nothing with learner.reference_sync_steps = "
                f"0, as the reference never moves: set learner.reference_sync_steps, such as 512, or leave it out"
            )
        if self.kl_in_reward and self.kl_coef and not self.kl_bias_correction:
            raise ValueError(
                "learner.kl_bias_correction = false does nothing with learner.kl_in_reward = true, as there is no KL "
                "in the loss: leave one of them out"
            )
        return self
