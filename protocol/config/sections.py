"""The settings of a run, section by section: typed, bounded, each with its meaning and the reason for its default.

As long as there are settings: what a setting is stands in one place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Bytes = Annotated[int, Field(ge=1024, le=2**50)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


def setting(default: Any, *, description: str, why: str, **bounds: Any) -> Any:
    """A setting with a default, and the reason for that."""
    return Field(default, description=description, json_schema_extra={"why": why}, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = setting(
        "run",
        description="names the run and its directory: letters, digits, '_', '-' and, except at the start, '.'",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        why="one run needs no name of its own",
    )
    dir: Path = setting(
        Path("runs"),
        strict=False,
        description="parent of the run directory, from the working directory",
        why="results lie where you started the run",
    )
    seed: int = setting(
        0,
        ge=0,
        lt=2**31,
        description="data order, sampling and initial state follow from it",
        why="runs are repeatable unless you ask for others",
    )

    @field_validator("dir")
    @classmethod
    def _home_is_expanded(cls, value: Path) -> Path:
        return value.expanduser()


class ModelSection(Section):
    path: str = Field(description="a local model folder, such as ./model, or a Hugging Face hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32",
        description="type of the learner's weights and of the servers'",
        why="right everywhere; on a GPU take bfloat16, which halves memory and traffic",
    )
    tokenizer: str | None = setting(
        None,
        description="folder or hub name of the tokenizer, if it is not the model's; its newest revision",
        why="a model comes with its own",
    )
    revision: str | None = setting(
        None,
        description="branch, tag or commit of the model on the hub",
        why="the newest; a run that must be repeatable names a commit",
    )
    trust_remote_code: bool = setting(
        False,
        description="run the code that comes with the model",
        why="a model's code may do anything that you may",
    )
    attention: str = setting(
        "varlen_sdpa",
        description="attention of the learner: varlen_sdpa (any device) or a transformers implementation "
        "that reads cu_seq_lens, such as flash_attention_2",
        why="needs no package and no GPU; on a GPU flash_attention_2 is faster",
    )

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is: a folder or a hub name."""
        return self.tokenizer or self.path

    @property
    def tokenizer_revision(self) -> str | None:
        """`revision`, where the tokenizer is the model's: another repository has its own."""
        return self.revision if self.tokenizer is None else None


class TaskSection(Section):
    path: str = Field(description="the task object, as path/to/file.py:name", pattern=r"^.+\.py:[A-Za-z_]\w*$")
    shuffle: bool = setting(
        True,
        description="new order of the rows in every epoch; false: the order of the data set, as a curriculum needs",
        why="rows that stand together are often alike",
    )
    mcp_servers: list[str] = setting(
        [],
        description="MCP servers whose tools the task gets: a URL (streamable HTTP) or a command line (stdio)",
        why="tools are the task's own functions unless you name some",
    )
    reward_servers: dict[str, str] = setting(
        {},
        description="URL of the vLLM pooling server that scores each classifier that the task names as a reward",
        why="rewards are the task's own functions unless you name some",
    )

    @property
    def file(self) -> Path:
        return Path(self.path.rsplit(":", 1)[0])

    @property
    def object_name(self) -> str:
        return self.path.rsplit(":", 1)[1]


class ChatSection(Section):
    format: Literal["auto", "renderer", "template"] = setting(
        "auto",
        description="between messages and ids: renderer is the one that the renderers library has for the model, "
        "template the tokenizer's own; auto takes a renderer where the library knows the model by its name",
        why="a renderer knows more of its model than a template says",
    )
    renderer: str | None = setting(
        None,
        description="name of the renderer, such as qwen3: for a fine-tune or a local folder of a model that is known",
        why="told from the model's name where that is possible",
    )
    renderer_options: dict[str, Any] = setting(
        {},
        description="fields of the renderer's configuration, such as enable_thinking",
        why="the renderer's own defaults",
    )
    template: Path | None = setting(
        None,
        strict=False,
        description="a Jinja file in place of the tokenizer's chat template",
        why="the model was trained with its own",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        description="variables for the chat template, such as enable_thinking = false",
        why="the template's own defaults",
    )
    parser: str = setting(
        "auto",
        description="how tool calls are written, where a template is used: auto tries the tokenizer's response schema "
        "and then each notation on a rendered call; or the name of one (docs/models.md); or path/to/file.py:function",
        why="the start check finds the notation, and refuses where it cannot",
    )
    system_prompt: str | None = setting(
        None,
        description="a system message before conversations that have none",
        why="the data set's prompts are used as they are",
    )


class RolloutSection(Section):
    group_size: int = setting(
        8, ge=2, le=1024, description="episodes per prompt", why="the usual size in GRPO papers and TRL's default"
    )
    temperature: float = setting(
        1.0,
        ge=0.01,
        le=2,
        description="sampling temperature, within vLLM's bounds",
        why="samples the policy as it is; other values train a sharpened or flattened one",
    )
    max_turn_tokens: Count = setting(
        512,
        description="tokens that one turn may sample",
        why="long enough for a tool call or a short answer; reasoning models need more",
    )
    max_episode_tokens: Count = setting(
        2048,
        description="tokens that one episode may sample",
        why="TRL's max_completion_length in its asynchronous trainer",
    )
    top_p: float = setting(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling; below 1 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    top_k: CountOrZero = setting(
        0, description="sample from the k likeliest tokens; 0: from all", why="samples the policy as it is"
    )
    min_p: float = setting(
        0.0,
        ge=0,
        le=1,
        description="leave out tokens less likely than this share of the likeliest one's probability",
        why="samples the policy as it is",
    )
    repetition_penalty: float = setting(
        1.0,
        gt=0,
        le=10,
        description="vLLM's; other than 1 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    presence_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    frequency_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    stop: list[str] = setting(
        [],
        description="texts that end a turn; they stay in it, and train",
        why="the model's own end of turn is enough",
    )
    generation_kwargs: dict[str, Any] = setting(
        {},
        description="further fields of vLLM's SamplingParams, such as bad_words",
        why="what is needed has a setting of its own",
    )
    accept_sampler_mismatch: bool = setting(
        False,
        description="allow settings whose log-probs the learner cannot reproduce; it applies the temperature alone, so "
        "watch sampler/kl_staleness_0",
        why="ratios would be wrong from the first step on, and nobody would see it",
    )
    max_turns: CountOrZero = setting(
        8, description="turns of the policy in one episode; 0: any number", why="seven tool calls and an answer"
    )
    max_tool_result_tokens: Count | Literal["auto"] = setting(
        "auto",
        description="tokens of one tool result; the middle of a longer one is left out. auto: half the context",
        why="one long page does not end an episode",
    )
    mask_truncated: bool = setting(
        False,
        description="do not train on rollouts that ran out of tokens; TRL's mask_truncated_completions",
        why="running out of tokens is worth a low reward",
    )
    give_up_after: CountOrZero = setting(
        16,
        description="groups that fail before any succeeded, after which the run ends with the failure; 0: never",
        why="sixteen in a row are no chance, and the fault shows within a minute",
    )


class QueueSection(Section):
    host: str = setting(
        "127.0.0.1",
        description="address that the queue listens on",
        why="nobody else can reach it, so no token is needed",
    )
    port: Port = setting(
        8200, description="port that the queue listens on", why="free on most machines, and not vLLM's"
    )
    token: str | None = setting(
        None,
        description="bearer token of every route; SLIPSTREAM_TOKEN in the environment overrides it",
        why="loopback needs none; every other address refuses to start without",
    )
    store: Literal["sqlite", ":memory:"] = setting(
        "sqlite",
        description="sqlite survives kill -9; :memory: is for throw-away runs",
        why="a crash of any process loses nothing",
    )
    capacity_groups: Count = setting(
        10_000,
        description="most groups that the queue holds",
        why="far above what admission lets out; a last bound, not a throttle",
    )
    capacity_bytes: Bytes = setting(
        2 * 1024**3,
        description="most bytes of groups that the queue holds",
        why="fits the memory and disk of a small machine",
    )
    max_group_bytes: Bytes = setting(
        64 * 1024**2, description="largest group that the queue accepts", why="16 rollouts of 400,000 tokens"
    )
    max_staleness: int = setting(
        4,
        ge=0,
        le=10_000,
        description="K: no token older than K versions contributes to a gradient",
        why="TRL's default; pacing keeps most tokens far younger, at 1.2 in the quickstart",
    )
    overage: Literal["mask", "drop"] = setting(
        "mask",
        description="what happens to tokens older than K: mask them, or drop the whole group",
        why="keeps what is young of a long episode",
    )
    depth: float | Literal["auto"] = setting(
        "auto",
        description="d: groups outstanding, in optimiser steps; auto adapts between 1 and K + 1",
        why="no figure fits two tasks; it finds the smallest that keeps the learner busy",
    )
    ticket_timeout_s: Seconds = setting(
        60.0, description="time-out of a ticket that no heartbeat renews", why="six missed heartbeats"
    )
    ticket_max_age_s: Seconds | Literal["auto"] = setting(
        "auto",
        description="time-out of a ticket however often it is renewed, so that a worker that hangs cannot hold it for "
        "ever; auto is 2 x (worker.episode_timeout_s + worker.reward_timeout_s)",
        why="twice what an episode and its rewards may take",
    )
    ticket_attempts: Count = setting(
        3,
        description="times that a row is issued before it is given up",
        why="one bad server or worker is outlived, a bad row is not tried for ever",
    )
    lease_timeout_s: Seconds = setting(
        120.0,
        description="time-out of a lease that is not renewed",
        why="three renewals may be lost, and a dead learner's groups are not held for long",
    )
    stall_after_s: Seconds = setting(
        120.0,
        description="seconds without an optimiser step that raise the stall alarm, or 5 median steps if longer",
        why="longer than a slow first episode, short enough to look up from",
    )

    @field_validator("depth", mode="before")
    @classmethod
    def _depth_is_positive(cls, value: object) -> object:
        is_depth = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 10_000
        if value != "auto" and not is_depth:
            raise ValueError("must be 'auto' or a number above 0 and at most 10000")
        return value

    @property
    def url(self) -> str:
        return _url("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host, self.port)


class WorkerSection(Section):
    count: int = setting(
        1,
        ge=0,
        le=256,
        description="workers that the launcher starts on this machine",
        why="one process runs hundreds of episodes",
    )
    episodes: Count = setting(
        256,
        description="episodes that one worker runs at once",
        why="fills a server of 64 to 256 sequences while tools run",
    )
    request_timeout_s: Seconds = setting(
        600.0, description="time-out of one generation request", why="TRL's request_timeout"
    )
    request_attempts: Count = setting(
        4, description="tries of a request after a 5xx or a lost connection", why="outlives the restart of one server"
    )
    tool_timeout_s: Seconds = setting(
        60.0, description="time-out of one tool call", why="a web request or a test run; slower tools say so"
    )
    reward_timeout_s: Seconds = setting(
        120.0, description="time-out of one reward function over one group", why="a judge model over one group"
    )
    episode_timeout_s: Seconds = setting(
        1800.0, description="time-out of one episode", why="half an hour is a very long episode"
    )
    tool_isolation: Literal["thread", "process"] = setting(
        "thread",
        description="where tools run: process has each call in a child process that imports the task file and is "
        "killed when it does not return; arguments and results cross as JSON",
        why="a thread costs nothing; take process for code that may not be trusted to come back",
    )
    user_threads: Count = setting(
        64,
        description="threads, or processes, that tools, rewards and other code of the task run in at once",
        why="as many as tools usually wait for; async tools need none",
    )
    reward_attempts: Count = setting(
        2,
        description="tries of a reward that fails, before its group fails; all within reward_timeout_s",
        why="a judge's hiccup costs no generation",
    )
    keep_messages: bool = setting(
        True,
        description="keep each rollout's conversation, at most 64 KiB of it, to be read: slipstream rollouts",
        why="what the policy says can then be read; it costs little beside the tokens",
    )


class LearnerSection(Section):
    steps: Count = setting(100, description="optimiser steps", why="enough to see whether it learns")
    epochs: float | None = setting(
        None,
        gt=0,
        le=10**6,
        description="passes over the data set, in place of steps: rows x epochs / groups_per_step steps, rounded up",
        why="steps are the same for any data set",
    )
    groups_per_step: Count = setting(
        16, description="B: groups per optimiser step", why="128 rollouts a step with the default group size"
    )
    learning_rate: float = setting(
        1e-6,
        gt=0,
        le=1,
        description="AdamW's learning rate after the warm-up",
        why="TRL's default for GRPO; safe for models of 0.5 B and more",
    )
    warmup_steps: CountOrZero = setting(
        0, description="steps of linear warm-up; constant afterwards", why="the learning rate is small already"
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.95),
        strict=False,
        description="AdamW's two decay rates",
        why="the usual pair for language models; 0.999 forgets too slowly for a few hundred steps",
    )
    weight_decay: float = setting(
        0.0, ge=0, le=10, description="AdamW's weight decay", why="RL moves the weights too little for it to matter"
    )
    max_grad_norm: float = setting(
        1.0, gt=0, le=1e9, description="gradients are scaled down to this norm", why="the usual bound; TRL's too"
    )
    advantage: Literal["grpo", "rloo"] = setting(
        "grpo",
        description="of a reward r in its group: grpo (r - mean) / std, rloo r - mean of the others",
        why="what most people mean by GRPO",
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
    advantage_epsilon: float = setting(1e-4, gt=0, le=1, description="(reward - mean) / (std + epsilon)", why="TRL's")
    zero_variance: Literal["refill", "drop", "keep"] = setting(
        "refill",
        description="groups whose rewards are all equal: refill replaces them with others, drop shortens the "
        "step, keep trains them (they have no gradient)",
        why="a step keeps its size, so its gradient keeps its noise",
    )
    token_budget: Count = setting(
        8192, description="tokens of one packed micro-batch", why="one long episode, or many short ones"
    )
    logprob_chunk_tokens: Count = setting(
        1024, description="tokens whose logits exist at one time", why="logits of 150,000 words then take 0.6 GB"
    )
    prefetch_steps: CountOrZero = setting(
        1,
        description="steps whose groups are leased ahead",
        why="the next batch is ready when the step ends, and is at most one version older for it",
    )
    checkpoint_every: CountOrZero = setting(
        50, description="steps between checkpoints; 0: at the end only", why="a crash costs at most 50 steps"
    )
    keep_checkpoints: Count = setting(
        2, description="newest checkpoints that are kept", why="the newest, and one to fall back on"
    )
    sample_rollouts: CountOrZero = setting(
        4, description="rollouts of each step that go to rollouts.jsonl", why="a best, a worst and two others a step"
    )
    show_rollout_every: CountOrZero = setting(
        0, description="steps between rollouts that are shown on the terminal; 0: none", why="the terminal shows steps"
    )
    stall_timeout_s: Seconds = setting(
        3600.0,
        description="seconds without a group or a step, after which the learner gives up",
        why="longer than the longest episode and its rewards",
    )

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each must be at least 0 and below 1")
        return value


class WeightSyncSection(Section):
    transport: Literal["gloo"] = setting("gloo", description="gloo: CPU and plain TCP", why="runs everywhere")
    every: Count = setting(
        1,
        description="N: optimiser steps between publications",
        why="the fresher the better, and a publication costs little",
    )
    host: str = setting(
        "127.0.0.1", description="the learner's address as the servers see it", why="right on one machine"
    )
    probe_tolerance: float = setting(
        1e-3,
        gt=0,
        le=1000,
        description="largest difference of log-probs between server and learner; bfloat16 needs 0.1",
        why="a hundred times what float32 differs by; bfloat16 is coarser",
    )
    timeout_s: Seconds = setting(
        300.0,
        description="time-out of one publication to one server, every call included",
        why="70 GB over a 2 Gbit/s line",
    )
    bucket_bytes: Bytes = setting(
        64 * 1024**2,
        description="bytes sent at one time",
        why="large enough that calls do not count, small enough to be staged",
    )


class VllmSection(Section):
    servers: list[str] = setting(
        [], description="URLs of running servers; empty: the launcher starts `count`", why="one machine needs no list"
    )
    count: int = setting(1, ge=1, le=64, description="servers that the launcher starts", why="one GPU")
    host: str = setting(
        "127.0.0.1",
        description="address that the launched servers listen on",
        why="nobody else can reach it, so no token is needed",
    )
    port: Port = setting(
        8100,
        description="port of the first launched server; the next ones follow",
        why="beside vLLM's usual 8000, which may be taken",
    )
    max_model_len: int = setting(
        4096,
        ge=16,
        le=10**9,
        description="context of the model: prompt, turns and tools",
        why="prompt, two thousand sampled tokens and tool results",
    )
    max_num_seqs: Count = setting(
        64, description="sequences that one server samples at once", why="vLLM slows down beyond what its cache holds"
    )
    start_timeout_s: Seconds = setting(
        600.0, description="time-out of a server's start", why="loading a large model and compiling it"
    )
    args: list[str] = setting(
        [],
        description="further arguments of vLLM's server, as on its command line",
        why="what is ours is set by itself",
    )

    @field_validator("servers")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        for url in value:
            if not re.match(r"^https?://[^/\s]+", url):
                raise ValueError(f"{url!r} is not a URL; write it as http://host:port")
        return [url.rstrip("/") for url in value]

    @property
    def urls(self) -> list[str]:
        return self.servers or [_url(self.host, self.port + i) for i in range(self.count)]


class DeploySection(Section):
    restart: CountOrZero = setting(
        3,
        description="times in a row that a vLLM server, a worker or the queue is started again after it died",
        why="a crash is outlived, a fault that comes back ends the run",
    )
    grace_s: Seconds = setting(
        20.0,
        description="after a stop, what has not ended within this time is killed",
        why="long enough for a checkpoint of a small model",
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
