"""A base whose matrices take 4 or 8 bits a weight, by bitsandbytes (arXiv:2305.14314, arXiv:2208.07339). GPUs only."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from protocol.config import ConfigError, ModelSection

# What bitsandbytes calls its layers.
_LAYERS = ("Linear4bit", "Linear8bitLt")


def check(model: ModelSection) -> None:
    """Raise `ConfigError` where a model that is to be quantised cannot be."""
    if not (bits := model.quantised_bits):
        return
    setting = f"model.load_in_{bits}bit = true"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting} needs a GPU, and torch finds none here: leave it out; an adapter trains beside a base in "
            f"model.dtype, too"
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{setting} needs bitsandbytes, which is not installed: pip install bitsandbytes")


def arguments(model: ModelSection, compute: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is given more; nothing where the model is not to be quantised. compute: type of products.

    The output layer is left as it is: the learner computes log-probs from its weight.
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
    return type(layer).__name__ in _LAYERS


def whole(layer: Any) -> torch.Tensor:
    """The layer's matrix as it computes with it, [out, in]."""
    from peft.utils.integrations import dequantize_module_weight

    tensor: torch.Tensor = dequantize_module_weight(layer)
    return tensor.detach()
