"""TRL's trainers: they take TRL's arguments, and `train()` runs everything on this machine as `slipstream.train` does.

The script is the task file. Every worker imports it and builds the trainer to get its task. In a worker the import ends
at that trainer's `train()`, and `train()` of an earlier trainer does nothing.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.text import nearest
from slipstream.protocol.config.user_files import end_import_at
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.user_code.errors import needs_main_thread
from slipstream.script import in_arguments, loading_a_task, of_a_trainer, place_of, run, without_frames
from slipstream.trl import notebook
from slipstream.trl.configs import AsyncGRPOConfig, GRPOConfig, RLOOConfig, _Config
from slipstream.trl.evaluation import only_evaluated, read_rollouts, rollouts_task
from slipstream.trl.face import Face, text_of
from slipstream.trl.learner_settings import lora_settings, quantisation_settings
from slipstream.trl.models import (
    SAVED,
    TOKENIZER,
    adapter_of,
    check_object,
    is_changed,
    save_object,
    save_processing_class,
)
from slipstream.trl.reward_models import ModelReward, rewards_of
from slipstream.trl.rollout_func import RolloutFunc, with_results
from slipstream.trl.state import evaluation_metrics, mean_loss
from slipstream.trl.translate import PROCESSES, Translation, check_fields, in_fields, plain, translate

# What launchers tell their processes.
_OF_LAUNCHERS = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
    ),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)

# Processes of tools that set alarms. Each holds what the script imports.
_PROCESSES_OF_TOOLS = 4

# Arguments of TRL's trainers of other releases or methods, and of transformers' own.
_OF_OTHERS = {
    "tokenizer": "write processing_class",
    "config": "write args",
    "policy": "write model",
    "dataset": "write train_dataset",
    "reward_model": "write reward_funcs",
    "reward_func": "write reward_funcs",
    "reward_function": "write reward_funcs",
    "reward_weights": "write it into args",
    "ref_model": "the reference is the model as the run begins, loaded where args has a beta; leave it out",
    "ref_policy": "the reference is the model as the run begins, loaded where args has a beta; leave it out",
    "value_model": "no method here has one; leave it out",
    "model_init": "give a model",
    "data_collator": "rewards get the rows as they are; leave it out",
    "compute_metrics": "an evaluation's metrics are its rewards, which may call log_metric; leave it out",
    "preprocess_logits_for_metrics": "evaluations see no logits; leave it out",
    "compute_loss_func": "the loss is chosen by loss_type; leave it out",
    "optimizer_cls_and_kwargs": "write optim and optim_args into args",
}

# In TRL this module is a package, from which scripts import trainers by their modules (`slipstream.trl`).
__path__: list[str] = []

# Starts of runs in this process. A worker that runs the script counts the same ones.
_starts = 0


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


class _Trainer(Face):
    """A trainer of TRL. Raises `ConfigError`, with the remedy, for arguments that are not supported."""

    config: ClassVar[type[_Config]]
    suffix: ClassVar[str]
    # Arguments that must be left out, each with the remedy.
    refused: ClassVar[dict[str, str]] = {
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
        **unknown: Any,
    ) -> None:
        given = dict(locals())
        kind = type(self).__name__
        for name in unknown:
            remedy = _OF_OTHERS.get(name) or _unknown(name, self.config, [*given])
            raise ConfigError(f"{kind}({name}=...) is not an argument of TRL's {kind}: {remedy}")
        check_object(model, kind)
        peft_config = adapter_of(model, peft_config, kind)
        for name, remedy in self.refused.items():
            if given[name]:
                raise ConfigError(f"{kind}({name}=...) is not supported: {remedy}")
        if any(part is not None for part in optimizers or ()):
            raise ConfigError(
                f"{kind}(optimizers=...) is not supported: optimiser and schedule are named by optim and "
                f"lr_scheduler_type of {kind}'s args"
            )
        if args is None:
            args = self.config(f"{text_of(model).rstrip('/').split('/')[-1]}-{self.suffix}")
        if not isinstance(args, self.config):
            wrong = f"{type(args).__module__}.{type(args).__qualname__}"
            raise ConfigError(f"{kind}(args=...) is a {wrong}; import {self.config.__name__} from slipstream.trl, too")
        self.args = args
        self._object = None if isinstance(model, str | Path) else model
        self._base = text_of(model)
        self._loaded: tuple[Path | None, Any] | None = None
        self._logged: list[dict[str, Any]] = []
        self._trained = False
        self.callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add_callback(callback)
        self._processing_class = processing_class
        self._tokenizer = None if self._object is not None else _name_of(processing_class, self._base, kind)
        self._peft_config = peft_config
        self._lora = lora_settings(peft_config, kind) if peft_config is not None else {}
        self._quantised = quantisation_settings(quantization_config, kind) if quantization_config is not None else {}
        if train_dataset is None and environment_factory is None:
            raise ConfigError(f"{kind}: a `train_dataset` is required where no environment makes the prompts; give one")
        if train_dataset is None and (args.field("max_steps") or 0) <= 0:
            raise ConfigError(
                f"{kind}: without a `train_dataset`, how long to train is said by max_steps; give it to "
                f"{self.config.__name__}, such as max_steps=100"
            )
        self._rows = _rows_of(train_dataset)
        if rollout_func is not None and (tools or environment_factory):
            other = "tools" if tools else "environment_factory"
            raise ConfigError(
                f"{kind}(rollout_func=..., {other}=...): a rollout_func runs its own loop, and calls what it needs; "
                f"leave out {other}, or the rollout_func"
            )
        agent = None if rollout_func is None else RolloutFunc(rollout_func, self)
        rewards = rewards_of(
            reward_funcs,
            reward_processing_classes,
            list(args.slipstream.get("task", {}).get("reward_servers", ())),
            args.field("chat_template_kwargs"),
            bool(args.field("trust_remote_code")),
            kind,
        )
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self._parts: dict[str, Any] = {
            "train_dataset": train_dataset,
            "reward_funcs": rewards if agent is None else [with_results(reward) for reward in rewards or ()],
            "tools": tools or (),
            "environment_factory": environment_factory,
            "agent": agent,
        }
        self.task = self._task()

    def _task(self) -> Task:
        """Return what workers play. It has evaluation rows only where evaluations run during the training."""
        for name in ("eval_strategy", "eval_on_start"):
            value = plain(self.args.field(name))
            if value not in (None, False, "no") and self.eval_dataset is None:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={value!r} without an eval_dataset; give one, or leave {name} out"
                )
        try:
            task = Task(
                **self._parts,
                eval_dataset=_together(self.eval_dataset) if self._evaluates() else None,
                reward_weights=self.args.field("reward_weights"),
            )
        except ConfigError as error:
            raise ConfigError(in_arguments(str(error), type(self).__name__)) from None
        if not task.rewards and task.own_rewards == ():
            raise ConfigError(f"{type(self).__name__}(reward_funcs=()): give a list of at least one reward function")
        return task

    def _evaluates(self) -> bool:
        return bool(self.translated(None).sections.get("eval"))

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
    def train(self, resume_from_checkpoint: bool | str | None = None, **_: Any) -> TrainOutput:
        """Run everything until the learner is done.

        Args:
            resume_from_checkpoint: True continues from the newest checkpoint, and so does the folder of that one.

        Raises:
            ConfigError: As for `slipstream.train`, which lists further exceptions.
        """
        if self._evaluates() != (self.task.eval_dataset is not None):  # the script has changed args since
            self.task = self._task()
        name = self._start()
        self._trained = True
        if loading_a_task() is not None:
            return TrainOutput(0, 0.0, {"train_loss": 0.0, "train_runtime": 0.0})
        resume = self._resumes(resume_from_checkpoint)
        self._save_object()
        made = self.translated(_context_of(self._base))
        for reward in self.task.rewards:
            if isinstance(reward, ModelReward):
                reward.check(type(self).__name__)
        self._leave_out_unread(made)
        if isinstance(self.eval_dataset, Mapping) and made.sections.get("eval"):
            made.notes.append(
                "evaluations during the training are over all eval_datasets together; evaluate() parts them"
            )
        if self.callbacks:
            made.sections["learner"]["callbacks"] = [*made.sections["learner"].get("callbacks", ()), name()]
        self._run(made, name, resume)
        summary = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        loss = mean_loss(self.run_dir)
        metrics = {**summary, "train_loss": loss, "train_runtime": summary.get("wall_s")}
        return TrainOutput(int(summary.get("steps") or 0), loss, metrics)

    def _start(self, by_start: bool = False) -> Callable[[], str]:
        """Count a start of a run. In a worker that has come to its own, end the import.

        Returns a function that gives the trainer's name for the processes of the run; `by_start` as in `place_of`.
        """
        global _starts
        _starts += 1
        count = _starts
        end_import_at(self)
        return lambda: place_of(self, count, by_start)

    def _run(self, made: Translation, name: Callable[[], str], resume: bool, run_dir: Path | None = None) -> None:
        _leave_launcher()
        if self.args.given.get("hub_token") is not None:
            os.environ["HF_TOKEN"] = str(self.args.given["hub_token"])
        self._let_alarms_ring(made)
        for note in made.notes:
            print(f"slipstream: note: {note}", file=sys.stderr, flush=True)
        if notebook.is_one():
            notebook.run(run_dir or self.run_dir, _starts, self._steps_per_epoch())
            return
        only = os.environ.get(notebook.ONLY, str(_starts))
        if only != str(_starts):  # a training of a cell before, which has been made
            return
        words = of_a_trainer(run_dir or self.run_dir, type(self).__name__)
        try:
            run(self, None, resume, made.sections, words, name())
        except ConfigError as error:
            raise ConfigError(in_fields(self.args, str(error))) from None
        if notebook.ONLY in os.environ:
            raise SystemExit(0)

    def _let_alarms_ring(self, made: Translation) -> None:
        """Run tools that set alarms in their own processes, as in TRL they run in the main thread."""
        tools, given = self.task.tools, self.args.slipstream.get("worker", {})
        names = [tool.__name__ for tool in tools if inspect.isfunction(tool) and needs_main_thread(tool)]
        alone = self.task.environment is None and self.task.agent is None and all(map(inspect.isfunction, tools))
        if names and alone and "tool_isolation" not in given:
            made.sections.setdefault("worker", {}).update(
                {"tool_isolation": "process", "user_threads": _PROCESSES_OF_TOOLS, **given}
            )
            made.notes.append(
                f"{', '.join(names)}: sets an alarm, which needs a main thread: tools run in processes, up to "
                f"{_PROCESSES_OF_TOOLS} of a worker, each of which runs the script up to its train() (worker."
                f"tool_isolation, worker.user_threads)"
            )

    def _leave_out_unread(self, made: Translation) -> None:
        """Leave out variables that the chat template does not read, as TRL does, and say so."""
        given = made.sections.get("chat", {}).get("chat_template_kwargs")
        if not given or made.sections["chat"].get("template"):
            return
        from slipstream.rollout_worker.chat.template import read_by

        source = self.processing_class.get_chat_template()
        if unread := sorted(set(given) - read_by(source)):
            made.sections["chat"]["chat_template_kwargs"] = {
                name: value for name, value in given.items() if name not in unread
            }
            made.notes.append(f"chat_template_kwargs: the template reads no {', '.join(unread)}, which is left out")

    def _resumes(self, given: bool | str | Path | None) -> bool:
        if not isinstance(given, str | Path):
            return bool(given)
        found = checkpoints.complete(self.run_dir)
        newest = found[max(found)] if found else None
        if newest is not None and Path(given).expanduser().absolute() in (newest.absolute(), self.run_dir.absolute()):
            return True
        have = f"the newest is {newest}" if newest else f"{self.run_dir} holds none"
        remedy = "write True" if newest else "leave it out"
        raise ConfigError(
            f"train(resume_from_checkpoint={str(given)!r}): a run continues from its newest checkpoint, and {have}; "
            f"{remedy}, or give that checkpoint's model/ folder as the model of a new run"
        )

    def _save_object(self) -> None:
        """Save what the script gave as an object, for the processes of the run: a model, and a tokenizer or processor
        that is another than its name says."""
        given = self._processing_class
        if self._object is not None:
            folder = Path(f"{self.run_dir}{SAVED}").absolute()
            save_object(self._object, given, folder)
            self._base = str(folder)
        elif given is not None and not isinstance(given, str):
            named = getattr(given, "name_or_path", None) or self._base
            if is_changed(given, str(named), bool(self.args.field("trust_remote_code"))):
                folder = Path(f"{self.run_dir}{TOKENIZER}").absolute()
                save_processing_class(given, folder)
                self._tokenizer = str(folder)

    @without_frames
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the newest weights, with servers and workers of their own unless the run has done it.

        Args:
            eval_dataset: Rows in place of the trainer's, or several data sets by name; each is then evaluated by
                itself, and the names follow the prefix, as in eval_easy_reward.
            ignore_keys: Has no meaning here.
            metric_key_prefix: Stands in front of each metric's name, as in eval_reward.

        Returns:
            The metrics, under transformers' names; eval_reward is the mean reward.
        """
        trains = self.task
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, Mapping):
            each = [self.evaluate(rows, None, f"{metric_key_prefix}_{name}") for name, rows in several.items()]
            return {name: value for metrics in each for name, value in metrics.items()}
        rows = _together(self.eval_dataset) if eval_dataset is None else eval_dataset
        if rows is None:
            raise ConfigError(
                f"{type(self).__name__}.evaluate(): there is no eval_dataset; give one here, or to the trainer"
            )
        step, run_dir = self.state.global_step, self._extra_run(metric_key_prefix)
        task = Task(
            train_dataset=rows,
            eval_dataset=rows,
            reward_funcs=trains.rewards,
            tools=trains.tools,
            environment_factory=trains.environment,
            agent=trains.agent,
            reward_weights=trains.reward_weights,
        )
        self._play(task, run_dir, self.args.field("num_generations_eval") or self.args.field("num_generations"))
        lines = (run_dir / "evaluations.jsonl").read_text(encoding="utf-8") if run_dir.exists() else ""
        if not lines:
            return {}
        metrics = evaluation_metrics(json.loads(lines.splitlines()[0]), metric_key_prefix)
        self._logged.append({**metrics, "epoch": self.state.epoch, "step": step})
        return metrics

    @without_frames
    def rollouts(self, prompts: Sequence[Any], num_generations: int = 1) -> list[list[Any]]:
        """Play prompts with the newest weights and the trainer's tools.

        Args:
            prompts: Texts, lists of messages, or rows with a `prompt` and an environment's columns.
            num_generations: Completions of each prompt.

        Returns:
            The completions of each prompt: messages for prompts of messages, and text for text.
        """
        run_dir = self._extra_run("rollouts")
        file = Path(f"{run_dir.absolute()}.jsonl")
        self._play(rollouts_task(self.task, prompts, file), run_dir, num_generations)
        return read_rollouts(file, len(prompts), num_generations)

    def _extra_run(self, what: str) -> Path:
        """Return the directory of a run next to the training, a new one for each start."""
        return self.run_dir / "evaluations" / f"{what}-{self.state.global_step}-{_starts + 1}"

    def _play(self, task: Task, run_dir: Path, group_size: int) -> None:
        """Run an evaluation of a task, the trainer's while it lasts, with the newest weights."""
        trains, self.task = self.task, task
        name = self._start(by_start=True)  # in a worker that has come to its own, `task` stays
        try:
            if loading_a_task() is not None:
                return
            checkpoint = self._checkpoint() if self._trained else None
            if checkpoint is None:
                self._save_object()
            made = self.translated(_context_of(self._base))
            sections = only_evaluated(made.sections, self.run_dir, run_dir.name, group_size)
            if checkpoint is not None:
                sections["model"] |= {"path": str(checkpoint / checkpoints.MODEL)}
            # A run that ends before its first step writes no summary.
            self._run(Translation(sections), name, False, run_dir)
        finally:
            self.task = trains

    def translated(self, context: int | None) -> Translation:
        """Return the run's settings. `context` is the model's length in tokens; None if it is not known."""
        made = translate(self.args, self._base, context, self._rows)
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


def _unknown(name: str, config: type[_Config], own: list[str]) -> str:
    """Say what to write in place of an argument that no trainer of TRL's has."""
    if name in config.names():
        return f"it is a field of {config.__name__}; write args={config.__name__}({name}=...)"
    close = nearest(name, [argument for argument in own if argument not in ("self", "unknown", "__class__")])
    return f"did you mean {close}?" if close else "leave it out"


def _name_of(processing_class: Any, model: str, kind: str) -> str | None:
    """Return the tokenizer's folder or name, None if it is the model's or has none. Raises `ConfigError` if it can
    neither be named nor saved."""
    if processing_class is None:
        return None
    name = processing_class if isinstance(processing_class, str) else getattr(processing_class, "name_or_path", None)
    if not isinstance(name, str) or not name:
        if callable(getattr(processing_class, "save_pretrained", None)):
            return None
        raise ConfigError(
            f"{kind}(processing_class={type(processing_class).__name__}): servers, workers and learner load the "
            f"tokenizer: give an object of transformers, or its folder or name as text"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return None if path.absolute() == Path(model).expanduser().absolute() else str(path.absolute())
    return None if name == model else name


def _context_of(model: str) -> int | None:
    """Return a model's context in tokens; None if it cannot be read, which the check before the start reports."""
    from slipstream.deploy.checks.model_check import context_of

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its client warns at every try to reach the hub
    path = Path(model).expanduser()
    try:
        return context_of(str(path.absolute()) if path.is_dir() else model)
    except ConfigError:
        return None


def _leave_launcher() -> None:
    """Under accelerate launch or torchrun: end all processes but the first, and hide the launcher from the run's own.

    Raises:
        SystemExit: This is not the first process; the script does not continue in it.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    if processes != "1":
        os.environ[PROCESSES] = processes
        print(
            f"slipstream: note: WORLD_SIZE = {processes}: the first process runs everything, on all devices; the "
            f"others end here, and a step has the completions of all",
            file=sys.stderr,
            flush=True,
        )
    for name in [*os.environ]:
        if name in _OF_LAUNCHERS or name.startswith(("TORCHELASTIC_", "ACCELERATE_", "FSDP_")):
            del os.environ[name]


def _rows_of(dataset: Any) -> int | None:
    """Return the number of rows of a data set that is in memory; None of another."""
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, str) else None


def _together(eval_dataset: Any) -> Any:
    """Return several evaluation data sets, given by name, as one."""
    if not isinstance(eval_dataset, Mapping):
        return eval_dataset
    several = list(eval_dataset.values())
    if all(isinstance(rows, Sized) for rows in several):
        return [row for rows in several for row in rows]
    return lambda: (row for rows in several for row in rows)
