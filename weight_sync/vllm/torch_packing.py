"""Linear layers on a CPU, packed by torch in place of vLLM's oneDNN handles.

vLLM's `onednn_mm` is not thread-safe, and nothing reads its handles back. What torch packs may be made on any thread,
computes the same, and `to_dense` gives it back bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

LOOKUP_ONLY = "_slipstream_lookup_only"


class PackingError(Exception):
    """A linear layer's weight could not be packed for this CPU, though it arrived as it should."""


def can_pack(dtype: torch.dtype) -> bool:
    """Asks torch whether it packs weights of this type on this CPU.

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
        """W, bit for bit."""
        weight: torch.Tensor = self.packed.to_dense()
        return weight


def install() -> None:
    """Has torch pack every layer that vLLM would pack by oneDNN. May be called again.

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
    """Whether vLLM packs it for its AMX kernels or zentorch, which no thread harms."""
    rows, columns = weight.shape
    zen = utils.current_platform.is_zen_cpu() and hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return bool(zen or utils.check_cpu_sgl_kernel(rows, columns, weight.dtype))
