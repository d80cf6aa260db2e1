"""Writes, finds and reads checkpoints. Each is complete, or not there at all.

`run_dir/checkpoints/step-000050/` holds `model/` (a folder that `from_pretrained` and servers load), `adapter/` if one
trains (as peft writes it; `model/` has it merged), `trainer.pt` (optimiser, schedule, random states, a reference that
has moved) and `state.json` (step, version, settings). The queue keeps the position in the data set. Ranks that hold
parts of the weights write a file each to `model/`, and to `trainer/` what their optimiser remembers.

Every change that others can see is one rename: killed at any moment, `latest` finds the newest complete checkpoint or
the one before. The next `save` removes what a kill leaves behind (`.unfinished-...`, `.discarded-...`).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slipstream.learner.checkpoints.model_folder import Sources, copy_sources
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.training.base import Trainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import ConfigError

# Folder with what ranks remember that hold parts of the weights.
PARTS = "trainer"

_UNFINISHED, _DISCARDED = ".unfinished-", ".discarded-"


class CheckpointError(LearnerFailed):
    """A checkpoint could not be written. Earlier ones are still complete."""


class CheckpointInfo(msgspec.Struct):
    """The content of a checkpoint's state.json.

    Attributes:
        step: Optimiser steps that were done.
        version: Policy version that they had made.
        settings: The run's settings by name, as text; None in checkpoints of earlier releases.
        run: Id of the run, which the queue's store has too; "" in those of earlier releases.
        written_bytes: Size of its files without state.json; 0 in those of earlier releases.
        written_s: Seconds until they were on the disk.
    """

    step: int
    version: int
    settings: dict[str, str] | None = None
    run: str = ""
    written_bytes: int = 0
    written_s: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    info: CheckpointInfo

    @property
    def model_path(self) -> Path:
        return self.path / places.MODEL

    @property
    def adapter_path(self) -> Path:
        return self.path / places.ADAPTER


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step, if there is any."""
    found = places.complete(run_dir)
    return of_step(run_dir, max(found)) if found else None


def of_step(run_dir: Path, step: int) -> Checkpoint:
    """Return the complete checkpoint of `step`. Raises `OSError` where there is none."""
    path = places.folder(run_dir) / places.name_of(step)
    return Checkpoint(path, read_info(path / places.STATE))


def read_info(path: Path) -> CheckpointInfo:
    """Read a checkpoint's state.json. Raises `OSError`, `msgspec.DecodeError`."""
    return msgspec.json.decode(path.read_bytes(), type=CheckpointInfo)


def save(
    run_dir: Path,
    info: CheckpointInfo,
    trainer: Trainer,
    sources: Sources,
    keep: int,
    spared: Collection[int] = (),
) -> Checkpoint:
    """Write a checkpoint, durable when this returns, and delete old ones.

    It is written aside, flushed to disk and then renamed.

    Args:
        keep: Number of the newest checkpoints that stay.
        spared: Steps whose checkpoints stay, however old.

    Raises:
        CheckpointError: It cannot be written; the disk space that it took is free again.
    """
    began = time.monotonic()
    home = places.folder(run_dir)
    final = home / places.name_of(info.step)
    unfinished = home / f"{_UNFINISHED}{final.name}"
    try:
        _sweep(home)
        unfinished.mkdir(parents=True)
        trainer.save_model(unfinished / places.MODEL)
        if trainer.adapter is not None:
            trainer.adapter.save(unfinished / places.ADAPTER)
        copy_sources(sources, unfinished / places.MODEL)
        torch.save({**trainer.state(unfinished / PARTS), "random": _random_state()}, unfinished / "trainer.pt")
        for weights in unfinished.rglob("*.safetensors"):  # the library makes them readable for their owner alone
            shutil.copymode(unfinished / "trainer.pt", weights)
        _flush(unfinished)
        size = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
        info = msgspec.structs.replace(info, written_bytes=size, written_s=time.monotonic() - began)
        (unfinished / places.STATE).write_bytes(msgspec.json.encode(info))
        _flush_one(unfinished / places.STATE)
        _flush_one(unfinished)
        if final.exists():  # from a time line that a resume gave up
            _discard(final)
        unfinished.rename(final)
        _flush_one(home)
    except Exception as error:  # libraries raise many types, on a full disk too
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    prune(run_dir, keep, spared)
    return Checkpoint(final, info)


def try_files(run_dir: Path, trainer: Trainer, sources: Sources) -> None:
    """Write all of a checkpoint but its weights and optimiser, and delete it: a file that cannot be written is found
    before the first step, and not after the work of hours.

    Raises:
        CheckpointError: It cannot be written.
    """
    tried = places.folder(run_dir) / f"{_UNFINISHED}trial"
    try:
        shutil.rmtree(tried, ignore_errors=True)
        tried.mkdir(parents=True)
        trainer.save_without_weights(tried / places.MODEL)
        copy_sources(sources, tried / places.MODEL)
    except Exception as error:
        raise CheckpointError(f"no checkpoint of this model can be written to {tried.parent}: {error}") from error
    finally:
        shutil.rmtree(tried, ignore_errors=True)


def check_kind(checkpoint: Checkpoint, adapted: bool) -> None:
    """Raise `ConfigError` if only one of checkpoint and run has an adapter."""
    has = checkpoint.adapter_path.is_dir()
    if has != adapted:
        was = "was made with an adapter" if has else "was made without an adapter"
        now = "lora.r = 0" if has else "lora.r is above 0"
        raise ConfigError(
            f"{checkpoint.path} {was}, and {now}: continue with the [lora] that it was made with, or begin a new run "
            f"from its merged model with --run.name and --model.path {checkpoint.model_path}"
        )


def prune(run_dir: Path, keep: int, spared: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` checkpoints and those of the steps `spared`."""
    found = places.complete(run_dir)
    for step in list(found)[:-keep]:
        if step not in spared:
            _discard(found[step])


def set_aside(run_dir: Path, step: int) -> None:
    """Move checkpoints of later steps than `step` out of the way, as a session begins after `step`: it would take them
    for newer than its own. Raises `CheckpointError`."""
    for of, path in places.named(run_dir).items():
        if of > step:
            target = places.unused(path)
            shutil.rmtree(target, ignore_errors=True)
            try:
                path.rename(target)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be moved to {target.name}: {error}; move it away") from error


def restore(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Restore optimiser, schedule and random states; the weights were loaded with the policy.

    The settings of optimiser and schedule are those of the run file. Raises `ConfigError` where the file cannot be
    read.
    """
    path = checkpoint.path / "trainer.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the type depends on what is missing or broken
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path} is damaged and cannot be read ({type(error).__name__}: {first}): move {checkpoint.path} away, and "
            f"continue from the checkpoint before it with --resume"
        ) from error
    trainer.restore(saved, checkpoint.path / PARTS)
    _set_random_state(saved["random"])


def _discard(path: Path) -> None:
    """Delete a checkpoint in one rename: half of one must not be taken for a complete one."""
    aside = path.with_name(f"{_DISCARDED}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sweep(home: Path) -> None:
    """Remove the remains of a checkpoint whose writing was killed."""
    for prefix in (_UNFINISHED, _DISCARDED):
        for left in home.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def _random_state() -> dict[str, Any]:
    """Return random states in types that `torch.load(weights_only=True)` accepts."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {"key": key, "pos": int(numpy_state["state"]["pos"])}},
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": key, "pos": state["numpy"]["state"]["pos"]}})


def _flush(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
