"""Checks that a model can have a shadow, and that weights are this model's, before and after they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from slipstream.weight_sync.transports.receiver import Weights
from slipstream.weight_sync.vllm.engine.fingerprints import odd_numbers, words_of
from slipstream.weight_sync.vllm.engine.shadow_modules import Pair
from slipstream.weight_sync.weights.parts import Part

SHADOWED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}


class NoShadow(Exception):
    """No shadow can be built of this model; the text says why."""


def check_types(model: Any, dtype: torch.dtype, weights: Weights) -> None:
    """Check the types of tensors. Loaders cast silently, but a tensor of another type was not meant for this model."""
    known = {dtype, *(tensor.dtype for tensor in model.parameters()), *(tensor.dtype for tensor in model.buffers())}
    for name, tensor in weights.items():
        if tensor.dtype not in known:
            raise ValueError(
                f"{name} came as {tensor.dtype}, and this server's model is {dtype}: "
                f"set model.dtype to one type for both"
            )


def check_width(model: Any, of: str, weights: Weights) -> None:
    """Check rows and width of the token table before anything is loaded, as they tell models apart.

    vLLM's loaders only assert shapes, without a text.

    Args:
        of: Name of the model that the server was started with.
    """
    for name, module in model.named_modules():
        sent = weights.get(f"{name}.weight")
        if sent is None or not isinstance(module, VocabParallelEmbedding) or sent.ndim != 2:
            continue
        wanted = (module.org_vocab_size, module.embedding_dim)
        if tuple(sent.shape) != wanted:
            raise ValueError(
                f"{name}.weight came as {list(sent.shape)}, and this server's model has {list(wanted)}: "
                f"{another_model(of)}"
            )


def is_of_tower(model: Any, name: str) -> bool:
    """Tell whether a module is of the parts that see or hear. A learner that leaves these frozen sends nothing of
    them, and they stay as they are."""
    language = getattr(model, "_language_model_names", [])
    return bool(language and name) and not any(f"{name}.".startswith(f"{each}.") for each in language)


def another_model(of: str) -> str:
    return (
        f"this server runs {of}, and the learner trains another model: start both with the same model.path and revision"
    )


def check_can_be_shadowed(model: Any) -> None:
    """Raise `NoShadow` if a layer keeps weights that a shadow could not exchange."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method).__name__ not in SHADOWED:
            raise NoShadow(f"{name} is quantised ({type(method).__name__})")
        if is_deferred_attention_layer(module) and module._parameters:
            raise NoShadow(f"{name} ({type(module).__name__}) makes its own weights when it is loaded")
        if getattr(module, "w13_bias", None) is not None:
            raise NoShadow(f"{name} has experts with a bias, which their kernel holds")


class RowSums:
    """Checks that embedding and output head hold the rows that arrived.

    A probe sees only the rows of its own tokens, while all other weights act on every token. A loader that changes all
    rows does so on purpose. What has arrived is gone when the shadow is built, so a sum of each row is kept.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        self._held = {f"{pair.name}.weight": pair for pair in pairs if isinstance(pair.live, VocabParallelEmbedding)}
        self._sent: dict[str, tuple[torch.Size, torch.Tensor]] = {}

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that is about to be loaded."""
        if name not in self._held or tensor.ndim != 2:
            return
        if not isinstance(tensor, Part):
            self._sent[name] = tensor.shape, row_sums(tensor)
            return
        if name not in self._sent:
            sums = torch.zeros(len(tensor), dtype=torch.int64, device=tensor.held.device)
            self._sent[name] = tensor.shape, sums
        self._sent[name][1][tensor.first : tensor.first + len(tensor.held)] = row_sums(tensor.held)

    def check_held(self) -> None:
        """Compare what the shadows hold. Raises ValueError if some rows differ."""
        for name, (shape, sums) in self._sent.items():
            pair = self._held[name]
            weight = getattr(pair.shadow, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
                continue
            if shape[1:] != weight.shape[1:] or shape[0] > len(weight):
                continue
            wrong = (row_sums(weight.detach()[: shape[0]]) != sums.to(weight.device)).nonzero().flatten().tolist()
            if 0 < len(wrong) < shape[0] / 2:
                raise ValueError(
                    f"{pair.name}: {len(wrong)} rows are not those that arrived, among them row {wrong[0]}"
                )


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the elements' bits of each row of [rows, columns], each times an odd number from its column, modulo 2**64.

    Returns:
        int64 [rows].
    """
    bits, weights = words_of(tensor), odd_numbers(0, tensor.shape[1], tensor.device)
    starts = range(0, len(bits), _ROWS)
    sums = [(bits[start : start + _ROWS].to(torch.int64) * weights).sum(dim=1) for start in starts]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=tensor.device), *sums])


# Rows that are summed at once.
_ROWS = 512
