"""The types in which the learner keeps its weights, computes, and publishes.

Weights that a step moves are kept in float32 and computed with in `model.dtype` (mixed precision, arXiv:1710.03740,
section 3.1): a step of 1e-6 is far below what bfloat16 can add to most weights, and rounding would lose it. The base of
an adapter may take 4 or 8 bits a weight, by bitsandbytes on a GPU (arXiv:2305.14314, arXiv:2208.07339).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import torch

from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection

# Weights of each tensor that `changed_share` looks at.
LOOKED_AT = 10_000


@dataclass(frozen=True)
class Precision:
    """Types of a run's weights.

    Attributes:
        weights: Type that the optimiser steps on.
        compute: Type of matrix products.
        servers: Type that is published.
    """

    weights: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    servers: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: ModelSection, learner: LearnerSection) -> Self:
        """Read the types from the run file. float16 is for servers only: its gradients would underflow without a loss
        scaler, so the learner computes in float32."""
        servers: torch.dtype = getattr(torch, model.dtype)
        compute = torch.float32 if servers is torch.float16 else servers
        return cls(compute if learner.weights_dtype == "model" else torch.float32, compute, servers)

    @property
    def mixed(self) -> bool:
        """Whether layers compute in another type than that of the weights."""
        return self.weights is not self.compute

    @property
    def of_layers(self) -> torch.dtype | None:
        """Type in which ranks that hold parts gather a layer; None for that of its weights."""
        return self.compute if self.mixed else None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which products are computed in `compute`."""
        if not self.mixed:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


def changed_share(weights: Iterable[tuple[str, torch.Tensor]], learning_rate: float) -> float:
    """Measure the share of weights that a step of the size of the learning rate changes at all, in their own type.

    AdamW's steps are about that long. It is added to the first `LOOKED_AT` weights of each tensor.
    """
    changed = total = 0.0
    for _, tensor in weights:
        few = tensor.flatten()[:LOOKED_AT]
        share = float((few + learning_rate != few).float().mean())
        changed, total = changed + share * tensor.numel(), total + tensor.numel()
    return changed / total


def find_rounding_warning(
    precision: Precision, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], learning_rate: float
) -> str | None:
    """Warn of the steps that weights in a low precision lose; None in float32, for which `weights` is not called."""
    if precision.weights is torch.float32:
        return None
    name = str(precision.weights).removeprefix("torch.")
    share = changed_share(weights(), learning_rate)
    return (
        f"learner.weights_dtype = model steps on weights in {name}: at learner.learning_rate = {learning_rate:g} a "
        f"step changes {share:.2%} of them, and rounding loses the rest; leave learner.weights_dtype at float32, which "
        f"takes 8 bytes more for each weight"
    )


# bitsandbytes' names of its layers.
_LAYERS = ("Linear4bit", "Linear8bitLt")


def check_quantisation(model: ModelSection) -> None:
    """Raise `ConfigError` where a model that is to be quantised cannot be."""
    if not (bits := model.quantised_bits):
        return
    setting = f"model.load_in_{bits}bit = true"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting} needs a GPU, and torch finds none here: leave it out; an adapter trains next to a base in "
            f"model.dtype, too"
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{setting} needs bitsandbytes, which is not installed: pip install bitsandbytes")


def quantisation_arguments(model: ModelSection, compute: torch.dtype) -> dict[str, Any]:
    """Return further arguments of `from_pretrained`; none where the model is not to be quantised.

    The output layer is not quantised: the learner computes log-probs from its weight.

    Args:
        compute: Type of products.
    """
    if not (bits := model.quantised_bits):
        return {}
    from transformers import BitsAndBytesConfig

    more = {
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_type": model.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": model.bnb_4bit_use_double_quant,
    }
    how = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **(more if bits == 4 else {}))
    return {"quantization_config": how, "device_map": {"": torch.cuda.current_device()}}


def is_quantised(layer: Any) -> bool:
    """Say whether bitsandbytes has quantised the layer."""
    return type(layer).__name__ in _LAYERS


def dequantised_weight(layer: Any) -> torch.Tensor:
    """Return the layer's matrix as it computes with it, [out, in]."""
    from peft.utils.integrations import dequantize_module_weight

    tensor: torch.Tensor = dequantize_module_weight(layer)
    return tensor.detach()
