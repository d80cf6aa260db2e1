"""Where a run's checkpoints lie and which is the best, for whoever has no torch; what is in them is the learner's."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

STATE = "state.json"
MODEL = "model"
ADAPTER = "adapter"
_BEST = "best.json"
_UNUSED = "unused-"
_NAME = re.compile(r"step-(\d+)")


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with the highest evaluation: its step, and the mean reward of that step's evaluation."""

    step: int
    reward: float


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def name_of(step: int) -> str:
    """Six digits, and as many as it takes from a million on: names do not sort as their steps do."""
    return f"step-{step:06d}"


def unused(path: Path) -> Path:
    """Where a checkpoint is moved to that no run goes on from."""
    return path.with_name(f"{_UNUSED}{path.name}")


def complete(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints by their step, lowest first."""
    return {step: path for step, path in named(run_dir).items() if (path / STATE).is_file()}


def named(run_dir: Path) -> dict[int, Path]:
    """What has a checkpoint's name, by its step, lowest first. One is renamed to it when it is complete, so where
    `STATE` is missing somebody has taken it away."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder(run_dir).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def nothing_to_do(name: str, made: int, wanted: int) -> str:
    """What to say of the run `name`, which has made its last step: `made` of them, where `wanted` are asked for."""
    if made == wanted:
        return f"{name} is finished: it has made all of its {made} steps"
    return f"{name} is finished: it has made {made} steps, and learner.steps = {wanted}; raise that to go on"


def best(run_dir: Path) -> Best | None:
    """What was written down of the best one; None where nothing was, or where it is gone."""
    try:
        found = msgspec.json.decode((folder(run_dir) / _BEST).read_bytes(), type=Best)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.step in complete(run_dir) else None


def write_best(run_dir: Path, found: Best) -> None:
    """Write it down, all or nothing. Raises `OSError`."""
    path = folder(run_dir) / _BEST
    aside = path.with_suffix(".unfinished")
    aside.write_bytes(msgspec.json.encode(found) + b"\n")
    aside.replace(path)
