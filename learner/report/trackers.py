"""Defines the trackers of `tracking.report_to`: their packages, their start, and how a resumed run continues.

Nothing here imports a tracker, or accelerate, before `start`: the checks before a run list trackers without them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.learner.report.rollouts import printable
from slipstream.protocol.config import ConfigError, TrackingSection
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import EVAL, EVAL_STEP

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

ALL = "all"

ROLLOUTS = "rollouts"

STEP = "step"

COLUMNS = ["step", "prompt", "completion", "reward", "advantage", "finish_reason", "staleness"]


@dataclass(frozen=True)
class Start:
    """Arguments that a tracker is started with.

    Attributes:
        folder: The run's directory.
        runs: The directory of all runs.
        project: Name of the project at the tracker.
        name: Name of the run at the tracker.
        step: Step of the checkpoint that the run resumes from; 0 where it starts.
        id: The tracker's id of the run; None where it has none yet.
        options: The user's own arguments for the tracker, which win over ours.
    """

    folder: Path
    runs: Path
    project: str
    name: str
    step: int
    id: str | None
    options: Mapping[str, Any]

    @property
    def resumed(self) -> bool:
        """Whether the run continues after a checkpoint."""
        return self.step > 0


class Tracker:
    """A tracker, with a class of accelerate's interface.

    Attributes:
        name: Its name in `tracking.report_to`, which is accelerate's where accelerate has it.
        packages: The packages that provide it, any of which will do.
        is_extra: Whether Slipstream has an extra of this name that installs it.
        replaces_steps: Whether it can replace the steps that a resumed run makes again. The others keep the first value
            of a step for good, so they are not sent such steps again.
    """

    name: ClassVar[str]
    packages: ClassVar[Sequence[str]]
    is_extra: ClassVar[bool] = False
    replaces_steps: ClassVar[bool] = False

    def is_installed(self) -> bool:
        """Look for the distribution: a folder of that name, as wandb leaves behind where it runs, is not enough."""
        for package in self.packages:
            try:
                distribution(package)
            except PackageNotFoundError:
                continue
            return True
        return False

    def install_command(self) -> str:
        """Return the command that installs it."""
        return f"pip install '{f'slipstream-rl[{self.name}]' if self.is_extra else self.packages[0]}'"

    def new_id(self) -> str | None:
        """Choose an id for a new run; None where the tracker chooses it, or has none."""
        return None

    def arguments(self, start: Start) -> dict[str, Any]:
        """Return the arguments of the class to start."""
        raise NotImplementedError

    def kind(self) -> type[GeneralTracker]:
        """Return the class to start: accelerate's, or one of its interface for a tracker that accelerate lacks."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        found: type[GeneralTracker] = LOGGER_TYPE_TO_CLASS[self.name]
        return found

    def start(self, start: Start) -> GeneralTracker:
        """Start the tracker; it can then be sent steps. Raises whatever the tracker's library raises."""
        from accelerate import PartialState

        PartialState()  # accelerate's trackers ask for this state; the learner has made it already.
        # Trackers use matplotlib's Figure if matplotlib is loaded. While the curve's thread imports it, Figure is
        # missing, and trackio then drops all metrics of the step.
        import_module("matplotlib.figure")
        made = self.kind()(**{**self.arguments(start), **start.options})
        made.start()
        return made

    def run_id(self, made: GeneralTracker) -> str | None:
        """Return the id that the tracker chose for the run; None if it chooses none."""
        return None

    def rename(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics under names that the tracker accepts."""
        return dict(metrics)

    def log(self, made: GeneralTracker, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics at a step, which may be earlier than the one before."""
        made.log(dict(metrics), step=step)

    def log_rollouts(self, made: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
        """Send rollouts of a step, if the tracker can show texts or tables."""


class _TableTracker(Tracker):
    """A tracker whose class in accelerate has `log_table`."""

    def log_rollouts(self, made: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
        if hasattr(made, "log_table"):
            columns, rows = _table(views)
            made.log_table(ROLLOUTS, columns=columns, data=rows, step=step)


class TensorBoard(Tracker):
    """`tensorboard --logdir runs` shows runs side by side."""

    name = "tensorboard"
    packages = ("tensorboard", "tensorboardX")
    is_extra = True
    replaces_steps = True

    def arguments(self, start: Start) -> dict[str, Any]:
        purge = {"purge_step": start.step + 1} if start.resumed else {}
        return {"run_name": "tensorboard", "logging_dir": start.folder, **purge}

    def log_rollouts(self, made: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
        made.log({ROLLOUTS: "\n\n".join(map(_markdown, views))}, step=step)


class Wandb(Tracker):
    name = "wandb"
    packages = ("wandb",)
    is_extra = True

    def new_id(self) -> str:
        return secrets.token_hex(4)

    def arguments(self, start: Start) -> dict[str, Any]:
        return {
            "run_name": start.project,
            "name": start.name,
            "id": start.id,
            "resume": "allow",
            "dir": str(start.folder),
        }

    def start(self, start: Start) -> GeneralTracker:
        """Make our steps the axis. Its own axis cannot go back, and has one value of a name at each place."""
        made = super().start(start)
        for names, axis in (("*", STEP), (f"{EVAL}*", EVAL_STEP)):
            made.tracker.define_metric(names, step_metric=axis)
        return made

    def log(self, made: GeneralTracker, metrics: Mapping[str, float], step: int) -> None:
        made.log({STEP: step, **metrics})

    def log_rollouts(self, made: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
        columns, rows = _table(views)
        made.log_table(ROLLOUTS, columns=columns, data=rows)


class Trackio(Tracker):
    name = "trackio"
    packages = ("trackio",)
    is_extra = True

    def arguments(self, start: Start) -> dict[str, Any]:
        return {"run_name": start.project, "name": start.name, "resume": "allow" if start.resumed else "never"}

    def log_rollouts(self, made: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
        import pandas
        import trackio

        columns, rows = _table(views)
        table = pandas.DataFrame(rows, columns=columns)
        made.log({ROLLOUTS: trackio.Table(dataframe=table)}, step=step)


class CometMl(_TableTracker):
    name = "comet_ml"
    packages = ("comet-ml",)

    def new_id(self) -> str:
        return secrets.token_hex(20)

    def arguments(self, start: Start) -> dict[str, Any]:
        return {"run_name": start.project, "experiment_key": start.id, "mode": "get_or_create"}

    def start(self, start: Start) -> GeneralTracker:
        made = super().start(start)
        made.tracker.set_name(start.name)
        return made


class Mlflow(_TableTracker):
    name = "mlflow"
    packages = ("mlflow", "mlflow-skinny")

    def arguments(self, start: Start) -> dict[str, Any]:
        return {"experiment_name": start.project, "run_name": start.name, "run_id": start.id}

    def run_id(self, made: GeneralTracker) -> str:
        return str(made.tracker.info.run_id)

    def rename(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Replace @ in names: MLflow refuses all metrics of a step if one name has it."""
        return {re.sub(r"[^\w./ -]", "_", name): value for name, value in metrics.items()}


class Aim(_TableTracker):
    name = "aim"
    packages = ("aim",)

    def arguments(self, start: Start) -> dict[str, Any]:
        return {"run_name": start.name, "logging_dir": start.runs, "experiment": start.project, "run_hash": start.id}

    def run_id(self, made: GeneralTracker) -> str:
        return str(made.tracker.hash)


class ClearMl(_TableTracker):
    name = "clearml"
    packages = ("clearml",)

    def arguments(self, start: Start) -> dict[str, Any]:
        continues = {"continue_last_task": start.id} if start.id else {"reuse_last_task_id": False}
        return {"project_name": start.project, "task_name": start.name, **continues}

    def start(self, start: Start) -> GeneralTracker:
        made = super().start(start)
        made.tracker.set_initial_iteration(0)  # or it would add the newest step to each that follows
        return made

    def run_id(self, made: GeneralTracker) -> str:
        return str(made.tracker.id)


class DvcLive(_TableTracker):
    name = "dvclive"
    packages = ("dvclive",)

    def arguments(self, start: Start) -> dict[str, Any]:
        return {"dir": str(start.folder / "dvclive"), "resume": start.resumed, "save_dvc_exp": False}


class SwanLab(_TableTracker):
    name = "swanlab"
    packages = ("swanlab",)

    def new_id(self) -> str:
        return secrets.token_hex(10)

    def arguments(self, start: Start) -> dict[str, Any]:
        return {
            "run_name": start.project,
            "experiment_name": start.name,
            "id": start.id,
            "resume": "allow",
            "logdir": str(start.folder / "swanlog"),
        }


_CLASSES: Sequence[type[Tracker]] = (TensorBoard, Wandb, Trackio, CometMl, Mlflow, Aim, ClearMl, DvcLive, SwanLab)
TRACKERS: Mapping[str, Tracker] = {each.name: each() for each in _CLASSES}


def wanted_trackers(section: TrackingSection) -> list[str]:
    """Name the trackers of `tracking.report_to`; for "all", those that are installed.

    Raises:
        ConfigError: One of them is not installed, or for "all" none is.
    """
    if ALL in section.report_to:
        found = [name for name, tracker in TRACKERS.items() if tracker.is_installed()]
        if not found:
            raise ConfigError(
                f"tracking.report_to = all: none of {', '.join(TRACKERS)} is installed; install one, such as: "
                f"{TRACKERS['tensorboard'].install_command()}"
            )
        return found
    if missing := [name for name in section.report_to if not TRACKERS[name].is_installed()]:
        raise ConfigError(
            f"tracking.report_to = {', '.join(section.report_to)}: {missing[0]} is not installed; install it with: "
            f"{TRACKERS[missing[0]].install_command()}, or leave it out"
        )
    return list(section.report_to)


def _table(views: Sequence[RolloutView]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns, and a row for each rollout; where episodes have several roles, with the role's name."""
    rows = [
        [view.step, *_texts(view), view.reward, view.advantage, view.finish_reason, view.staleness] for view in views
    ]
    if all(view.role is None for view in views):
        return COLUMNS, rows
    return [*COLUMNS, "role"], [[*row, view.role] for row, view in zip(rows, views, strict=True)]


def _texts(view: RolloutView) -> tuple[str, str]:
    """Split the messages into prompt (before the first turn of the policy) and completion."""
    messages = view.messages or []
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return _text(messages[:first]), _text(messages[first:])


def _text(messages: Sequence[dict[str, Any]]) -> str:
    return printable("\n".join(f"{message.get('role', '?')}: {_content(message)}" for message in messages))


def _content(message: dict[str, Any]) -> str:
    parts = [message.get("content"), message.get("tool_calls")]
    return " ".join(str(part) for part in parts if part)


def _markdown(view: RolloutView) -> str:
    """Indent the texts as code, so that nothing in them is read as markdown."""
    body = "\n".join(_texts(view)).replace("\n", "\n    ")
    of_role = "" if view.role is None else f" of `{view.role}`"
    return f"**reward {view.reward:.3g}**{of_role}, ended by {view.finish_reason}\n\n    {body}"
