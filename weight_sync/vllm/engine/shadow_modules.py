"""Copies a model's tree of modules, sharing all but what a load of weights replaces; packs linear layers on a CPU.

Packing is torch's in place of vLLM's oneDNN handles: `onednn_mm` is not thread-safe and its handles cannot be read
back. torch's may be made on any thread, compute the same, and `to_dense` gives them back bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

CONTAINERS = ("_parameters", "_buffers", "_modules")
LOOKUP_ONLY = "_slipstream_lookup_only"


@dataclass
class Pair:
    """A live module and its shadow, by the module's name in the model."""

    name: str
    live: Any
    shadow: Any

    @property
    def info(self) -> Any:
        """vLLM's record of the tensors loaded into the shadow."""
        return get_layerwise_info(self.shadow)


def pair_modules(model: Any) -> list[Pair]:
    """Make a shadow of every module of `model`. Returns the pairs, the model's own first."""
    pairs: dict[int, Pair] = {}
    _copy_tree(model, "", pairs)
    for pair in pairs.values():
        _own_what_vllm_would_share(pair)
    return list(pairs.values())


def let_go(pairs: list[Pair]) -> None:
    """Free what the shadows hold, packed weights included.

    A shadow is part of cycles, as vLLM's record of it refers to it: Python frees those at its next full collection,
    many publications later.
    """
    for pair in pairs:
        LAYERWISE_INFO.pop(pair.shadow, None)
        pair.shadow.__dict__.clear()


def bind_to_live(tensor: torch.Tensor, pair: Pair) -> None:
    """Bind a tensor's loaders to the live module, whose tensor it is about to become."""
    sanitize_layer_refs(tensor, pair.shadow)
    restore_layer_refs(tensor, pair.live)


def _copy_tree(live: Any, name: str, pairs: dict[int, Pair]) -> Any:
    if id(live) in pairs:
        return pairs[id(live)].shadow
    copy = object.__new__(type(live))
    copy.__dict__.update(live.__dict__)
    for container in CONTAINERS:
        copy.__dict__[container] = dict(getattr(live, container))
    copy.__dict__["_non_persistent_buffers_set"] = set(live._non_persistent_buffers_set)
    pairs[id(live)] = Pair(name, live, copy)
    for child, module in live._modules.items():
        if module is not None:
            copy._modules[child] = _copy_tree(module, f"{name}.{child}".lstrip("."), pairs)
    return copy


def _own_what_vllm_would_share(pair: Pair) -> None:
    """Give the shadow its own record, and copies of the tensors that vLLM's reload writes where they are."""
    live_info = get_layerwise_info(pair.live)
    params, buffers = live_info.restore_metadata
    fresh = (
        {name: _fresh(tensor, pair.live) for name, tensor in params.items()},
        {name: _fresh(tensor, pair.live) for name, tensor in buffers.items()},
    )
    LAYERWISE_INFO[pair.shadow] = LayerReloadingInfo(restore_metadata=fresh, restore_device=live_info.restore_device)
    for container in (pair.shadow._parameters, pair.shadow._buffers):
        for name, tensor in container.items():
            if name in SKIP_TENSORS and tensor is not None:
                container[name] = _copy(tensor, pair)


def _fresh(tensor: torch.Tensor, live: Any) -> torch.Tensor:
    """Return vLLM's record of the first load. The live module's own record may hold the loader of a reload, which
    would take the shadow's weights and load them nowhere."""
    fresh = to_meta_tensor(tensor)
    loader = getattr(fresh, "weight_loader", None)
    if loader is not None:
        while loader.__name__ == "online_process_loader":
            loader = loader.__wrapped__
        fresh.weight_loader = loader
    return sanitize_layer_refs(fresh, live)  # type: ignore[no-any-return]


def _copy(tensor: torch.Tensor, pair: Pair) -> torch.Tensor:
    copy = tensor.data.clone()
    copy.__class__ = tensor.__class__
    copy.__dict__ = tensor.__dict__.copy()
    return restore_layer_refs(sanitize_layer_refs(copy, pair.live), pair.shadow)  # type: ignore[no-any-return]


class PackingError(Exception):
    """A linear layer's weight could not be packed for this CPU, though it arrived as it should."""


def can_pack(dtype: torch.dtype) -> bool:
    """Ask torch whether it packs weights of this type on this CPU.

    bfloat16 needs AVX-512 or AVX-NE-CONVERT: with AVX2 alone oneDNN refuses to pack it, and torch multiplies without.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class TorchLinear:
    """`layer.cpu_linear`: x @ W^T + bias, W [out, in] packed once. Raises `PackingError`."""

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        try:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        except RuntimeError as error:
            raise PackingError(
                f"torch could not pack a weight {list(weight.shape)} of {weight.dtype} on this server's CPU ({error}): "
                f'give the server more memory if that was short; else set model.dtype = "float32"'
            ) from error

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product

    def dense(self) -> torch.Tensor:
        """Return W, bit for bit."""
        weight: torch.Tensor = self.packed.to_dense()
        return weight


def install_torch_packing() -> None:
    """Have torch pack every layer that vLLM would pack by oneDNN. May be called again.

    Where torch cannot pack a type, the layer keeps its weight and computes with the plain `linear`.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "by_slipstream", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or _has_a_kernel_of_its_own(utils, weight):
            original(layer, remove_weight)
            return
        if not can_pack(weight.dtype) or getattr(layer, LOOKUP_ONLY, False):
            layer.cpu_linear = torch.nn.functional.linear
            return
        layer.cpu_linear = TorchLinear(weight)
        if remove_weight:
            empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            layer.weight = torch.nn.Parameter(empty, requires_grad=False)

    dispatch.by_slipstream = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _has_a_kernel_of_its_own(utils: Any, weight: torch.Tensor) -> bool:
    """Return whether vLLM packs it for its AMX kernels or zentorch, which are thread-safe."""
    rows, columns = weight.shape
    zen = utils.current_platform.is_zen_cpu() and hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return bool(zen or utils.check_cpu_sgl_kernel(rows, columns, weight.dtype))
