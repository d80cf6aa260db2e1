"""The run file as a whole: its sections, and checks across sections.

A check names the symptom that a wrong setting would show.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import model_validator

from slipstream.protocol import access
from slipstream.protocol.config import adapter_checks, checks
from slipstream.protocol.config.sections import (
    LOOPBACK,
    AgentSection,
    ChatSection,
    ClusterSection,
    DemonstrationsSection,
    DeploySection,
    EvalSection,
    HubSection,
    ImagesSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    QueueSection,
    RolloutSection,
    RunSection,
    Section,
    TaskSection,
    TeacherSection,
    TrackingSection,
    VllmSection,
    WeightSyncSection,
    WorkerSection,
    sampling,
    servers,
)
from slipstream.protocol.config.sections.base import own_url

# "auto" of worker.open_episodes: episodes for each slot, within this many bytes.
_OPEN_PER_SLOT, _OPEN_BYTES, _BYTES_PER_TOKEN = 8, 4 * 1024**3, 80

# Settings that users may look for under another name: TRL's, transformers' or vLLM's. slipstream/trl/fields.py has all
# of TRL's, but may not be imported here.
OTHER_NAMES = {
    "beta": "learner.kl_coef",
    "bf16": "model.dtype",
    "epsilon": "learner.clip_low",
    "epsilon_high": "learner.clip_high",
    "gpu_memory_utilization": "vllm.args",
    "gradient_accumulation_steps": "learner.groups_per_step",
    "loss_type": "learner.algorithm",
    "lr": "learner.learning_rate",
    "max_completion_length": "rollout.max_turn_tokens",
    "max_new_tokens": "rollout.max_turn_tokens",
    "max_prompt_length": "vllm.max_model_len",
    "max_steps": "learner.steps",
    "max_tokens": "rollout.max_turn_tokens",
    "model.name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_train_epochs": "learner.epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "learner.groups_per_step",
    "save_steps": "learner.checkpoint_every",
    "scale_rewards": "learner.advantage",
    "shuffle": "task.order",
    "shuffle_dataset": "task.order",
    "tensor_parallel_size": "vllm.args",
    "vllm_gpu_memory_utilization": "vllm.args",
}


class RunConfig(Section):
    """The whole run file, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection
    teacher: TeacherSection = TeacherSection()
    chat: ChatSection = ChatSection()
    agent: AgentSection = AgentSection()
    rollout: RolloutSection = RolloutSection()
    images: ImagesSection = ImagesSection()
    queue: QueueSection = QueueSection()
    worker: WorkerSection = WorkerSection()
    learner: LearnerSection = LearnerSection()
    lora: LoraSection = LoraSection()
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()
    hub: HubSection = HubSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    vllm: VllmSection = VllmSection()
    deploy: DeploySection = DeploySection()
    cluster: ClusterSection = ClusterSection()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def run_file(self) -> Path:
        """The resolved run file that `slipstream up` or a script writes for all processes of the run."""
        return self.run_dir / "run.toml"

    @property
    def token(self) -> str | None:
        """The run's secret, or the role's token that this process was given. `token_for` returns what to send."""
        return access.given_token() or self.queue.token

    def token_for(self, role: access.Role) -> str | None:
        """Return the bearer token that a process of that role sends; None if the run has none."""
        return access.token_for(self.token, role)

    @property
    def ticket_max_age_s(self) -> float:
        """`queue.ticket_max_age_s` with "auto" resolved."""
        return checks.ticket_max_age_s(self.queue, self.worker)

    @property
    def max_open(self) -> int:
        """`worker.open_episodes` with "auto" resolved."""
        opened, slots = self.worker.open_episodes, self.worker.episodes
        if opened != "auto":
            return opened
        held = _OPEN_BYTES // (_BYTES_PER_TOKEN * self.vllm.max_model_len)
        return max(slots, self.rollout.group_size, min(_OPEN_PER_SLOT * slots, held))

    @property
    def probe_tolerance(self) -> float:
        """`weight_sync.probe_tolerance` with "auto" resolved."""
        tolerance = self.weight_sync.probe_tolerance
        return servers.probe_tolerance(self.model.dtype, self.vllm.args) if tolerance == "auto" else tolerance

    @property
    def served_dtype(self) -> str:
        """Type that the servers compute in: float32, bfloat16 or float16."""
        return servers.served_dtype(self.model.dtype, self.vllm.args)

    @property
    def served_quantised(self) -> bool:
        """Whether the servers round the weights that they are sent to fewer bits."""
        return servers.served_quantisation(self.vllm.args) is not None

    @property
    def server_names(self) -> dict[str, str]:
        """URL of each server by its name, in the order of the run file."""
        return {f"vllm-{i}": url for i, url in enumerate(self.vllm.urls)}

    @property
    def teacher_url(self) -> str | None:
        """URL of the teacher; None without one. That of `teacher.path` takes the port after the servers'."""
        vllm, teacher = self.vllm, self.teacher
        own = own_url(vllm.host, vllm.port + vllm.launched) if teacher.path else None
        return teacher.url or own

    @property
    def teacher_port(self) -> int:
        """Port on which `up` serves the teacher of `teacher.path`."""
        return urlsplit(self.teacher_url or "").port or 80

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        rollout, queue, learner = self.rollout, self.queue, self.learner
        checks.check_chat(self.chat)
        sampling.check_sampling(rollout)
        if self.teacher.top_k and sampling.keeps_mask(rollout):
            raise ValueError(
                f"teacher.top_k = {self.teacher.top_k} with rollout.top_k = {rollout.top_k}: the teacher's ids may be "
                f"ones that the policy could not sample; leave out one of them"
            )
        if self.teacher.is_on and self.images.enabled:
            raise ValueError(
                "images.enabled = true with teacher.url: a teacher is sent token ids, without the images that they "
                "stand for; leave out one of them"
            )
        checks.check_algorithm(learner)
        checks.check_optimisation(learner)
        if learner.shard_weights and self.model.train_vision:
            raise ValueError(
                "learner.shard_weights = true, model.train_vision = true: a rank whose rows have no image would have "
                "no gradient of the part that sees; leave out one of them"
            )
        checks.check_demonstrations(learner, self.demonstrations)
        adapter_checks.check_adapter(self.model, learner, self.lora, self.weight_sync)
        servers.check_server_args(self.vllm.args)
        if rollout.max_turn_tokens >= self.vllm.max_model_len:
            raise ValueError(
                f"rollout.max_turn_tokens = {rollout.max_turn_tokens} leaves no room for a prompt in "
                f"vllm.max_model_len = {self.vllm.max_model_len}: lower the one or raise the other"
            )
        if self.max_open < max(rollout.group_size, self.worker.episodes):
            raise ValueError(
                f"worker.open_episodes = {self.max_open} is less than rollout.group_size = {rollout.group_size} or "
                f"worker.episodes = {self.worker.episodes}: a group could not be opened, or some slots never be used; "
                f"raise worker.open_episodes, or leave it out"
            )
        if queue.capacity_groups < learner.groups_per_step:
            raise ValueError(
                f"queue.capacity_groups = {queue.capacity_groups} is less than learner.groups_per_step = "
                f"{learner.groups_per_step}: a step could never be filled; raise queue.capacity_groups"
            )
        if self.worker.count > queue.max_workers:
            raise ValueError(
                f"worker.count = {self.worker.count} is more than queue.max_workers = {queue.max_workers}: the others "
                f"would be refused; raise queue.max_workers, or lower worker.count"
            )
        checks.check_patience(queue, self.worker, learner)
        if queue.depth != "auto" and queue.depth * learner.groups_per_step < 1:
            raise ValueError(f"queue.depth = {queue.depth} allows no group at all; set it to 1 or more, or to 'auto'")
        if self.weight_sync.every > queue.max_staleness + 1:
            raise ValueError(
                f"weight_sync.every = {self.weight_sync.every} with queue.max_staleness = "
                f"{queue.max_staleness}: the servers' weights would grow too old to train on before they are "
                f"replaced, and the run would stand still; lower weight_sync.every to at most "
                f"{queue.max_staleness + 1}"
            )
        if self.weight_sync.delta and self.weight_sync.transport not in ("auto", "gloo", "http"):
            raise ValueError(
                f"weight_sync.delta = true with weight_sync.transport = {self.weight_sync.transport}: only gloo and "
                f'http send deltas, and everything would be sent; set weight_sync.transport = "http", or leave delta '
                f"out"
            )
        if learner.proximal == "interpolated" and queue.max_staleness <= 1:
            raise ValueError(
                f"learner.proximal = interpolated with queue.max_staleness = {queue.max_staleness}: it takes the "
                f"sampler itself for tokens of at most one version of age, so learner.correction = "
                f"{learner.correction} would never do anything; set learner.proximal to recomputed, or raise "
                f"queue.max_staleness"
            )
        if learner.epochs is not None and "steps" in learner.model_fields_set:
            raise ValueError(
                f"learner.steps = {learner.steps} and learner.epochs = {learner.epochs:g} both say when the run ends: "
                f"leave one of them out"
            )
        if learner.reference_sync_steps and learner.reference_mixup < 0.5 and self.model.dtype != "float32":
            raise ValueError(
                f"learner.reference_mixup = {learner.reference_mixup:g} with model.dtype = {self.model.dtype}: the "
                f"reference would hardly follow, as changes this small are rounded away; set learner.reference_mixup "
                f'to at least 0.5, with more learner.reference_sync_steps between, or model.dtype = "float32"'
            )
        if learner.weights_dtype == "model" and self.model.dtype == "float16":
            raise ValueError(
                "learner.weights_dtype = model with model.dtype = float16: gradients would underflow to 0, as there is "
                "no loss scaler; leave learner.weights_dtype at float32, or take model.dtype = bfloat16"
            )
        if learner.keep_best:
            judged, kept = self.eval.every, learner.checkpoint_every
            if not judged or not kept or (judged % kept and kept % judged):
                raise ValueError(
                    f"learner.keep_best = true with learner.checkpoint_every = {kept} and eval.every = {judged}: a "
                    f"checkpoint is judged by the evaluation of its own step, and too few or none would have one; set "
                    f"both, and one to a multiple of the other"
                )
        if learner.token_budget < self.vllm.max_model_len:
            context, positions = self.vllm.max_model_len, _positions(self.model.path)
            if positions is not None and context > positions:
                raise ValueError(
                    f"vllm.max_model_len = {context} is more than the model's {positions}: lower it to at most "
                    f"{positions}"
                )
            raise ValueError(
                f"learner.token_budget = {learner.token_budget} is less than vllm.max_model_len = {context}: the "
                f"longest episodes would fit no micro-batch; raise learner.token_budget, or lower vllm.max_model_len"
            )
        launched = {"vllm.host": self.vllm.host} if self.vllm.launched or self.teacher.path else {}
        listeners = {
            "queue.host": queue.host,
            "weight_sync.host": self.weight_sync.host,
            "worker.agent_host": self.worker.agent_host,
            **launched,
        }
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

    @property
    def http_ports(self) -> range:
        """Ports on which the learner's ranks serve weights, one each; none where any free port will do."""
        port = self.weight_sync.http_port
        return range(port, port + self.learner.ranks) if port else range(0)

    def _check_ports(self) -> None:
        vllm, queue, worker = self.vllm, self.queue, self.worker
        if worker.agent_port and worker.count > 1:
            raise ValueError(
                f"worker.agent_port = {worker.agent_port} with worker.count = {worker.count}: only one worker could "
                f"listen there; leave it at 0, for any that is free, or start the workers one by one with a port each"
            )
        own_teacher = self.teacher.path and not self.teacher.url
        ports = {
            "weight_sync.http_port": self.http_ports,
            "queue.port": range(queue.port, queue.port + 1),
            "worker.agent_port": range(worker.agent_port, worker.agent_port + bool(worker.agent_port)),
            "vllm.port": range(vllm.port, vllm.port + vllm.launched + bool(own_teacher)),
        }
        for setting, found in ports.items():
            if found.stop > 65536:
                raise ValueError(
                    f"{setting} = {found.start} needs ports up to {found.stop - 1}, one for each process, and the "
                    f"highest is 65535: lower it"
                )
        for (setting, ours), (other, theirs) in combinations(ports.items(), 2):
            if max(ours.start, theirs.start) < min(ours.stop, theirs.stop):
                raise ValueError(
                    f"{setting} = {ours.start} and {other} = {theirs.start} would both take port "
                    f"{max(ours.start, theirs.start)}, as each process needs one: the process that starts second would "
                    f"find it in use; change {setting} or {other}"
                )


def _positions(model_path: str) -> int | None:
    """Return the positions of a model in a folder by its config.json; None if that does not say."""
    try:
        found = json.loads(Path(model_path, "config.json").read_bytes())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
