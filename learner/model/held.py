"""What a network's layers hold under the names of its checkpoint, where that is more or less than a tensor: a matrix
with an adapter beside it, a matrix in 4 or 8 bits, a copy that trains.

Matrices are made whole one at a time, when somebody wants them: there is no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from learner.model import quantised

# The only adapter that a network has, under peft's own name.
ADAPTER = "default"


@dataclass(frozen=True)
class Held:
    """`tensors` by name: the network's own, detached, or a stand-in of the right shape and type that takes no memory.
    `made`: what makes a stand-in's tensor, by the address of its storage."""

    tensors: Mapping[str, torch.Tensor]
    made: Mapping[int, Callable[[], torch.Tensor]]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that `tensor`, of `tensors`, stands for."""
        make = self.made.get(address(tensor))
        return tensor if make is None else make()


def held(network: Any, names: Iterable[str], dtype: torch.dtype) -> Held:
    """`names`: as they were before there was an adapter; dtype: of matrices that are made."""
    tensors, made = {}, {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = _module(network, path)
        base = _base(module)
        own: torch.Tensor = getattr(base, leaf).detach()
        if leaf == "weight" and (base is not module or quantised.is_quantised(base)):
            shape = (base.out_features, base.in_features) if quantised.is_quantised(base) else own.shape
            own = torch.empty(1, dtype=dtype, device=own.device).expand(shape)
            made[address(own)] = _maker(module, base, dtype)
        tensors[name] = own
    return Held(tensors, made)


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """A layer's matrix with its adapter in it, float32 [out, in]: W + s B A (arXiv:2106.09685, section 4.1), or, with
    DoRA, each row of that at its own length m (arXiv:2402.09353, eq. 5). weight: [out, in], the layer's own."""
    whole: torch.Tensor = weight.float() + layer.get_delta_weight(ADAPTER).float()
    if ADAPTER in layer.lora_magnitude_vector:
        length = layer.lora_magnitude_vector[ADAPTER].weight.float()
        whole *= (length / torch.linalg.norm(whole, dim=1))[:, None]
    return whole


def _maker(module: Any, base: Any, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        weight = quantised.whole(base) if quantised.is_quantised(base) else base.weight.detach()
        return (weight if module is base else merged(module, weight)).to(dtype)

    return make


def _module(network: Any, path: str) -> Any:
    """The module that trains at that path: a module of `modules_to_save` is another than the one that it stands for."""
    module = network
    for part in path.split(".") if path else ():
        module = _training(getattr(_base(module), part))
    return module


def _training(module: Any) -> Any:
    copies = getattr(module, "modules_to_save", None)
    return module if copies is None else copies[ADAPTER]


def _base(module: Any) -> Any:
    """The layer below an adapter's."""
    return module.base_layer if hasattr(module, "lora_A") else module
