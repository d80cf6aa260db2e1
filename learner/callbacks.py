"""Loads the user's callbacks, which have transformers' interface, and calls them.

They run in the learner's main thread, between steps. The run waits for them, and the status page says so. A callback
that raises ends the run as a failure, also by sys.exit. The argument `args` of a callback has the run's settings by the
names of transformers' TrainingArguments. No TrainingArguments are made: they would set up a device and process groups
of their own.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from slipstream import learner
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.report.records import StepRecord
from slipstream.learner.report.tracking import numbers, sent_settings
from slipstream.learner.training.base import Trainer
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.user_files import import_for

if TYPE_CHECKING:
    from transformers import TrainerCallback

# Entries of `log_history` that are kept, of some 5 KB each; `metrics.jsonl` has every step.
MAX_LOGGED = 5_000

_OURS = f"{Path(learner.__file__).parent}{os.sep}"

_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


class CallbackFailed(LearnerFailed):
    """A callback raised an exception. The text names the callback, the line and the exception."""


@dataclass(frozen=True)
class Wish:
    """Requests of callbacks after a step: the end of the run, a checkpoint, an evaluation."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False


class Callbacks:
    """The callbacks of one session. Each event does nothing where there are none.

    Args:
        step: The step after which the session begins.
        tokenizer: Passed to callbacks as `processing_class`.
        waiting: Wraps each call, with the call's name; the learner waits for it meanwhile.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        config: RunConfig,
        trainer: Trainer,
        step: int,
        tokenizer: Any = None,
        waiting: Callable[[str], AbstractContextManager[object]] = lambda what: nullcontext(),
    ) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        self._callbacks = callbacks
        self._args = arguments(config, sent_settings(config))
        self._waiting = waiting
        self._state = TrainerState(
            global_step=step,
            max_steps=config.learner.steps,
            logging_steps=1,
            eval_steps=config.eval.every,
            save_steps=config.learner.checkpoint_every,
        )
        self._control = TrainerControl()
        self._given = {
            **trainer.for_callbacks(),
            "processing_class": tokenizer,
            "train_dataloader": None,
            "eval_dataloader": None,
        }

    @property
    def stopped(self) -> bool:
        """Whether a callback has asked for the end of the run."""
        return bool(self._control.should_training_stop)

    def begin(self) -> None:
        """Call on_init_end and on_train_begin, before the first step of the session."""
        if self._callbacks:
            self._call("on_init_end")
            self._control.should_training_stop = False
            self._call("on_train_begin")

    def step_begins(self) -> None:
        """Call on_step_begin."""
        if self._callbacks:
            self._control.should_save = self._control.should_evaluate = False
            self._call("on_step_begin")

    def stepped(self, record: StepRecord) -> Wish:
        """Call on_step_end and on_log, after a step that the queue has acknowledged, and return what callbacks ask
        for."""
        if not self._callbacks:
            return Wish()
        state, logs = self._state, numbers(record.flat())
        state.global_step, state.epoch = record.step, float(record.counts.epoch)
        state.num_input_tokens_seen = record.num_tokens
        self._call("on_step_end")
        # Names are shared by all entries: they would be half of what an entry takes.
        state.log_history.append({sys.intern(name): value for name, value in logs.items()} | {"step": record.step})
        del state.log_history[:-MAX_LOGGED]
        self._call("on_log", logs=dict(logs))
        self.evaluated(record.evaluations)
        control = self._control
        return Wish(control.should_training_stop, control.should_save, control.should_evaluate)

    def evaluated(self, ended: Sequence[Mapping[str, float]]) -> None:
        """Call on_evaluate for evaluations that have ended, the oldest first. Their metrics get transformers' names:
        eval_reward."""
        for metrics in ended if self._callbacks else ():
            self._evaluated({f"eval_{name.removeprefix('eval/')}": value for name, value in metrics.items()})

    def _evaluated(self, metrics: Mapping[str, float]) -> None:
        self._call("on_evaluate", metrics=dict(metrics))
        reward, best = metrics.get(self._args.metric_for_best_model), self._state.best_metric
        if reward is not None and (best is None or reward > best):
            self._state.best_metric, self._state.best_global_step = reward, int(metrics["eval_step"])

    def saved(self) -> None:
        """Call on_save, when a checkpoint is complete."""
        if self._callbacks:
            self._call("on_save")

    def end(self) -> None:
        """Call on_train_end, after the last step, its publication and its checkpoint."""
        if self._callbacks:
            self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{event}"
            method = getattr(callback, event)
            try:
                with self._waiting(f"callback {name}"):
                    answer = method(self._args, self._state, self._control, **self._given, **more)
            except (Exception, SystemExit) as error:
                raise CallbackFailed(_describe_failure(name, error)) from error
            if answer is not None:
                self._control = answer


@dataclass(frozen=True)
class Arguments:
    """The fields of TrainingArguments that a run has an answer for. `metric_for_best_model` is the mean reward of
    evaluations."""

    output_dir: str
    run_name: str
    max_steps: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    seed: int
    save_steps: int
    save_strategy: SaveStrategy
    eval_steps: int
    eval_strategy: IntervalStrategy
    report_to: list[str]
    push_to_hub: bool
    hub_model_id: str | None
    logging_steps: int = 1
    logging_strategy: IntervalStrategy = IntervalStrategy.STEPS
    logging_first_step: bool = True
    eval_delay: int = 0
    num_train_epochs: float = 1.0
    metric_for_best_model: str = "eval_reward"
    greater_is_better: bool = True
    load_best_model_at_end: bool = False
    process_index: int = 0
    local_process_index: int = 0
    world_size: int = 1
    should_log: bool = True
    should_save: bool = True
    disable_tqdm: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"args.{name}: this learner has no such field of TrainingArguments; args.settings has the run file's "
            f"sections"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return plain values only, as transformers gives them to trackers."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, bool | int | float | str)}


def arguments(config: RunConfig, settings: dict[str, Any]) -> Arguments:
    """Make the object that callbacks get as `args`.

    Args:
        settings: The content of `args.settings`.
    """
    learner, evaluation, hub = config.learner, config.eval, config.hub
    return Arguments(
        output_dir=str(config.run_dir.absolute()),
        run_name=config.tracking.run_name or config.run.name,
        max_steps=learner.steps,
        learning_rate=learner.learning_rate,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        seed=config.run.seed,
        save_steps=learner.checkpoint_every,
        save_strategy=SaveStrategy.STEPS if learner.checkpoint_every else SaveStrategy.NO,
        eval_steps=evaluation.every,
        eval_strategy=IntervalStrategy.STEPS if evaluation.is_on else IntervalStrategy.NO,
        report_to=list(config.tracking.report_to),
        push_to_hub=hub.push_to_hub,
        hub_model_id=hub.hub_model_id,
        settings=settings,
    )


def load(named: Sequence[str]) -> list[TrainerCallback]:
    """Load callbacks.

    Args:
        named: path/to/file.py:name each, where name is a callback, a class of one, a list of these, or an object with
            `callbacks`, such as a trainer of `slipstream.trl`.

    Raises:
        ConfigError: One cannot be loaded, or is no callback.
    """
    found: list[TrainerCallback] = []
    for name in named:
        module, _, wanted = name.rpartition(":")
        imported = import_for(name, "learner.callbacks")
        if not hasattr(imported, wanted):
            raise ConfigError(f"learner.callbacks = {name}: {module} defines no {wanted!r}; define it there")
        found += [_callback(item, name) for item in _items(getattr(imported, wanted))]
    return found


def _items(value: Any) -> list[Any]:
    is_callback = callable(getattr(value, "on_train_begin", None))
    value = value if is_callback else getattr(value, "callbacks", value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _callback(value: Any, name: str) -> TrainerCallback:
    from transformers import TrainerCallback

    if isinstance(value, type) and issubclass(value, TrainerCallback):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"learner.callbacks = {name}: {value.__name__}() raised {type(error).__name__}: {error}; give an "
                f"object in place of the class"
            ) from error
    if not isinstance(value, TrainerCallback):
        raise ConfigError(
            f"learner.callbacks = {name}: it is a {type(value).__name__}; give an object of a class that extends "
            f"transformers.TrainerCallback, that class, or a list of such"
        )
    return value


def _is_own(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return "site-packages" not in file and not file.startswith((_STANDARD, _OURS, "<frozen "))


def _describe_failure(name: str, error: Exception | SystemExit) -> str:
    """Describe the failure of a callback, with the last frame that is neither a library's nor ours: that is the user's
    code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if _is_own(frame)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SystemExit):
        what, remedy = (
            f"called sys.exit({'' if error.code is None else error.code!r})",
            "to end the run after a step, set control.should_training_stop = True there",
        )
    else:
        what, remedy = f"raised {type(error).__name__}: {error}", "fix it, or remove it from learner.callbacks"
    return f"callback {name} {what}{place}; {remedy}, and continue with --resume"
