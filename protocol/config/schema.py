"""The settings of a run: typed, bounded, with cross-field checks that name the symptom a wrong one would show."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Settings of earlier releases that a run file may still hold, and what to write instead.
REMOVED = {
    ("learner", "correction"): "there is no choice of correction; leave it out",
}
# Values of earlier releases, likewise.
REMOVED_VALUES = {
    ("learner", "objective", "grpo"): 'write advantage = "grpo" and objective = "ppo_clip", or leave it out',
}

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Bytes = Annotated[int, Field(ge=1024, le=2**50)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        "run",
        description="names the run and its directory: letters, digits, '_', '-' and, except at the start, '.'",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
    )
    dir: Path = Field(Path("runs"), strict=False, description="parent of the run directory, from the working directory")
    seed: int = Field(0, ge=0, lt=2**31, description="data order, sampling and initial state follow from it")

    @field_validator("dir")
    @classmethod
    def _home_is_expanded(cls, value: Path) -> Path:
        return value.expanduser()


class ModelSection(Section):
    path: str = Field(description="a local model folder, such as ./model, or a Hugging Face hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="type of the learner's weights and of the servers'"
    )
    attention: str = Field(
        "varlen_sdpa",
        description="attention of the learner: varlen_sdpa (any device) or a transformers implementation "
        "that reads cu_seq_lens, such as flash_attention_2",
    )


class TaskSection(Section):
    path: str = Field(description="the task object, as path/to/file.py:name", pattern=r"^.+\.py:[A-Za-z_]\w*$")

    @property
    def file(self) -> Path:
        return Path(self.path.rsplit(":", 1)[0])

    @property
    def object_name(self) -> str:
        return self.path.rsplit(":", 1)[1]


class ChatSection(Section):
    format: Literal["template"] = Field(
        "template", description="between messages and ids: template is the tokenizer's own, with Hermes tool calls"
    )


class RolloutSection(Section):
    group_size: int = Field(8, ge=2, le=1024, description="episodes per prompt")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")
    max_turn_tokens: Count = Field(512, description="tokens that one turn may sample")
    max_episode_tokens: Count = Field(2048, description="tokens that one episode may sample")
    max_turns: Count = Field(8, description="turns of the policy in one episode")
    give_up_after: CountOrZero = Field(
        16, description="groups that fail before any succeeded, after which the run ends with the failure; 0: never"
    )


class QueueSection(Section):
    host: str = Field("127.0.0.1", description="address that the queue listens on")
    port: Port = Field(8200, description="port that the queue listens on")
    token: str | None = Field(
        None, description="bearer token of every route; SLIPSTREAM_TOKEN in the environment overrides it"
    )
    store: Literal["sqlite", ":memory:"] = Field(
        "sqlite", description="sqlite survives kill -9; :memory: is for throw-away runs"
    )
    capacity_groups: Count = Field(10_000, description="most groups that the queue holds")
    capacity_bytes: Bytes = Field(2 * 1024**3, description="most bytes of groups that the queue holds")
    max_group_bytes: Bytes = Field(64 * 1024**2, description="largest group that the queue accepts")
    max_staleness: int = Field(
        4, ge=0, le=10_000, description="K: no token older than K versions contributes to a gradient"
    )
    overage: Literal["mask", "drop"] = Field(
        "mask", description="what happens to tokens older than K: mask them, or drop the whole group"
    )
    depth: float | Literal["auto"] = Field(
        "auto", description="d: groups outstanding, in optimiser steps; auto adapts between 1 and K + 1"
    )
    ticket_timeout_s: Seconds = Field(60.0, description="time-out of a ticket that no heartbeat renews")
    ticket_max_age_s: Seconds | Literal["auto"] = Field(
        "auto",
        description="time-out of a ticket however often it is renewed, so that a worker that hangs cannot hold it for "
        "ever; auto is 2 x (worker.episode_timeout_s + worker.reward_timeout_s)",
    )
    ticket_attempts: Count = Field(3, description="times that a row is issued before it is given up")
    lease_timeout_s: Seconds = Field(120.0, description="time-out of a lease that is not renewed")
    stall_after_s: Seconds = Field(
        120.0, description="seconds without an optimiser step that raise the stall alarm, or 5 median steps if longer"
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
    count: int = Field(1, ge=0, le=256, description="workers that the launcher starts on this machine")
    episodes: Count = Field(256, description="episodes that one worker runs at once")
    request_timeout_s: Seconds = Field(600.0, description="time-out of one generation request")
    request_attempts: Count = Field(4, description="tries of a request after a 5xx or a lost connection")
    tool_timeout_s: Seconds = Field(60.0, description="time-out of one tool call")
    reward_timeout_s: Seconds = Field(120.0, description="time-out of one reward function over one group")
    episode_timeout_s: Seconds = Field(1800.0, description="time-out of one episode")
    keep_messages: bool = Field(
        True,
        description="keep each rollout's conversation, at most 64 KiB of it, to be read: slipstream rollouts",
    )


class LearnerSection(Section):
    steps: Count = Field(100, description="optimiser steps")
    groups_per_step: Count = Field(16, description="B: groups per optimiser step")
    learning_rate: float = Field(1e-6, gt=0, le=1, description="AdamW's learning rate after the warm-up")
    warmup_steps: CountOrZero = Field(0, description="steps of linear warm-up; constant afterwards")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="AdamW's two decay rates")
    weight_decay: float = Field(0.0, ge=0, le=10, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, le=1e9, description="gradients are scaled down to this norm")
    advantage: Literal["grpo", "rloo"] = Field(
        "grpo",
        description="of a reward r in its group: grpo (r - mean) / std, rloo r - mean of the others",
    )
    objective: Literal["ppo_clip"] = Field("ppo_clip", description="the loss of a token, from its ratio and advantage")
    clip_low: float = Field(0.2, gt=0, lt=1, description="PPO clip: the ratio stays above 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, le=1000, description="PPO clip: the ratio stays below 1 + clip_high")
    advantage_epsilon: float = Field(1e-4, gt=0, le=1, description="(reward - mean) / (std + epsilon)")
    zero_variance: Literal["refill", "drop", "keep"] = Field(
        "refill",
        description="groups whose rewards are all equal: refill replaces them with others, drop shortens the "
        "step, keep trains them (they have no gradient)",
    )
    token_budget: Count = Field(8192, description="tokens of one packed micro-batch")
    logprob_chunk_tokens: Count = Field(1024, description="tokens whose logits exist at one time")
    prefetch_steps: CountOrZero = Field(1, description="steps whose groups are leased ahead")
    checkpoint_every: CountOrZero = Field(50, description="steps between checkpoints; 0: at the end only")
    keep_checkpoints: Count = Field(2, description="newest checkpoints that are kept")
    sample_rollouts: CountOrZero = Field(4, description="rollouts of each step that go to rollouts.jsonl")
    show_rollout_every: CountOrZero = Field(
        0, description="steps between rollouts that are shown on the terminal; 0: none"
    )
    stall_timeout_s: Seconds = Field(
        3600.0, description="seconds without a group or a step, after which the learner gives up"
    )

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each must be at least 0 and below 1")
        return value


class WeightSyncSection(Section):
    transport: Literal["gloo"] = Field("gloo", description="gloo: CPU and plain TCP")
    every: Count = Field(1, description="N: optimiser steps between publications")
    host: str = Field("127.0.0.1", description="the learner's address as the servers see it")
    probe_tolerance: float = Field(
        1e-3,
        gt=0,
        le=1000,
        description="largest difference of log-probs between server and learner; bfloat16 needs 0.1",
    )
    timeout_s: Seconds = Field(300.0, description="time-out of one publication to one server, every call included")
    bucket_bytes: Bytes = Field(64 * 1024**2, description="bytes sent at one time")


class VllmSection(Section):
    servers: list[str] = Field([], description="URLs of running servers; empty: the launcher starts `count`")
    count: int = Field(1, ge=1, le=64, description="servers that the launcher starts")
    host: str = Field("127.0.0.1", description="address that the launched servers listen on")
    port: Port = Field(8100, description="port of the first launched server; the next ones follow")
    max_model_len: int = Field(4096, ge=16, le=10**9, description="context of the model: prompt, turns and tools")
    max_num_seqs: Count = Field(64, description="sequences that one server samples at once")
    start_timeout_s: Seconds = Field(600.0, description="time-out of a server's start")
    args: list[str] = Field([], description="further arguments of vLLM's server, as on its command line")

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
    restart: CountOrZero = Field(
        3, description="times in a row that a vLLM server, a worker or the queue is started again after it died"
    )
    grace_s: Seconds = Field(20.0, description="after a stop, what has not ended within this time is killed")


class RunConfig(Section):
    """The whole run file, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection
    chat: ChatSection = ChatSection()
    rollout: RolloutSection = RolloutSection()
    queue: QueueSection = QueueSection()
    worker: WorkerSection = WorkerSection()
    learner: LearnerSection = LearnerSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    vllm: VllmSection = VllmSection()
    deploy: DeploySection = DeploySection()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def token(self) -> str | None:
        return os.environ.get("SLIPSTREAM_TOKEN") or self.queue.token

    @property
    def ticket_max_age_s(self) -> float:
        """`queue.ticket_max_age_s` with its "auto" worked out."""
        age, worker = self.queue.ticket_max_age_s, self.worker
        return 2 * (worker.episode_timeout_s + worker.reward_timeout_s) if age == "auto" else age

    @property
    def server_names(self) -> dict[str, str]:
        """URL of each server by its name, in the order of the run file."""
        return {f"vllm-{i}": url for i, url in enumerate(self.vllm.urls)}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        rollout, queue, learner = self.rollout, self.queue, self.learner
        if rollout.max_turn_tokens >= self.vllm.max_model_len:
            raise ValueError(
                f"rollout.max_turn_tokens = {rollout.max_turn_tokens} leaves no room for a prompt in "
                f"vllm.max_model_len = {self.vllm.max_model_len}: lower the one or raise the other"
            )
        if rollout.group_size > self.worker.episodes:
            raise ValueError(
                f"rollout.group_size = {rollout.group_size} is more than worker.episodes = "
                f"{self.worker.episodes}: no worker could ever take a ticket; raise worker.episodes"
            )
        if queue.capacity_groups < learner.groups_per_step:
            raise ValueError(
                f"queue.capacity_groups = {queue.capacity_groups} is less than learner.groups_per_step = "
                f"{learner.groups_per_step}: a step could never be filled; raise queue.capacity_groups"
            )
        if self.ticket_max_age_s < self.worker.episode_timeout_s:
            raise ValueError(
                f"queue.ticket_max_age_s = {self.ticket_max_age_s:g} is less than worker.episode_timeout_s = "
                f"{self.worker.episode_timeout_s:g}: the longest episodes would lose their ticket before they end; "
                f"raise queue.ticket_max_age_s or lower worker.episode_timeout_s"
            )
        if queue.depth != "auto" and queue.depth * learner.groups_per_step < 1:
            raise ValueError(f"queue.depth = {queue.depth} allows no group at all; raise it to 1 or write 'auto'")
        if self.weight_sync.every > queue.max_staleness + 1:
            raise ValueError(
                f"weight_sync.every = {self.weight_sync.every} with queue.max_staleness = "
                f"{queue.max_staleness}: the servers' weights would grow too old to train on before they are "
                f"replaced, and the run would stand still; lower weight_sync.every to at most "
                f"{queue.max_staleness + 1}"
            )
        if learner.token_budget < self.vllm.max_model_len:
            raise ValueError(
                f"learner.token_budget = {learner.token_budget} is less than vllm.max_model_len = "
                f"{self.vllm.max_model_len}: the longest episodes would fit no micro-batch; raise "
                f"learner.token_budget"
            )
        group_s = self.worker.episode_timeout_s + self.worker.reward_timeout_s
        if learner.stall_timeout_s <= group_s:
            raise ValueError(
                f"learner.stall_timeout_s = {learner.stall_timeout_s:g} is not more than worker.episode_timeout_s = "
                f"{self.worker.episode_timeout_s:g} and worker.reward_timeout_s = {self.worker.reward_timeout_s:g} "
                f"together: the learner would give up while a group may still come; raise learner.stall_timeout_s "
                f"above {group_s:g}, or lower the other two"
            )
        launched = {} if self.vllm.servers else {"vllm.host": self.vllm.host}
        listeners = {"queue.host": queue.host, "weight_sync.host": self.weight_sync.host, **launched}
        for setting, host in listeners.items():
            if host not in LOOPBACK and not self.token:
                raise ValueError(
                    f"{setting} = {host} listens beyond this machine, which needs a token: set "
                    f"SLIPSTREAM_TOKEN or queue.token, or use 127.0.0.1"
                )
        self._check_ports()
        if queue.max_group_bytes > queue.capacity_bytes:
            raise ValueError(
                f"queue.max_group_bytes = {queue.max_group_bytes} is more than queue.capacity_bytes = "
                f"{queue.capacity_bytes}: the largest groups would never fit; lower queue.max_group_bytes"
            )
        return self

    def _check_ports(self) -> None:
        vllm, queue = self.vllm, self.queue
        if vllm.servers:
            return
        last = vllm.port + vllm.count - 1
        if last > 65535:
            raise ValueError(
                f"vllm.port = {vllm.port} with vllm.count = {vllm.count} needs ports up to {last}, and the highest is "
                f"65535: lower vllm.port"
            )
        if vllm.port <= queue.port <= last:
            raise ValueError(
                f"queue.port = {queue.port} is one of the ports {vllm.port} to {last} of the vLLM servers: whoever "
                f"starts second would find it taken; change queue.port or vllm.port"
            )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
