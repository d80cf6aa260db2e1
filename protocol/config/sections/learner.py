"""Settings of the learner: optimiser, batch, checkpoints, ranks, adapter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.config.sections.base import Count, CountOrZero, InFile, Seconds, Section, setting

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

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimiserSection(AlgorithmSection):
    """Settings of [learner] for the optimiser and its schedule."""

    optim: OptimiserName = setting(
        "adamw_torch_fused",
        description="optimiser, by transformers' name; muon is torch's, for the layers' matrices, with AdamW for "
        "the rest",
        why="fused AdamW; 8-bit and paged ones need a GPU and bitsandbytes",
    )
    optim_args: dict[str, Any] = setting(
        {},
        description="further arguments of the optimiser's class, such as momentum or eps",
        why="the optimiser's",
    )
    lr_scheduler_type: ScheduleName = setting(
        "constant_with_warmup",
        description="schedule after the warm-up, by transformers' name, over learner.steps",
        why="runs may be extended or stopped early",
    )
    lr_scheduler_kwargs: dict[str, Any] = setting(
        {},
        description="further arguments of the schedule, such as min_lr_rate or num_cycles",
        why="the schedule's",
    )


class LearnerSection(OptimiserSection):
    steps: Count = setting(100, description="optimiser steps", why="enough to see learning")
    epochs: float | None = setting(
        None,
        gt=0,
        le=10**6,
        description="passes over the data set, instead of steps: rows x epochs / groups_per_step, rounded up",
        why="steps suit any data set",
    )
    groups_per_step: Count = setting(
        16, description="B: groups per optimiser step", why="128 rollouts a step by default"
    )
    num_iterations: Count = setting(
        1,
        le=64,
        description="weight updates per batch, at one learning rate; above 1 the ratio is to the policy before "
        "the step if learner.correction has a proximal policy, else to the sampler",
        why="fresh data teaches more; try 2 to 4 if sampling is the limit",
    )
    learning_rate: float = setting(
        1e-6,
        gt=0,
        le=1,
        description="learning rate after the warm-up",
        why="TRL's for GRPO; safe for full training from 0.5 B on; an adapter needs 10 to 100 times as much",
    )
    warmup_steps: CountOrZero = setting(
        0,
        description="steps of warm-up, which begins at learning_rate / warmup_steps",
        why="the learning rate is small already",
    )
    betas: tuple[Decay, Decay] = setting(
        (0.9, 0.95),
        strict=False,
        description="AdamW's two decay rates",
        why="usual for language models; 0.999 forgets too slowly",
    )
    weight_decay: float = setting(
        0.0,
        ge=0,
        le=10,
        description="weight decay of all weights except vectors",
        why="RL moves weights too little",
    )
    demonstrations_coef: float = setting(
        0.0,
        ge=0,
        le=100,
        description="adds this times the mean cross entropy of conversations of demonstrations.path to the loss",
        why="rewards alone",
    )
    max_grad_norm: float = setting(
        1.0, gt=0, le=1e9, description="gradients are scaled down to this norm", why="usual; TRL's"
    )
    zero_variance: Literal["refill", "drop", "keep"] = setting(
        "refill",
        description="groups of equal rewards: refill replaces them, drop shortens the step, keep trains them "
        "(gradient of kl_coef and entropy_coef alone)",
        why="keeps the step's size",
    )
    token_budget: Count = setting(
        8192,
        description="tokens of one packed micro-batch",
        why="one long episode or many short ones; on GPUs `slipstream up` fits it to the memory",
    )
    layout: Literal["auto", "trie", "packed", "padded"] = setting(
        "auto",
        description="sequences in a micro-batch: trie computes shared prefixes once, packed puts them end to end,"
        " padded makes a batch; auto takes the first that a start check finds exact (docs/models.md)",
        why="as fast as the layers allow",
    )
    router_replay: bool = setting(
        False,
        description="mixtures of experts: the learner uses the experts that the server chose for each token, with"
        " its own router weights (own choice where none are known); servers run with "
        "--enable-return-routed-experts",
        why="costs layers x choices bytes a token; trains the policy that sampled",
    )
    router_replay_check_every: CountOrZero = setting(
        20,
        description="steps between measurements of router_replay's effect (router_replay/logprob_diff_without), a"
        " forward pass over one row each; 0: never",
        why="costs under 1 % of the time",
    )
    logits_mib: Annotated[int, Field(ge=1, le=2**20)] = setting(
        512,
        description="maximum MiB of logits and what is computed from them, at once",
        why="a 28th of all logits of 8,192 tokens and 150,000 words, no slower",
    )
    weights_dtype: Literal["float32", "model"] = setting(
        "float32",
        description="type of the optimiser's weights; model: model.dtype, without a float32 copy",
        why="small steps vanish in bfloat16",
    )
    gradient_checkpointing: bool = setting(
        False,
        description="keep only the layers' inputs and compute the layers again in the backward pass",
        why="a third more arithmetic; on GPUs `slipstream up` sets it where needed",
    )
    compile: bool = setting(
        False,
        description="compile the model's layers with torch.compile",
        why="needs a C++ compiler and a minute",
    )
    ranks: int = setting(
        1,
        ge=1,
        le=4096,
        description="processes that share each step, on this machine; unset under accelerate launch or torchrun",
        why="one GPU, or one machine's cores",
    )
    shard_weights: bool = setting(
        False,
        description="shard weights, gradients and optimiser state over the ranks (FSDP2)",
        why="only for models that do not fit one GPU",
    )
    rank_timeout_s: float = setting(
        120.0,
        ge=10,
        le=7 * 24 * 3600,
        description="time without a sign of life after which a rank counts as dead and the run ends",
        why="longer than a swapping machine stalls",
    )
    prefetch_steps: CountOrZero = setting(
        1,
        description="steps whose groups are leased ahead",
        why="the next batch is ready, at most one version older",
    )
    checkpoint_every: CountOrZero = setting(
        50, description="steps between checkpoints; 0: not by steps", why="a crash costs at most 50 steps"
    )
    checkpoint_minutes: float = setting(
        10.0,
        ge=0,
        le=7 * 24 * 60,
        description="greatest age of the newest checkpoint; the step after it writes another; 0: not by time",
        why="a crash costs at most 10 minutes",
    )
    keep_checkpoints: Count = setting(2, description="newest checkpoints to keep", why="one to fall back on")
    keep_best: bool = setting(
        False,
        description="also keep the checkpoint with the best evaluation reward, named in checkpoints/best.json",
        why="needs evaluations at checkpoint steps",
    )
    skip_bad_batches: CountOrZero = setting(
        3,
        description="consecutive batches to leave out because loss or gradient is not finite, or memory does not "
        "suffice; one more ends the run",
        why="several in a row mean a broken policy",
    )
    on_collapse: Literal["stop", "warn"] = setting(
        "stop",
        description="when an update destroys the policy (docs/training.md has the rule): `stop` ends the run and "
        "names the last good checkpoint, `warn` continues",
        why="further checkpoints would replace good ones",
    )
    sample_rollouts: CountOrZero = setting(
        4, description="rollouts of each step that go to rollouts.jsonl", why="best, worst and two others"
    )
    show_rollout_every: CountOrZero = setting(
        0, description="steps between rollouts shown on the terminal; 0: none", why="it shows steps"
    )
    callbacks: list[InFile] = setting(
        [],
        description="transformers' TrainerCallback objects, classes or lists of them, as path/to/file.py:name",
        why="reports need none",
    )
    script: str | None = setting(
        None,
        description="Python file of a trainer that calls `slipstream.join`, started as `script.py run.toml`; of "
        "[learner] it uses what makes batches",
        why="Slipstream's learner trains",
    )
    stall_timeout_s: Seconds = setting(
        3600.0,
        description="time without a group or a step after which the learner gives up",
        why="longer than the longest episode",
    )


class LoraSection(Section):
    r: CountOrZero = setting(
        0,
        description="rank of the adapter; 0: no adapter, all weights train",
        why="full training learns most per step",
    )
    lora_alpha: Count = setting(
        32,
        description="the adapter's product is multiplied by lora_alpha / r",
        why="twice the usual rank of 16",
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
        description="adapted linear layers: names, a regular expression of whole names, all-linear (all but the "
        "output layer; in mixtures of experts those of attention), or auto for peft's choice",
        why="learns most at a given rank",
    )
    exclude_modules: list[str] = setting([], description="names of layers to leave out", why="none")
    layers_to_transform: list[CountOrZero] = setting(
        [], description="numbers of the adapted layers; empty: all", why="all learn"
    )
    rank_pattern: dict[str, Count] = setting(
        {}, description="another rank for layers by name or regular expression", why="one rank"
    )
    alpha_pattern: dict[str, Count] = setting({}, description="another lora_alpha likewise", why="one lora_alpha")
    modules_to_save: list[str] = setting(
        [],
        description="modules trained in full, such as an untied lm_head",
        why="the adapter alone learns",
    )
    bias: Literal["none", "all", "lora_only"] = setting(
        "none",
        description="biases to train: all, or those of adapted layers",
        why="disabling the adapter gives the base",
    )
    use_rslora: bool = setting(
        False,
        description="multiply by lora_alpha / sqrt(r) (arXiv:2312.03732)",
        why="matters far above rank 16",
    )
    use_dora: bool = setting(
        False,
        description="train each row's length apart from its direction (arXiv:2402.09353)",
        why="slower, more memory",
    )
    init_lora_weights: bool | str = setting(
        True,
        description='initialisation: true for peft\'s own, "gaussian" for another first matrix',
        why="peft's; the policy starts as the base",
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


class DemonstrationsSection(Section):
    path: str | None = setting(
        None,
        min_length=1,
        description="conversations for `slipstream sft` and learner.demonstrations_coef: a file, folder or hub name",
        why="RL needs none",
    )
    epochs: float = setting(3.0, gt=0, le=10**6, description="passes of `slipstream sft` over them", why="TRL's")
    batch_size: Count = setting(16, description="conversations in a step", why="steps enough in 500 of them")
    learning_rate: float | None = setting(
        None,
        gt=0,
        le=1,
        description="rate of `slipstream sft` after the warm-up, a twentieth of the steps; it falls to 0",
        why="5 times that of RL for the model's size (docs/training.md)",
    )
    eval_share: float = setting(
        0.05,
        ge=0,
        lt=1,
        description="share that `slipstream sft` holds out, to measure the loss on",
        why="shows whether more epochs help",
    )
