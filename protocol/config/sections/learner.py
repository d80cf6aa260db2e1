"""Settings of the learner: optimiser, batch, checkpoints, ranks, adapter."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.config.sections.base import Count, CountOrZero, Seconds, Section, setting

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

# Optimisers that can step on sharded weights: tests/learner/ranks/test_sharded_optimisers.py tries each.
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
    """Settings of [learner] for the optimiser and its schedule."""

    optim: OptimiserName = setting(
        "adamw_torch_fused",
        description="optimiser, by transformers' name; muon is torch's, for the matrices of the layers, with AdamW for "
        "the rest",
        why="AdamW with torch's fused step; those in 8 bits and paged ones need a GPU and bitsandbytes",
    )
    optim_args: dict[str, Any] = setting(
        {},
        description="further keyword arguments of the optimiser's class, such as momentum or eps",
        why="the optimiser's own defaults",
    )
    lr_scheduler_type: ScheduleName = setting(
        "constant_with_warmup",
        description="schedule of the learning rate after the warm-up, by transformers' name, over learner.steps",
        why="a run may be extended or stopped early, and no step is weaker for it",
    )
    lr_scheduler_kwargs: dict[str, Any] = setting(
        {},
        description="further arguments of the schedule, such as min_lr_rate or num_cycles",
        why="the schedule's own defaults",
    )


class LearnerSection(OptimiserSection):
    steps: Count = setting(100, description="optimiser steps", why="enough to see whether it learns")
    epochs: float | None = setting(
        None,
        gt=0,
        le=10**6,
        description="passes over the data set, instead of steps: rows x epochs / groups_per_step steps, rounded up",
        why="steps are the same for any data set",
    )
    groups_per_step: Count = setting(
        16, description="B: groups per optimiser step", why="128 rollouts a step with the default group size"
    )
    num_iterations: Count = setting(
        1,
        le=64,
        description="updates of the weights on each step's batch, at one learning rate; more than 1 clips the ratio to "
        "the policy before the step where learner.correction has a proximal one, and to the sampler elsewhere",
        why="fresh data teaches more than the same data again; where sampling is what limits the run, 2 to 4",
    )
    learning_rate: float = setting(
        1e-6,
        gt=0,
        le=1,
        description="the learning rate after the warm-up",
        why="TRL's default for GRPO; safe for full training of models from 0.5 B on; an adapter needs 10 to 100 times "
        "as much",
    )
    warmup_steps: CountOrZero = setting(
        0,
        description="steps of warm-up, which begins at learning_rate / warmup_steps; then learner.lr_scheduler_type "
        "applies",
        why="the learning rate is small already",
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.95),
        strict=False,
        description="the two decay rates of AdamW and its kin",
        why="the usual pair for language models; 0.999 forgets too slowly for a few hundred steps",
    )
    weight_decay: float = setting(
        0.0,
        ge=0,
        le=10,
        description="weight decay of all weights except vectors",
        why="RL moves the weights too little for it to matter",
    )
    max_grad_norm: float = setting(
        1.0, gt=0, le=1e9, description="gradients are scaled down to this norm", why="the usual bound; TRL's too"
    )
    zero_variance: Literal["refill", "drop", "keep"] = setting(
        "refill",
        description="groups whose rewards are all equal: refill replaces them with others, drop shortens the "
        "step, keep trains them (their only gradient is that of kl_coef and entropy_coef)",
        why="a step keeps its size, so its gradient keeps its noise",
    )
    token_budget: Count = setting(
        8192,
        description="tokens of one packed micro-batch",
        why="one long episode, or many short ones; on GPUs `slipstream up` takes what fits their memory",
    )
    layout: Literal["auto", "trie", "packed", "padded"] = setting(
        "auto",
        description="how sequences stand in a micro-batch: trie computes what they share once, packed has them end to "
        "end, padded as a batch. auto takes the first of these that is exact for the model, by a check at the start: "
        "trie for attention, packed for linear attention and convolutions on a GPU with flash-linear-attention and "
        "causal-conv1d, padded for every other",
        why="a model is trained as fast as its layers allow",
    )
    router_replay: bool = setting(
        False,
        description="for mixtures of experts: the learner computes each token with the experts that the server chose "
        "for it, weighed by its own routers; servers run with --enable-return-routed-experts. Tokens of which none are "
        "known take the learner's own choice",
        why="needs the layers times choices of a model in bytes for each token; its loss is then of the policy that "
        "sampled, not of a near one with other experts",
    )
    router_replay_check_every: CountOrZero = setting(
        20,
        description="with router_replay: steps between measurements of what it changes "
        "(router_replay/logprob_diff_without), each a forward pass over one row; 0: never",
        why="costs less than a hundredth of the time",
    )
    logits_mib: Annotated[int, Field(ge=1, le=2**20)] = setting(
        512,
        description="maximum MiB of logits and of all that is computed from them, at one time",
        why="a 28th of the memory that 8,192 tokens and 150,000 words would take at once, and no slower",
    )
    weights_dtype: Literal["float32", "model"] = setting(
        "float32",
        description="type of the weights that the optimiser steps on; model: model.dtype, without a copy in float32",
        why="in bfloat16 a small step leaves most weights unchanged",
    )
    gradient_checkpointing: bool = setting(
        False,
        description="keep only the inputs of the model's layers, and compute the layers again in the backward pass",
        why="a third more arithmetic; on GPUs `slipstream up` sets it where rows do not fit otherwise",
    )
    compile: bool = setting(
        False,
        description="compile the model's layers with torch.compile",
        why="needs a C++ compiler, and a minute at the start",
    )
    ranks: int = setting(
        1,
        ge=1,
        le=4096,
        description="processes that share each step, on this machine; with accelerate launch or torchrun, leave it out",
        why="one GPU, or the cores of one machine",
    )
    shard_weights: bool = setting(
        False,
        description="each rank holds only a part of weights, gradients and optimiser state (FSDP2)",
        why="a model that fits one GPU trains faster whole; for one that does not, with ranks above 1",
    )
    rank_timeout_s: float = setting(
        120.0,
        ge=10,
        le=7 * 24 * 3600,
        description="time without a sign of life after which a rank is taken for dead, and the run ends",
        why="longer than a swapping machine stands still",
    )
    prefetch_steps: CountOrZero = setting(
        1,
        description="steps whose groups are leased ahead",
        why="the next batch is ready when a step ends, and at most one version older",
    )
    checkpoint_every: CountOrZero = setting(
        50, description="steps between checkpoints; 0: not by steps", why="a crash costs at most 50 steps"
    )
    checkpoint_minutes: float = setting(
        10.0,
        ge=0,
        le=7 * 24 * 60,
        description="age at which the newest checkpoint is too old, so that another is written after the step; 0: not "
        "by time",
        why="a crash costs at most 10 minutes, however long a step takes",
    )
    keep_checkpoints: Count = setting(
        2, description="number of newest checkpoints to keep", why="the newest, and one to fall back on"
    )
    keep_best: bool = setting(
        False,
        description="also keep the checkpoint whose evaluation gave the highest reward, however old; "
        "checkpoints/best.json names it",
        why="needs evaluations at the steps of checkpoints",
    )
    skip_bad_batches: CountOrZero = setting(
        3,
        description="maximum batches in a row left out because loss or gradient is not finite, or memory does not hold "
        "them; one more ends the run",
        why="one bad batch costs its groups, not the run; several in a row mean that the policy itself is broken",
    )
    on_collapse: Literal["stop", "warn"] = setting(
        "stop",
        description="when an update has destroyed the policy (docs/training.md says by which figures): `stop` ends the "
        "run and names the last good checkpoint, `warn` goes on",
        why="steps of a destroyed policy teach nothing, and their checkpoints replace the good ones",
    )
    sample_rollouts: CountOrZero = setting(
        4, description="rollouts of each step that go to rollouts.jsonl", why="a best, a worst and two others a step"
    )
    show_rollout_every: CountOrZero = setting(
        0, description="steps between rollouts shown on the terminal; 0: none", why="the terminal shows steps"
    )
    callbacks: list[str] = setting(
        [],
        description="transformers' TrainerCallback objects or classes, or lists of them, each as path/to/file.py:name",
        why="metrics.jsonl and [tracking] report each step; a callback may also act on it",
    )
    script: str | None = setting(
        None,
        description="Python file of a trainer of your own, which `slipstream.join` gives the run to; it is started as "
        "`script.py run.toml`, and reads of [learner] what says how batches are made",
        why="Slipstream's own learner trains",
    )
    stall_timeout_s: Seconds = setting(
        3600.0,
        description="time without a group or a step after which the learner gives up",
        why="longer than the longest episode with its rewards and environment",
    )

    @field_validator("callbacks")
    @classmethod
    def _callbacks_name_files(cls, value: list[str]) -> list[str]:
        for callback in value:
            if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", callback):
                raise ValueError(f"{callback!r} is not a callback: write path/to/file.py:name")
        return value

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each must be at least 0 and below 1")
        return value


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
        description="must be 0: with dropout the learner's log-probs would not be the sampler's",
        why="the only valid value",
    )
    target_modules: str | list[str] = setting(
        "all-linear",
        description="linear layers that get a part of the adapter: names, a regular expression of whole names, "
        "all-linear for all but the output layer (of a mixture of experts, those of attention), or auto for peft's "
        "choice for the architecture",
        why="the most that an adapter of a rank can learn",
    )
    exclude_modules: list[str] = setting([], description="names of layers that get no part of it", why="none")
    layers_to_transform: list[CountOrZero] = setting(
        [], description="numbers of the model's layers that get a part of it; empty: all", why="all of them learn"
    )
    rank_pattern: dict[str, Count] = setting(
        {}, description="another rank for layers by name or regular expression", why="one rank for all"
    )
    alpha_pattern: dict[str, Count] = setting(
        {}, description="another lora_alpha likewise", why="one lora_alpha for all"
    )
    modules_to_save: list[str] = setting(
        [],
        description="names of modules trained in full beside the adapter, such as an untied lm_head",
        why="the adapter alone learns",
    )
    bias: Literal["none", "all", "lora_only"] = setting(
        "none",
        description="biases that train beside the adapter: all, or those of its layers",
        why="without them the model with its adapter off is the base again",
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
