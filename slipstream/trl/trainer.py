"""TRL's trainers: they take TRL's arguments, and `train()` runs everything on this machine as `slipstream.train` does.

The script is the task file. Every worker imports it and builds the trainer to get its task. In a worker the import ends
at that trainer's `train()`, and `train()` of an earlier trainer does nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from protocol import checkpoints
from protocol.config import ConfigError
from protocol.config.load import end_import_at
from rollout_worker.task.task import Task
from slipstream.script import loading_a_task, of_a_trainer, path_of, run, without_frames
from slipstream.trl.configs import AsyncGRPOConfig, GRPOConfig, RLOOConfig, _Config
from slipstream.trl.learner_settings import lora_settings, quantisation_settings
from slipstream.trl.translate import Translation, check_fields, translate


class TrainOutput(NamedTuple):
    """Result of `train()`, under transformers' names. All are 0 while a worker imports the script.

    Attributes:
        global_step: Optimiser steps of the run.
        training_loss: Mean loss over the steps.
        metrics: The run's `summary.json`, with `train_loss`, and `train_runtime` in seconds.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class _Trainer:
    """A trainer of TRL. Raises `ConfigError`, with the remedy, for arguments that are not supported."""

    config: ClassVar[type[_Config]]
    suffix: ClassVar[str]
    # Arguments that must be left out, each with the remedy.
    refused: ClassVar[dict[str, str]] = {
        "rollout_func": "write what it does as tools of the task",
        "rollout_worker": "workers are processes of the run; leave it out",
        "weight_transfer": "weights are sent by weight_sync.transport; leave it out",
    }

    @without_frames
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: _Config | None = None,
        train_dataset: Any = None,
        *,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
    ) -> None:
        given = dict(locals())
        kind = type(self).__name__
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"{kind}(model={type(model).__name__}): the model is loaded by the learner and by vLLM, so give its "
                f"folder or hub name as text; save an object with save_pretrained first"
            )
        for name, remedy in self.refused.items():
            if given[name]:
                raise ConfigError(f"{kind}({name}=...) is not supported: {remedy}")
        if any(part is not None for part in optimizers or ()):
            raise ConfigError(
                f"{kind}(optimizers=...) is not supported: optimiser and schedule are named by optim and "
                f"lr_scheduler_type of {kind}'s args"
            )
        if args is None:
            args = self.config(f"{str(model).rstrip('/').split('/')[-1]}-{self.suffix}")
        if not isinstance(args, self.config):
            wrong = f"{type(args).__module__}.{type(args).__qualname__}"
            raise ConfigError(f"{kind}(args=...) is a {wrong}; import {self.config.__name__} from slipstream.trl, too")
        self.model = str(model)
        self.args = args
        self.callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add_callback(callback)
        self._tokenizer = _name_of(processing_class, self.model, kind)
        self._lora = lora_settings(peft_config, kind) if peft_config is not None else {}
        self._quantised = quantisation_settings(quantization_config, kind) if quantization_config is not None else {}
        self.translated(None)
        self.task = Task(
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs,
            tools=tools or (),
            environment_factory=environment_factory,
            reward_weights=args.field("reward_weights"),
        )

    @without_frames
    def add_callback(self, callback: Any) -> None:
        """Add an object or a class of transformers' `TrainerCallback`.

        It is called in the learner's process, which imports the script up to `train()`.
        """
        if not callable(getattr(callback, "on_train_begin", None)):
            raise ConfigError(
                f"{type(self).__name__}(callbacks=...): a {type(callback).__name__} is no callback; give objects or "
                f"classes of transformers.TrainerCallback"
            )
        self.callbacks.append(callback)

    @without_frames
    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Run everything until the learner is done.

        Args:
            resume_from_checkpoint: True goes on from the newest checkpoint.

        Raises:
            ConfigError: As for `slipstream.train`, which lists further exceptions.
        """
        end_import_at(self)
        if loading_a_task() is not None:
            return TrainOutput(0, 0.0, {"train_loss": 0.0, "train_runtime": 0.0})
        if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"WORLD_SIZE = {processes}: the script starts all processes of the run itself; start it with python, "
                f"not with accelerate launch or torchrun"
            )
        if isinstance(resume_from_checkpoint, str):
            raise ConfigError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): a run goes on from its newest checkpoint; "
                f"write True, or give that checkpoint's model/ folder as the model of a new run"
            )
        made = self.translated(_context_of(self.model))
        if self.callbacks:
            made.sections["learner"]["callbacks"] = [*made.sections["learner"].get("callbacks", ()), path_of(self)]
        if self.args.given.get("hub_token") is not None:
            os.environ["HF_TOKEN"] = str(self.args.given["hub_token"])
        for note in made.notes:
            print(f"slipstream: note: {note}", file=sys.stderr, flush=True)
        words = of_a_trainer(self.run_dir)
        summary = run(self, None, bool(resume_from_checkpoint), made.sections, words)
        loss = _mean_loss(self.run_dir / "metrics.jsonl")
        metrics = {**summary, "train_loss": loss, "train_runtime": summary.get("wall_s")}
        return TrainOutput(int(summary.get("steps") or 0), loss, metrics)

    @property
    def run_dir(self) -> Path:
        """The run directory, relative to the working directory."""
        run = self.translated(None).sections["run"]
        return Path(run["dir"], run["name"])

    @without_frames
    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the newest checkpoint's model to `output_dir`, by default the run directory.

        With `load_best_model_at_end` it is the best checkpoint's. An adapter is merged into the model, and copied to
        `adapter/` as well.
        """
        if loading_a_task() is not None:
            return
        newest, target = self._model("save_model"), Path(output_dir or self.run_dir)
        shutil.copytree(newest, target, dirs_exist_ok=True)
        if (adapter := newest.parent / checkpoints.ADAPTER).is_dir():
            shutil.copytree(adapter, target / checkpoints.ADAPTER, dirs_exist_ok=True)

    @without_frames
    def push_to_hub(self, commit_message: str = "End of training", **_: Any) -> Any:
        """Upload the model that `save_model` copies, with its card. Returns the hub's answer about the commit."""
        if loading_a_task() is not None:
            return None
        from huggingface_hub import HfApi

        hub, api = self.translated(None).sections.get("hub", {}), HfApi(token=self.args.given.get("hub_token"))
        folder = self._model("push_to_hub")
        name = hub.get("hub_model_id", self.run_dir.name)
        repo = api.create_repo(name, private=hub.get("hub_private_repo"), exist_ok=True).repo_id
        return api.upload_folder(repo_id=repo, folder_path=folder, commit_message=commit_message)

    def _model(self, method: str) -> Path:
        found = checkpoints.complete(self.run_dir)
        if not found:
            raise ConfigError(f"{method}(): {self.run_dir} holds no checkpoint; call it after train()")
        best = checkpoints.best(self.run_dir) if self.args.field("load_best_model_at_end") else None
        return Path(found[best.step if best else max(found)] / checkpoints.MODEL)

    def translated(self, context: int | None) -> Translation:
        """Return the run's settings. `context` is the model's length in tokens; None if it is not known."""
        made = translate(self.args, self.model, context)
        if self._tokenizer is not None:
            made.sections["model"].setdefault("tokenizer", self._tokenizer)
        made.sections["model"] = {**self._quantised, **made.sections["model"]}
        if self._lora:
            made.sections["lora"] = {**self._lora, **made.sections.get("lora", {})}
        check_fields(self.args, made.sections)
        return made


class GRPOTrainer(_Trainer):
    """TRL's `GRPOTrainer`; generation and training run at once."""

    config, suffix = GRPOConfig, "GRPO"


class RLOOTrainer(_Trainer):
    """TRL's `RLOOTrainer`: compares each reward with the mean of the others in its group."""

    config, suffix = RLOOConfig, "RLOO"


class AsyncGRPOTrainer(_Trainer):
    """TRL's `AsyncGRPOTrainer`."""

    config, suffix = AsyncGRPOConfig, "AsyncGRPO"


def _name_of(processing_class: Any, model: str, kind: str) -> str | None:
    """Return the tokenizer's folder or name, None if it is the model's. Raises `ConfigError` if it has none."""
    if processing_class is None:
        return None
    name = processing_class if isinstance(processing_class, str) else getattr(processing_class, "name_or_path", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{kind}(processing_class={type(processing_class).__name__}): servers, workers and learner load the "
            f"tokenizer by its name, and it has none; save it with save_pretrained and give that folder as text"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return None if path.absolute() == Path(model).expanduser().absolute() else str(path.absolute())
    return None if name == model else name


def _context_of(model: str) -> int | None:
    """Return a model's context in tokens; None if it cannot be read, which the check before the start reports."""
    from deploy.checks.model_check import context_of

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its client warns at every try to reach the hub
    path = Path(model).expanduser()
    try:
        return context_of(str(path.absolute()) if path.is_dir() else model)
    except ConfigError:
        return None


def _mean_loss(journal: Path) -> float:
    """Return the mean of the steps' losses, NaN without a step."""
    if not journal.exists():
        return math.nan
    losses = [json.loads(line).get("loss") for line in journal.read_text(encoding="utf-8").splitlines()]
    found = [loss for loss in losses if isinstance(loss, int | float)]
    return math.fsum(found) / len(found) if found else math.nan
