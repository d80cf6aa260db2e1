"""Settings of the run, its model, task and chat format, and of the trackers and hub that results go to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.protocol.addresses import McpServerAddress, checked_url, mcp_server
from slipstream.protocol.config.sections.base import CountOrZero, InFile, Seconds, Section, setting
from slipstream.protocol.mix import MIX_CYCLE


class RunSection(Section):
    name: str = setting(
        "run",
        description="names the run and its directory: letters, digits, '_', '-' and, except at the start, '.'",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        why="fine for a single run",
    )
    dir: Path = setting(
        Path("runs"),
        strict=False,
        description="parent of the run directory, from the working directory",
        why="results are where you started",
    )
    seed: int = setting(
        0,
        ge=0,
        lt=2**31,
        description="seed of data order, sampling and initial state",
        why="makes runs repeatable",
    )

    @field_validator("dir")
    @classmethod
    def _home_is_expanded(cls, value: Path) -> Path:
        return value.expanduser()


class ModelSection(Section):
    path: str = Field(description="a local model folder, such as ./model, or a Hugging Face hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32",
        description="type of the servers' weights and of the learner's computation (float32 for float16); see "
        "learner.weights_dtype",
        why="works everywhere; on a GPU an unset dtype is the checkpoint's",
    )
    tokenizer: str | None = setting(
        None,
        description="folder or hub name of the tokenizer, if not the model's",
        why="a model has its own",
    )
    revision: str | None = setting(
        None,
        description="branch, tag or commit of the model on the hub",
        why="the newest; pin a commit to repeat a run",
    )
    trust_remote_code: bool = setting(
        False,
        description="run the code that comes with the model",
        why="that code has your rights",
    )
    attention: str = setting(
        "varlen_sdpa",
        description="attention of the learner: varlen_sdpa, torch's best exact way for the device, computes "
        "shared prefixes once (on a GPU only in 16 bits, where FlashAttention fits the heads); or a "
        "transformers implementation that reads cu_seq_lens, such as flash_attention_2, which does "
        "not share",
        why="needs no package",
    )
    load_in_4bit: bool = setting(
        False,
        description="the learner's base in 4 bits (QLoRA, arXiv:2305.14314), with lora.r; needs a GPU and "
        "bitsandbytes. Servers get the dequantised base and the adapter",
        why="for a base that does not fit otherwise",
    )
    load_in_8bit: bool = setting(False, description="the same in 8 bits", why="as above")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = setting(
        "nf4", description="type of the 4-bit values", why="nf4 suits normally distributed weights"
    )
    bnb_4bit_use_double_quant: bool = setting(
        False, description="also quantise the scales", why="saves 0.4 bits a weight, for a little accuracy"
    )

    train_vision: bool = setting(
        False,
        description="train the vision encoder, too",
        why="a frozen one needs neither gradients nor publishing",
    )

    @property
    def quantised_bits(self) -> int:
        """Bits of a weight of the learner's base; 0: not quantised."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0

    @property
    def tokenizer_path(self) -> str:
        """The folder or hub name that the tokenizer is loaded from."""
        return self.tokenizer or self.path

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision to load the tokenizer from: `revision` if it is the model's own, else None for the newest."""
        return self.revision if self.tokenizer is None else None


class TaskSection(Section):
    path: InFile = Field(description="the task object, as path/to/file.py:name")
    order: Literal["shuffled", "as_given", "learnable"] = setting(
        "shuffled",
        description="order of the rows: shuffled, anew in every epoch; as_given, the data set's, for a curriculum; "
        "learnable, those that teach more often (docs/your_task.md)",
        why="neighbouring rows are often alike",
    )
    mix: dict[str, float] = setting(
        {},
        description="share of the tickets of each part of the data set, by name; they sum to 1, 0 leaves a part out",
        why="all rows are one part",
    )
    mix_column: str = setting(
        "part",
        min_length=1,
        description="with mix: the column that names a row's part",
        why="a short name",
    )
    mcp_servers: list[str | McpServerAddress] = setting(
        [],
        description="MCP servers whose tools the task gets: a URL (streamable HTTP) or a command line (stdio), or a "
        "table with address, prefix, include, exclude, transport",
        why="the task has its own tools",
    )
    reward_servers: dict[str, str] = setting(
        {},
        description="URL of the vLLM pooling server for each classifier that the task names as a reward",
        why="the task has its own rewards",
    )

    @field_validator("mix")
    @classmethod
    def _mix(cls, value: dict[str, float]) -> dict[str, float]:
        for part, share in value.items():
            if not 0 <= share <= 1 or 0 < share < 1 / MIX_CYCLE:
                raise ValueError(
                    f"the share of {part} is {share:g}: must be 0, to leave the part out, or {1 / MIX_CYCLE:g} to 1"
                )
        if value and abs(math.fsum(value.values()) - 1) > 1e-6:
            raise ValueError(f"the shares sum to {math.fsum(value.values()):g}: they must sum to 1")
        return value

    @field_validator("mcp_servers")
    @classmethod
    def _mcp_servers(cls, value: list[str | McpServerAddress]) -> list[str | McpServerAddress]:
        for given in value:
            mcp_server(given)
        return value

    @field_validator("reward_servers")
    @classmethod
    def _reward_servers(cls, value: dict[str, str]) -> dict[str, str]:
        if "" in value:
            raise ValueError("a classifier without a name; write it as the task does, such as org/reward-model")
        return {classifier: checked_url(url) for classifier, url in value.items()}

    @property
    def file(self) -> Path:
        return Path(self.path.rsplit(":", 1)[0])

    @property
    def object_name(self) -> str:
        return self.path.rsplit(":", 1)[1]


class TeacherSection(Section):
    url: str | None = setting(
        None,
        description="vLLM server of a model with the same vocabulary, whose log-probs of the sampled tokens teach the "
        "policy; with it, a task may have no rewards",
        why="rewards alone teach",
    )
    path: str | None = setting(
        None,
        min_length=1,
        description="model that `slipstream up` serves as the teacher: a folder, or a name on the hub; teacher.url, if "
        "given, says where it listens",
        why="the teacher runs elsewhere",
    )
    args: list[str] = setting([], description="flags of vLLM for the server of teacher.path", why="vLLM's own")
    coef: float = setting(
        1.0,
        gt=0,
        le=1e6,
        description="weight of the teacher's advantage, log teacher - log policy, next to that of the rewards",
        why="a nat counts as much as a reward's standard deviation",
    )
    top_k: int = setting(
        0,
        ge=0,
        le=128,
        description="likeliest ids of the teacher that each token learns from, by forward KL; 0: the sampled id alone, "
        "by reverse KL",
        why="the cheapest; a server needs --max-logprobs above 20",
    )
    prompt: str | None = setting(
        None,
        min_length=1,
        description="system message that only the teacher sees; {name} stands for a column of the row",
        why="the teacher sees what the policy sees",
    )
    timeout_s: Seconds = setting(120.0, description="seconds for one request to the teacher", why="it may be busy")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        given = [name for name, value in self if value != fields[name].default]
        if given and not self.is_on:
            raise ValueError(f"teacher.{given[0]} without a teacher: set teacher.url or teacher.path, or leave it out")
        if self.args and self.path is None:
            raise ValueError("teacher.args are for the server of teacher.path: set it, or leave them out")
        return self

    @property
    def is_on(self) -> bool:
        return self.url is not None or self.path is not None


class ChatSection(Section):
    format: Literal["auto", "renderer", "template"] = setting(
        "auto",
        description="converts between messages and ids: renderer is the renderers library's for the model, "
        "template the tokenizer's own; auto prefers a renderer that knows the model's name",
        why="a renderer knows more of the model",
    )
    renderer: str | None = setting(
        None,
        min_length=1,
        description="name of the renderer, such as qwen3, for a fine-tune or a local folder",
        why="from the model's name",
    )
    renderer_options: dict[str, Any] = setting(
        {},
        description="fields of the renderer's configuration, such as enable_thinking",
        why="the renderer's",
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
        why="the template's",
    )
    parser: str = setting(
        "auto",
        min_length=1,
        description="notation of tool calls under a template: auto tries the tokenizer's response schema, then "
        "each notation, on a rendered call; or a name (docs/models.md); or path/to/file.py:function",
        why="the start check finds it, or refuses",
    )
    tools: Literal["template", "prompt"] = setting(
        "template",
        description="what shows tools to the policy: template: the chat template or renderer; prompt: the system "
        "message, with calls as <tool_call>{...}</tool_call> and results as user messages",
        why="models know their template's notation; prompt is for templates without tools",
    )
    system_prompt: str | None = setting(
        None,
        description="a system message for conversations that have none",
        why="prompts stay as they are",
    )

    @property
    def files(self) -> Mapping[str, Path]:
        """Files that the chat format consists of, by the setting that names each."""
        import_path = self.renderer_options.get("import_path")
        code = {"chat.parser": self.parser, "chat.renderer_options.import_path": import_path}
        files = {} if self.template is None else {"chat.template": self.template}
        return files | {name: file for name, value in code.items() if (file := file_of(value)) is not None}


def file_of(value: object) -> Path | None:
    """Return the file of path/to/file.py:name; None if it names no file."""
    path, _, _ = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return Path(path) if path.endswith(".py") else None


# Trackers of accelerate, by transformers' names for them.
TRACKERS = ("tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "aim", "clearml", "dvclive", "swanlab")

ALL = "all"


class TrackingSection(Section):
    report_to: list[str] = setting(
        [],
        description=f"trackers of each step's metrics: {', '.join(TRACKERS)}; all: those installed",
        why="metrics.jsonl needs no package",
    )
    project: str = setting(
        "slipstream",
        min_length=1,
        description="the trackers' project; mlflow's experiment",
        why="groups related runs",
    )
    run_name: str | None = setting(None, min_length=1, description="the run's name at the trackers", why="run.name")
    rollouts_every: CountOrZero = setting(
        0,
        description="steps between tables of rollouts, learner.sample_rollouts each (wandb, clearml, trackio; "
        "tensorboard as text); 0: none",
        why="texts stay on this machine unless you send them",
    )
    options: dict[str, dict[str, Any]] = setting(
        {},
        description='arguments for starting a tracker, as in [tracking.options.wandb] entity = "team"; '
        "accelerate's init_kwargs",
        why="the trackers'",
    )

    traces: str | None = setting(
        None,
        description="URL of an OTLP/HTTP collector for OpenTelemetry traces, such as http://collector:4318",
        why="no traces",
    )

    @field_validator("traces")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """Accept a single name and "none", as transformers does."""
        if isinstance(value, str):
            value = [value]
        return [] if value == ["none"] else value

    @field_validator("report_to")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in (*TRACKERS, ALL):
                raise ValueError(f"there is no tracker {name!r}: choose among {', '.join(TRACKERS)}, all, none")
        return list(dict.fromkeys(value))

    @field_validator("options")
    @classmethod
    def _of_trackers(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in value:
            if name not in TRACKERS:
                raise ValueError(f"there is no tracker {name!r}: its options stand under one of {', '.join(TRACKERS)}")
        return value


class HubSection(Section):
    push_to_hub: bool = setting(
        False,
        description="upload checkpoints' models to the Hugging Face hub, with a model card; token from HF_TOKEN "
        "or `hf auth login`",
        why="nothing is sent unasked",
    )
    hub_model_id: str | None = setting(
        None,
        pattern=r"^[\w.-]+(/[\w.-]+)?$",
        description="name of the model on the hub: owner/name, or a name in your account",
        why="run.name",
    )
    hub_private_repo: bool | None = setting(
        None,
        description="create the model as private",
        why="your account's default",
    )
    hub_strategy: Literal["end", "every_save"] = setting(
        "every_save",
        description="end: only the last checkpoint; every_save: each one, except during another upload",
        why="transformers'; survives a lost machine",
    )
    hub_timeout_s: Seconds = setting(
        3600.0,
        description="time that the learner waits for the last upload",
        why="7 B takes minutes",
    )
