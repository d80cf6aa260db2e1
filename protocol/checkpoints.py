"""Finds a run's checkpoints and the best of them, without torch. Only the learner reads what is in them."""

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
    """Return a checkpoint's folder name: six digits, more from a million on, so names do not sort as steps do."""
    return f"step-{step:06d}"


def unused(path: Path) -> Path:
    """Return the path to which a checkpoint is moved that no run resumes from."""
    return path.with_name(f"{_UNUSED}{path.name}")


def complete(run_dir: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, lowest first."""
    return {step: path for step, path in named(run_dir).items() if (path / STATE).is_file()}


def named(run_dir: Path) -> dict[int, Path]:
    """Return the folders with a checkpoint's name by step, lowest first.

    A checkpoint gets its name when it is complete: if `STATE` is missing, somebody has removed it.
    """
    found = ((_NAME.fullmatch(path.name), path) for path in folder(run_dir).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def nothing_to_do(name: str, made: int, wanted: int) -> str:
    """Say that run `name` has made its last step: `made` steps, with `wanted` asked for."""
    if made == wanted:
        return f"{name} is finished: it has made all of its {made} steps; raise learner.steps to continue"
    return f"{name} is finished: it has made {made} steps, and learner.steps = {wanted}; raise that to continue"


def best(run_dir: Path) -> Best | None:
    """Read which checkpoint is the best; None if none was recorded, or it is gone."""
    try:
        found = msgspec.json.decode((folder(run_dir) / _BEST).read_bytes(), type=Best)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.step in complete(run_dir) else None


def write_best(run_dir: Path, found: Best) -> None:
    """Record the best checkpoint, all or nothing. Raises `OSError`."""
    path = folder(run_dir) / _BEST
    aside = path.with_suffix(".unfinished")
    aside.write_bytes(msgspec.json.encode(found) + b"\n")
    aside.replace(path)
