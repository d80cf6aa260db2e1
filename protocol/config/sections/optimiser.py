"""Which optimiser steps on the weights, and how its learning rate goes: by transformers' names."""

from __future__ import annotations

from typing import Any, Literal

from protocol.config.sections.algorithm import AlgorithmSection
from protocol.config.sections.base import setting

OptimiserName = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "stable_adamw",
    "adafactor",
    "muon",
    "sgd",
    "adagrad",
    "rmsprop",
]
# Those that step on weights that ranks share out, which not all can: tests/learner/test_sharded_optimisers.py.
SHARDED = frozenset({"adamw_torch_fused", "adamw_torch", "muon", "sgd", "adagrad", "rmsprop"})
ScheduleName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class OptimiserSection(AlgorithmSection):
    """A part of [learner]."""

    optim: OptimiserName = setting(
        "adamw_torch_fused",
        description="optimiser, by transformers' name; muon is torch's, for the matrices of the layers, with AdamW for "
        "the rest",
        why="AdamW with torch's fused step; those in 8 bits and paged ones need a GPU and bitsandbytes",
    )
    optim_args: dict[str, Any] = setting(
        {},
        description="further keyword arguments of the optimiser's class, such as momentum or eps",
        why="each has defaults of its own",
    )
    lr_scheduler_type: ScheduleName = setting(
        "constant_with_warmup",
        description="how the learning rate goes after the warm-up, by transformers' name, over learner.steps",
        why="a run may be prolonged or end early, and no step is weaker for it",
    )
    lr_scheduler_kwargs: dict[str, Any] = setting(
        {},
        description="further arguments of the schedule, such as min_lr_rate or num_cycles",
        why="each has defaults of its own",
    )
