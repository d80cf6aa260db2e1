"""Checkpoints: complete or not there at all.

`run_dir/checkpoints/step-000050/` holds `model/` (a folder that `from_pretrained` and vLLM load), `trainer.pt`
(optimiser, schedule, random states, a reference that has moved) and `state.json` (step, version, settings). The queue
keeps the position in the data set.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from learner.trainer import Trainer
from protocol.config import ModelSection

TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization*",  # code of a tokenizer's own
    "*.model",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
)
GENERATION_FILES = ("generation_config.json",)
CHAT_TEMPLATE = "chat_template.jinja"


class CheckpointInfo(msgspec.Struct):
    """When it was written: `step` optimiser steps were done and had made policy version `version`. `settings`: those of
    the run by name, as text; None in checkpoints of earlier releases."""

    step: int
    version: int
    settings: dict[str, str] | None = None


@dataclass(frozen=True)
class Sources:
    """Where a server finds what is beside the weights: the tokenizer that the run uses, and the file, if any, that
    stands in for its chat template."""

    model: ModelSection
    chat_template: Path | None = None


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    info: CheckpointInfo

    @property
    def model_path(self) -> Path:
        return self.path / "model"


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint, if any."""
    found = _complete(run_dir)
    if not found:
        return None
    info = msgspec.json.decode((found[-1] / "state.json").read_bytes(), type=CheckpointInfo)
    return Checkpoint(found[-1], info)


def save(run_dir: Path, info: CheckpointInfo, trainer: Trainer, sources: Sources, keep: int) -> Checkpoint:
    """Write a checkpoint, durable when this returns, and delete all but the newest `keep`.

    It is written aside, flushed to disk and then renamed: a crash leaves no half-written one behind. Raises `OSError`.
    """
    final = folder(run_dir) / f"step-{info.step:06d}"
    unfinished = folder(run_dir) / f".unfinished-{final.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        trainer.save_model(unfinished / "model")
        _copy_sources(sources, unfinished / "model")
        torch.save({**trainer.state(), "random": _random_state()}, unfinished / "trainer.pt")
    except (SafetensorError, RuntimeError) as error:  # how these two tell of a full disk
        raise OSError(f"{unfinished} cannot be written: {error}") from error
    (unfinished / "state.json").write_bytes(msgspec.json.encode(info))
    _flush(unfinished)
    if final.exists():  # from a time line that a resume gave up
        shutil.rmtree(final)
    unfinished.rename(final)
    _flush_one(final.parent)
    for old in _complete(run_dir)[:-keep]:
        shutil.rmtree(old)
    return Checkpoint(final, info)


def restore(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Put optimiser, schedule and random states back; the weights were loaded with the policy.

    Learning rate, betas and weight decay stay as the run file has them.
    """
    saved = torch.load(checkpoint.path / "trainer.pt", map_location="cpu", weights_only=True)
    schedule = trainer.schedule
    done = saved["schedule"]["last_epoch"]
    rates = [rate * factor(done) for rate, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    saved["schedule"] |= {"base_lrs": schedule.base_lrs, "_last_lr": rates}
    ours = trainer.optimiser.param_groups
    for group, own, rate in zip(saved["optimiser"]["param_groups"], ours, rates, strict=True):
        group |= {name: value for name, value in own.items() if name != "params"} | {"lr": rate}
    trainer.restore(saved)
    _set_random_state(saved["random"])


def _complete(run_dir: Path) -> list[Path]:
    return sorted(
        path
        for path in folder(run_dir).glob("step-*")
        if re.fullmatch(r"step-\d+", path.name) and (path / "state.json").is_file()
    )


def _copy_sources(sources: Sources, target: Path) -> None:
    """Copy what a server needs beside the weights, so that the checkpoint can be served as it is."""
    model = sources.model
    if sources.chat_template is not None:
        shutil.copyfile(sources.chat_template, target / CHAT_TEMPLATE)
    _copy(model.tokenizer_path, model.tokenizer_revision, TOKENIZER_FILES, target)
    _copy(model.path, model.revision, GENERATION_FILES, target)


def _copy(source: str, revision: str | None, patterns: tuple[str, ...], target: Path) -> None:
    """Copy the files of a model folder or hub name; what is there already stays."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_file() and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _random_state() -> dict[str, Any]:
    """Random states in types that `torch.load(weights_only=True)` accepts."""
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
