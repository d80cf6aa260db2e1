"""How the model's layers are run: computed again in the backward, or compiled. Neither changes what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.attention import packed
from protocol.config import ConfigError


def compile_layers(model: torch.nn.Module) -> None:
    """Run each layer as compiled code, attention excepted, for rows of any length.

    The code is made when a layer first runs. Raises `ConfigError` if the model has no layers of transformers' kind.
    """
    # The layout of a row is Python, and another for each row.
    AttentionInterface.register(packed.PACKED_ATTENTION, torch.compiler.disable(packed.varlen_sdpa))  # type: ignore[no-untyped-call]
    for layer in _layers(model, "compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Keep only the input of each layer for the backward, which computes the layer again (arXiv:1604.06174).

    Not by transformers' own switch: it asks for `training`, and would bring dropout with it. Raises `ConfigError` if
    the model has no layers of transformers' kind.
    """
    for layer in _layers(model, "gradient_checkpointing"):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # There is no dropout, and so no random state to keep.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def _layers(model: torch.nn.Module, setting: str) -> Iterator[torch.nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.{setting} = true: {type(model).__name__} has no layers that are built on transformers' "
            f"GradientCheckpointingLayer; set learner.{setting} = false, or choose another model"
        )
    yield from layers
