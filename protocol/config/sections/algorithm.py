"""What an optimiser step does with rewards and log-probs: an objective, and what the loss holds beside it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from protocol.config.sections.base import CountOrZero, setting, toml_value
from protocol.config.sections.objective import ObjectiveSection
from protocol.config.sections.presets import PRESETS, SET_BY_PRESETS


class AlgorithmSection(ObjectiveSection):
    """A part of [learner]."""

    kl_coef: float = setting(
        0.0,
        ge=0,
        le=100,
        description="KL(policy || reference) times this is added to the loss; above 0, the learner loads the model of "
        "model.path once more, as the reference, and each step takes a forward pass more",
        why="the clip keeps the policy near enough, and the reference needs the memory of one more copy of the weights",
    )
    kl_in_reward: bool = setting(
        False,
        description="the KL is taken from each rollout's reward, summed over its tokens, in place of the loss; "
        "rollouts.jsonl shows rewards and advantages without it",
        why="in the loss, each token has its own",
    )
    kl_bias_correction: bool = setting(
        True,
        description="each token's KL in the loss is multiplied by p / p of the sampler, as it was not the policy that "
        "sampled it",
        why="TRL's; without it the gradient is not that of the KL, the less so the staler a token is",
    )
    reference_sync_steps: CountOrZero = setting(
        0,
        description="steps after which the reference moves towards the policy, and is a part of checkpoints; 0: never",
        why="the KL is to the model that the run began with",
    )
    reference_mixup: float = setting(
        0.6,
        gt=0,
        le=1,
        description="then the reference is this x policy + (1 - this) x reference",
        why="TRL's; 1 would make the policy itself the reference",
    )
    entropy_coef: float = setting(
        0.0,
        ge=0,
        le=10,
        description="the mean entropy of the trained tokens, in nats, times this is taken from the loss",
        why="without a bound it makes noise of a policy that has nothing to learn from",
    )
    router_aux_loss_coef: float = setting(
        0.0,
        ge=0,
        le=1,
        description="for mixtures of experts: weight of the loss that keeps experts evenly used, over all tokens of "
        "the step; 0: none",
        why="a short run moves the routers little; the model's own config names what it was trained with",
    )

    def chooses(self, name: str) -> bool:
        """Whether a setting differs from its default and from the preset's. Others may stand where nothing reads them,
        as in a run file that was printed whole."""
        default = AlgorithmSection.model_fields[name].default
        return getattr(self, name) not in (default, PRESETS[self.algorithm].get(name, default))

    def beside_preset(self) -> dict[str, Any]:
        """The settings of the algorithm that are not what they would be if the run file left them out."""
        preset = self.preset_beside(dict(self))
        unsaid = {name: preset.get(name, field.default) for name, field in AlgorithmSection.model_fields.items()}
        del unsaid["algorithm"]
        return {name: getattr(self, name) for name, value in unsaid.items() if getattr(self, name) != value}

    def left_to_preset(self) -> frozenset[str]:
        """The settings that a preset may set, and that are as this one has them."""
        return SET_BY_PRESETS - self.beside_preset().keys()

    @model_validator(mode="after")
    def _reference_is_used(self) -> Self:
        """The reference's settings do something; those of a preset wait for `kl_coef`."""
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
