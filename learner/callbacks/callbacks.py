"""When the user's callbacks are called, and what they may ask for.

They run in the learner's main thread, between steps: what they take, the run waits for, and the status page says so.
One that raises ends the run, as a failure; sys.exit is no other way out.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import learner
from learner.failures import LearnerFailed
from learner.ranks.stopping import Stopped
from learner.report.records import StepRecord
from learner.report.tracking import numbers, told_settings
from learner.training.trainer import Trainer
from protocol.config import RunConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback

_OURS = f"{Path(learner.__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


class CallbackFailed(LearnerFailed):
    """A callback raised; the text says which, where and what."""


@dataclass(frozen=True)
class Wish:
    """What callbacks ask for after a step: that the run ends, a checkpoint, an evaluation."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False


class Callbacks:
    """Those of one session, which goes on from `step`. Each event does nothing where there are none.

    waiting: around a call, with what is called; the learner waits for it meanwhile. tokenizer: what callbacks get as
    `processing_class`.
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
        self._callbacks = callbacks
        if not callbacks:
            return
        from transformers.trainer_callback import TrainerControl, TrainerState

        from learner.callbacks.arguments import arguments

        self._args = arguments(config, told_settings(config))
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
            "model": trainer.policy.model,
            "processing_class": tokenizer,
            "optimizer": trainer.optimiser,
            "lr_scheduler": trainer.schedule,
            "train_dataloader": None,
            "eval_dataloader": None,
        }
        self._call("on_init_end")

    @property
    def stopped(self) -> bool:
        """Whether one of them has asked for the end of the run."""
        return bool(self._callbacks) and bool(self._control.should_training_stop)

    def begin(self) -> None:
        """Before the first step of the session."""
        if self._callbacks:
            self._control.should_training_stop = False
            self._call("on_train_begin")

    def step_begins(self) -> None:
        if self._callbacks:
            self._control.should_save = self._control.should_evaluate = False
            self._call("on_step_begin")

    def stepped(self, record: StepRecord) -> Wish:
        """After a step that the queue has acknowledged."""
        if not self._callbacks:
            return Wish()
        state, logs = self._state, numbers(record.flat())
        state.global_step, state.epoch = record.step, float(record.tally.epoch)
        state.num_input_tokens_seen = record.num_tokens
        self._call("on_step_end")
        state.log_history.append({**logs, "step": record.step})
        self._call("on_log", logs=dict(logs))
        self.evaluated(record.evaluations)
        control = self._control
        return Wish(control.should_training_stop, control.should_save, control.should_evaluate)

    def evaluated(self, ended: Sequence[Mapping[str, float]]) -> None:
        """Evaluations have ended, whose figures these are, the oldest first. They get transformers' names:
        eval_reward."""
        for figures in ended if self._callbacks else ():
            self._evaluated({f"eval_{name.removeprefix('eval/')}": value for name, value in figures.items()})

    def _evaluated(self, metrics: Mapping[str, float]) -> None:
        self._call("on_evaluate", metrics=dict(metrics))
        reward, best = metrics.get(self._args.metric_for_best_model), self._state.best_metric
        if reward is not None and (best is None or reward > best):
            self._state.best_metric, self._state.best_global_step = reward, int(metrics["eval_step"])

    def saved(self) -> None:
        """A checkpoint is complete."""
        if self._callbacks:
            self._call("on_save")

    def end(self) -> None:
        """After the last step, its publication and its checkpoint."""
        if self._callbacks:
            self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{event}"
            method = getattr(callback, event)
            try:
                with self._waiting(f"callback {name}"):
                    answer = method(self._args, self._state, self._control, **self._given, **more)
            except Stopped:  # a signal came, and the callback has no part in it
                raise
            except (Exception, SystemExit) as error:
                raise CallbackFailed(_said(name, error)) from error
            if answer is not None:
                self._control = answer


def _is_own(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return "site-packages" not in file and not file.startswith((_STANDARD, _OURS, "<frozen "))


def _said(name: str, error: Exception | SystemExit) -> str:
    """The last frame is where it went wrong; the last that is neither a library's nor ours is what the user wrote."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if _is_own(frame)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SystemExit):
        what, remedy = (
            f"called sys.exit({'' if error.code is None else error.code!r})",
            "to end the run after a step, set control.should_training_stop = True there",
        )
    else:
        what, remedy = f"raised {type(error).__name__}: {error}", "mend it, or take it out of learner.callbacks"
    return f"callback {name} {what}{place}; {remedy}, and go on with --resume"
