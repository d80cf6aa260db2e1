"""Chooses the checkpoint that a run resumes from, and checks that the adapter of the run file fits it.

It is the newest that can be read and that is of the time line which survives. A learner that was taken to be dead may
wake up after another has begun, and a disk may damage a file. Such a checkpoint is named and passed over for the one
before. If none is left the run does not start: beginning again at the first step is for a person to decide.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.model import loading
from slipstream.learner.model.adapter import WEIGHTS, Adapter, check_installed
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import ConfigError, ModelSection, RunConfig
from slipstream.protocol.messages import RunPosition, SessionStart

logger = logging.getLogger(__name__)


def choose(
    run_dir: Path, position: RunPosition | None = None, say: Callable[[str], None] = lambda text: None
) -> Checkpoint | None:
    """Choose the checkpoint to resume from; None where there is none.

    Args:
        position: The queue's; None where it was not asked.
        say: Shows a line for each that is passed over.

    Raises:
        ConfigError: There are checkpoints, and none can be used.
    """
    passed: list[tuple[Path, str]] = []
    for step, path in reversed(places.named(run_dir).items()):
        why = damage(path)
        if why is None:
            found = checkpoints.of_step(run_dir, step)
            why = None if position is None else astray(found.info, position)
            if why is None:
                for other, reason in passed:
                    say(f"{other} is not taken: {reason}; it is moved to {places.unused(other).name}")
                return found
        passed.append((path, why))
    if passed:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in passed)
        raise ConfigError(
            f"{places.folder(run_dir)} holds no checkpoint that the run can continue from: {reasons}. Put a whole one "
            f"there, or move these away, and start with --resume: where there is none it begins at step 0 again. If "
            f"the queue's store is another run's, stop the queue and move its store out of {run_dir}"
        )
    return None


def damage(path: Path) -> str | None:
    """Name the part of a checkpoint that cannot be read; None if all of it can. Reads only the beginnings and ends of
    its files, which is enough to find one that is cut short or missing."""
    for name, check in (
        (places.STATE, _check_state),
        ("trainer.pt", _check_trainer),
        (places.MODEL, _check_model),
        (places.ADAPTER, _check_adapter),
    ):
        try:
            check(path / name)
        except Exception as error:  # the type depends on the library that reads the file
            first = str(error).strip().partition("\n")[0]
            return f"it is damaged, {name} cannot be read ({type(error).__name__}: {first})"
    return None


def astray(info: CheckpointInfo, position: RunPosition) -> str | None:
    """Say why the queue's history does not contain a checkpoint; None if it does, or if the queue has no history."""
    if position.session == 0:  # the queue has lost its store
        return None
    cause = "a learner wrote it that another had taken the place of, or it is another run's"
    if info.step > position.step:
        return f"the queue knows steps up to {position.step} only: {cause}"
    made = versions_of(info.step, position.sessions)
    if made is None or info.version in made:
        return None
    return (
        f"it has version {info.version}, and step {info.step} of the run that continues made version {made[0]}: {cause}"
    )


def versions_of(step: int, sessions: Sequence[SessionStart]) -> list[int] | None:
    """Return the versions that the weights after `step` may have: the one that the step made, and those of sessions
    that resumed from there. None where the session of that step is unknown."""
    before = [start for start in sessions if start.step < step]
    if not before:
        return None
    return [before[-1].version + step - before[-1].step, *(of.version for of in sessions if of.step == step)]


def _check_state(path: Path) -> None:
    checkpoints.read_info(path)


def _check_trainer(path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    _check_weights({path.with_name(checkpoints.PARTS) / name for name in state.get("parts", [])})


def _check_model(path: Path) -> None:
    json.loads((path / "config.json").read_bytes())
    whole, index = path / SAFE_WEIGHTS_NAME, path / SAFE_WEIGHTS_INDEX_NAME
    names = [] if whole.exists() else json.loads(index.read_bytes())["weight_map"].values()
    _check_weights({path / name for name in names} or {whole})


def _check_adapter(path: Path) -> None:
    if path.is_dir():
        json.loads((path / "adapter_config.json").read_bytes())
        _check_weights({path / WEIGHTS})


def _check_weights(files: set[Path]) -> None:
    for file in sorted(files):
        with safe_open(file, framework="pt"):  # its header says how long the file is
            pass


def check_adapter(config: RunConfig, resume: bool) -> None:
    """Check the adapter before any weight is loaded, on the model's structure alone.

    Raises:
        ConfigError: The model cannot have it, or, to `resume`, the run's newest checkpoint was made with another.
    """
    checkpoint = checkpoints.latest(config.run_dir) if resume else None
    if checkpoint is not None:
        checkpoints.check_kind(checkpoint, config.lora.r > 0)
    if not config.lora.r:
        return
    check_installed(config.lora)
    try:
        with warnings.catch_warnings(action="ignore"):  # the learner shows them when it makes the adapter
            adapter = Adapter(_structure(config.model, config.images.enabled), config.lora, config.model, torch.float32)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        # A model with its own code may need weights here.
        logger.warning(
            "lora: the model's structure cannot be made without its weights (%s: %s): whether the adapter fits is seen "
            "when the learner has loaded them",
            *(type(error).__name__, str(error).strip().partition("\n")[0]),
        )
        return
    if checkpoint is not None:
        adapter.check_same(checkpoint.adapter_path)


def _structure(model: ModelSection, images: bool) -> Any:
    """Make the network without weights, on the meta device. Any attention will do: none is computed."""
    hub = {"trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(model.path, revision=model.revision or "main", **hub)
    with torch.device("meta"):
        return loading.kind_of(config, images).from_config(config, attn_implementation="eager", **hub)
