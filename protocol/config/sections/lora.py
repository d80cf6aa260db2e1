"""An adapter that trains in place of the model's weights (LoRA, arXiv:2106.09685), by peft's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from protocol.config.sections.base import Count, CountOrZero, Section, setting


class LoraSection(Section):
    r: CountOrZero = setting(
        0,
        description="rank of the adapter's matrices; 0: no adapter, all weights train",
        why="all weights learn the most from a step; an adapter takes a fraction of the memory",
    )
    lora_alpha: Count = setting(
        32,
        description="the adapter's product is multiplied by lora_alpha / r",
        why="twice a rank of 16, as is usual",
    )
    lora_dropout: float = setting(
        0.0,
        ge=0,
        le=0,
        description="must be 0: the policy never drops anything, or its log-probs would not be those that sampled",
        why="the only value that there is",
    )
    target_modules: str | list[str] = setting(
        "all-linear",
        description="linear layers that get a part of the adapter: names, a regular expression of whole names, "
        "all-linear for all but the output layer (of a mixture of experts, those of attention), or auto for what peft "
        "has for the architecture",
        why="the most that an adapter of a rank can learn",
    )
    exclude_modules: list[str] = setting([], description="names of layers that get none after all", why="none")
    layers_to_transform: list[CountOrZero] = setting(
        [], description="numbers of the model's layers that get one; empty: all", why="all of them learn"
    )
    rank_pattern: dict[str, Count] = setting(
        {}, description="another rank for layers by name or regular expression", why="one rank for all"
    )
    alpha_pattern: dict[str, Count] = setting(
        {}, description="another lora_alpha likewise", why="one lora_alpha for all"
    )
    modules_to_save: list[str] = setting(
        [],
        description="names of modules that train whole beside the adapter, such as lm_head where it is not tied",
        why="the adapter alone learns",
    )
    bias: Literal["none", "all", "lora_only"] = setting(
        "none",
        description="biases that train beside the adapter: all, or those of its layers",
        why="without them the model is the base again where the adapter is off",
    )
    use_rslora: bool = setting(
        False,
        description="multiply by lora_alpha / sqrt(r) (arXiv:2312.03732)",
        why="matters for ranks far above 16",
    )
    use_dora: bool = setting(
        False,
        description="train each row's length apart from its direction (arXiv:2402.09353)",
        why="takes more time and memory for each step",
    )
    init_lora_weights: bool | str = setting(
        True,
        description='how the adapter starts: true for peft\'s own, "gaussian" for another first matrix',
        why="as peft does; the second matrix is 0, so that the policy starts as the base",
    )

    @field_validator("target_modules")
    @classmethod
    def _targets_something(cls, value: Any) -> Any:
        if not value:
            raise ValueError('must name a layer; write "all-linear" for all of them')
        return value

    @field_validator("init_lora_weights")
    @classmethod
    def _starts_at_the_base(cls, value: bool | str) -> bool | str:
        if value is not True and value != "gaussian":
            raise ValueError(
                'must be true or "gaussian": others change the base, or start away from it, and then the base would be '
                "neither what the servers hold nor the reference"
            )
        return value
