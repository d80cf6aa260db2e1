"""What is known of an adapter before any weight is loaded: whether it fits the model, and the checkpoint to go on from.

It is made for the model's structure alone, on the meta device.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from transformers import AutoConfig

from learner.checkpoints import checkpoint as checkpoints
from learner.model import loading
from learner.model.adapter import Adapter, check_installed
from protocol.config import ConfigError, ModelSection, RunConfig

logger = logging.getLogger(__name__)


def check(config: RunConfig, resume: bool) -> None:
    """Raises `ConfigError` for an adapter that the model cannot have, and, to `resume`, for one that the run's newest
    checkpoint was not made with."""
    checkpoint = checkpoints.latest(config.run_dir) if resume else None
    if checkpoint is not None:
        checkpoints.check_kind(checkpoint, config.lora.r > 0)
    if not config.lora.r:
        return
    check_installed(config.lora)
    try:
        with warnings.catch_warnings(action="ignore"):  # the learner's own making says them
            adapter = Adapter(_structure(config.model), config.lora, config.model, torch.float32)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        # Code of a model's own may want weights to work on.
        logger.warning(
            "lora: the model's structure cannot be made without its weights (%s: %s): whether the adapter fits is seen "
            "when the learner has loaded them",
            *(type(error).__name__, str(error).strip().partition("\n")[0]),
        )
        return
    if checkpoint is not None:
        adapter.check_same(checkpoint.adapter_path)


def _structure(model: ModelSection) -> Any:
    """The network without weights."""
    hub = {"trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(model.path, revision=model.revision or "main", **hub)
    with torch.device("meta"):
        return loading.kind_of(config).from_config(config, attn_implementation=model.attention, **hub)
