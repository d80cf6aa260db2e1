"""How each tracker is started, so that a resumed run goes on where it was.

A tracker that names runs by an id gets one of ours, or tells its own; both are kept in `trackers.json` of the run
directory. Most keep the first value of a step for good, so that steps which a resume makes again are not sent again:
`Memory.seen` is the newest that was. TensorBoard hides them by itself.

Which trackers a run wants, and whether their packages are there. Imports none of them.

A step's rollouts as trackers show them: a table where they have tables, a text where they have texts.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from learner.report.rollouts import printable
from protocol.config import ConfigError, RunConfig, TrackingSection
from protocol.rollouts import RolloutView

ALL = "all"

# The packages that have each tracker, any of which will do; accelerate has classes for these.
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet-ml",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "aim": ("aim",),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}

# Those that are extras of Slipstream's own.
EXTRAS = ("tensorboard", "wandb", "trackio")


def wanted_trackers(section: TrackingSection) -> list[str]:
    """The trackers of `tracking.report_to`. Raises `ConfigError` for one whose package is not installed."""
    if ALL in section.report_to:
        found = [name for name in PACKAGES if _is_installed(name)]
        if not found:
            raise ConfigError(
                f"tracking.report_to = all: none of {', '.join(PACKAGES)} is installed; install one, such as: "
                f"{_install('tensorboard')}"
            )
        return found
    if missing := [name for name in section.report_to if not _is_installed(name)]:
        raise ConfigError(
            f"tracking.report_to = {', '.join(section.report_to)}: {missing[0]} is not installed; install it with: "
            f"{_install(missing[0])}, or leave it out"
        )
    return list(section.report_to)


def _install(name: str) -> str:
    return f"pip install '{f'slipstream-rl[{name}]' if name in EXTRAS else PACKAGES[name][0]}'"


def _is_installed(name: str) -> bool:
    """By its distribution: a folder of that name, as wandb leaves behind where it runs, is not the package."""
    for package in PACKAGES[name]:
        try:
            distribution(package)
        except PackageNotFoundError:
            continue
        return True
    return False


NAME = "rollouts"

COLUMNS = ["step", "prompt", "completion", "reward", "advantage", "finish_reason", "staleness"]


def rows(views: Sequence[RolloutView]) -> list[list[Any]]:
    """One for each rollout, in the order of `COLUMNS`."""
    return [
        [view.step, *_texts(view), view.reward, view.advantage, view.finish_reason, view.staleness] for view in views
    ]


def send_rollout_table(tracker: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
    """To a tracker that can show them; to another, nothing."""
    if hasattr(tracker, "log_table"):
        tracker.log_table(NAME, columns=COLUMNS, data=rows(views), step=step)
    elif tracker.name == "tensorboard":
        tracker.log({NAME: "\n\n".join(_markdown(row) for row in rows(views))}, step=step)
    elif tracker.name == "trackio":
        import pandas
        import trackio

        table = pandas.DataFrame(rows(views), columns=COLUMNS)
        tracker.log({NAME: trackio.Table(dataframe=table)}, step=step)


def _texts(view: RolloutView) -> tuple[str, str]:
    """Prompt and completion: what comes before the policy's first turn, and the rest."""
    messages = view.messages or []
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return _text(messages[:first]), _text(messages[first:])


def _text(messages: Sequence[dict[str, Any]]) -> str:
    return printable("\n".join(f"{message.get('role', '?')}: {_said(message)}" for message in messages))


def _said(message: dict[str, Any]) -> str:
    parts = [message.get("content"), message.get("tool_calls")]
    return " ".join(str(part) for part in parts if part)


def _markdown(row: Sequence[Any]) -> str:
    """The texts as code, of which markdown makes nothing."""
    _, prompt, completion, reward, _, finish_reason, _ = row
    body = f"{prompt}\n{completion}".replace("\n", "\n    ")
    return f"**reward {reward:.3g}**, ended by {finish_reason}\n\n    {body}"


FILE_NAME = "trackers.json"

# Takes the place of what it had of given-up steps.
REPLACES_STEPS = ("tensorboard",)


class Memory(msgspec.Struct):
    """What a run keeps of its trackers. ids: of the run, by tracker; seen: the newest step that any session made;
    known: trackers that were there in one of them."""

    ids: dict[str, str] = {}
    seen: int = 0
    known: list[str] = []

    @classmethod
    def of(cls, run_dir: Path) -> Memory:
        """An empty one where there is none, or none that can be read."""
        try:
            return msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return cls()

    def keep(self, run_dir: Path) -> None:
        """Raises `OSError`."""
        aside = run_dir / f".unfinished-{FILE_NAME}"
        aside.write_bytes(msgspec.json.encode(self) + b"\n")
        os.replace(aside, run_dir / FILE_NAME)


@dataclass(frozen=True)
class Start:
    """What a tracker is started with. folder: the run's directory; step: of the checkpoint that the run goes on from,
    0 at its start; id: of the run there, None where the tracker has made none as yet; options: the tracker's own."""

    folder: Path
    runs: Path
    project: str
    name: str
    step: int
    id: str | None
    options: Mapping[str, Any]

    @property
    def resumed(self) -> bool:
        return self.step > 0


def start_of(config: RunConfig, tracker: str, step: int, memory: Memory) -> Start:
    section = config.tracking
    return Start(
        folder=config.run_dir.absolute(),
        runs=config.run.dir.absolute(),
        project=section.project,
        name=section.run_name or config.run.name,
        step=step,
        id=memory.ids.get(tracker),
        options=section.options.get(tracker, {}),
    )


# By tracker: what its class takes.
def _tensorboard(start: Start) -> dict[str, Any]:
    """`tensorboard --logdir runs` shows runs side by side."""
    purge = {"purge_step": start.step + 1} if start.resumed else {}
    return {"run_name": "tensorboard", "logging_dir": start.folder, **purge}


def _wandb(start: Start) -> dict[str, Any]:
    return {
        "run_name": start.project,
        "name": start.name,
        "id": start.id,
        "resume": "allow",
        "dir": str(start.folder),
    }


def _trackio(start: Start) -> dict[str, Any]:
    return {"run_name": start.project, "name": start.name, "resume": "allow" if start.resumed else "never"}


def _comet_ml(start: Start) -> dict[str, Any]:
    return {"run_name": start.project, "experiment_key": start.id, "mode": "get_or_create"}


def _mlflow(start: Start) -> dict[str, Any]:
    return {"experiment_name": start.project, "run_name": start.name, "run_id": start.id}


def _aim(start: Start) -> dict[str, Any]:
    return {"run_name": start.name, "logging_dir": start.runs, "experiment": start.project, "run_hash": start.id}


def _clearml(start: Start) -> dict[str, Any]:
    going_on = {"continue_last_task": start.id} if start.id else {"reuse_last_task_id": False}
    return {"project_name": start.project, "task_name": start.name, **going_on}


def _dvclive(start: Start) -> dict[str, Any]:
    return {"dir": str(start.folder / "dvclive"), "resume": start.resumed, "save_dvc_exp": False}


def _swanlab(start: Start) -> dict[str, Any]:
    return {
        "run_name": start.project,
        "experiment_name": start.name,
        "id": start.id,
        "resume": "allow",
        "logdir": str(start.folder / "swanlog"),
    }


ARGUMENTS: Mapping[str, Callable[[Start], dict[str, Any]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "comet_ml": _comet_ml,
    "mlflow": _mlflow,
    "aim": _aim,
    "clearml": _clearml,
    "dvclive": _dvclive,
    "swanlab": _swanlab,
}

# Ids that we choose, by tracker: lower-case letters and digits, as many as it wants.
_OUR_IDS = {"wandb": 4, "comet_ml": 20, "swanlab": 10}

# Ids that a tracker tells once it has started.
_THEIR_IDS: Mapping[str, Callable[[Any], str]] = {
    "mlflow": lambda run: str(run.info.run_id),
    "aim": lambda run: str(run.hash),
    "clearml": lambda task: str(task.id),
}


def new_ids(memory: Memory, trackers: list[str]) -> Memory:
    """With these trackers, and an id for each that wants one of ours and has none."""
    made = {name: secrets.token_hex(_OUR_IDS[name]) for name in trackers if name in _OUR_IDS}
    return Memory({**made, **memory.ids}, memory.seen, list(dict.fromkeys([*memory.known, *trackers])))


def started(tracker: str, start: Start) -> GeneralTracker:
    """A tracker that takes steps; raises what it raises."""
    PartialState()  # accelerate's trackers ask for it; of a learner it is there
    # Trackers look whether it is loaded and take its Figure, which is not there while the curve's thread imports it:
    # trackio then drops all figures of the step.
    import_module("matplotlib.figure")
    made = LOGGER_TYPE_TO_CLASS[tracker](**{**ARGUMENTS[tracker](start), **start.options})
    made.start()
    if tracker == "comet_ml":
        made.tracker.set_name(start.name)
    if tracker == "clearml":
        made.tracker.set_initial_iteration(0)  # it would add the newest step to each that follows
    return made


def id_of(tracker: str, made: GeneralTracker) -> str | None:
    """The id that the tracker chose; None where it chooses none."""
    told = _THEIR_IDS.get(tracker)
    return told(made.tracker) if told else None


def renamed(tracker: str, figures: Mapping[str, float]) -> dict[str, float]:
    """The figures under names that the tracker takes: MLflow refuses a whole line for an @."""
    if tracker != "mlflow":
        return dict(figures)
    return {re.sub(r"[^\w./ -]", "_", name): value for name, value in figures.items()}
