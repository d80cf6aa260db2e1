"""Fingerprints the layers of a model: of the shadow before the swap, of the live model after it.

Log-probs show what a layer does to the tokens of a probe. They do not show a row that the probe does not touch, or one
value that is slightly off; fingerprints do. On a CPU, linear layers compute with packed copies: those that torch packed
are read as they lie in memory. oneDNN's handles cannot be read, so `layer_proof` looks at what such layers compute.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

# Elements of a tensor on an accelerator that are hashed at once. Each needs 8 bytes, in up to five temporary tensors.
CHUNK = 2**22
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed 64-bit number


@dataclass(frozen=True)
class Products:
    """The products of a layer's weight with the vectors of one update (`layer_proof.vectors`).

    Attributes:
        number: Number of the update.
        dtype: Type of the vectors.
        columns: Columns of the weight.
        expected: float32 [2 * HALF, rows], products that the layer must give.
        slack: float32 [2 * HALF, rows], how far it may be off.
    """

    number: int
    dtype: torch.dtype
    columns: int
    expected: torch.Tensor
    slack: torch.Tensor


@dataclass(frozen=True)
class ModelFingerprints:
    """Fingerprints of the weights that a model computes with.

    Attributes:
        prints: Fingerprint of each tensor, by name.
        unread: Names of packed weights that cannot be read.
        products: Expected products of layers whose weights cannot be read, by the layer's name.
        known: Names whose fingerprints must be those of the live tensors, as they once were; None: all. A loader may
            turn the others into different tensors; they become known once they are found.
    """

    prints: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    products: dict[str, Products] = field(default_factory=dict)
    known: set[str] | None = None


@dataclass(frozen=True)
class Difference:
    """The result of a comparison.

    Attributes:
        checked: Number of tensors that were compared.
        wrong: Names of those that differ or are missing.
        unread: Names of those that could not be compared.
    """

    checked: int
    wrong: list[str]
    unread: list[str]


def held(model: torch.nn.Module) -> ModelFingerprints:
    """Read every parameter, buffer and packed weight of `model`, on any thread. Tensors that modules share are read
    once."""
    found = ModelFingerprints()
    known: dict[tuple[Any, ...], str] = {}
    for name, tensor in _tensors(model):
        if tensor is None:
            found.unread.append(name)
        elif tensor.numel():
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if not tensor.is_mkldnn else (name,)
            if key not in known:
                known[key] = fingerprint(tensor)
            found.prints[name] = known[key]
    return found


def compare(proven: ModelFingerprints, live: ModelFingerprints) -> Difference:
    """Compare the live model with the fingerprints of the shadow.

    A tensor that `proven.known` does not have is `unread` if it differs, and known from now on if it does not.
    """
    # A missing one is wrong: in place of a packed weight it is a handle that cannot be read, which was not swapped in.
    differ = {name for name, print_ in proven.prints.items() if live.prints.get(name) != print_}
    wrong = differ if proven.known is None else differ & proven.known
    if proven.known is not None:
        proven.known.update(proven.prints.keys() - differ)
    unread = (set(live.unread) | differ) - wrong
    return Difference(len(proven.prints) - len(differ - wrong), sorted(wrong), sorted(unread))


def cannot_be_read(layer: Any) -> bool:
    """Return whether one of vLLM's linear layers holds its weight behind a handle, or quantised."""
    packed = getattr(layer, "cpu_linear", None)
    behind_a_handle = packed is not None and any(part is None for part in _parts(packed, layer))
    return behind_a_handle or not type(layer.quant_method).__name__.startswith("Unquantized")


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a fingerprint of shape, type and bits. It finds damage and mistakes, not forgeries."""
    if tensor.is_mkldnn:
        bits = _bits_packed(tensor)
    elif tensor.device.type == "cpu":
        bits = _bits(tensor.detach().contiguous())
    else:
        bits = _bits_on_device(tensor.detach().contiguous())
    return f"{tuple(tensor.shape)} {tensor.dtype} {bits}"


def _bits_packed(tensor: torch.Tensor) -> str:
    """Hash the bits in the order that torch packed them: unpacking would take four times as long."""
    size: int = torch.ops.mkldnn._nbytes(tensor)
    return xxhash.xxh3_128_hexdigest((ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(tensor)))


def _bits(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _bits_on_device(tensor: torch.Tensor) -> str:
    """Sum the words, each times an odd number from its position, modulo 2**64; nothing is copied to the host."""
    words = words_of(tensor.reshape(-1))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        total += (part * odd_numbers(start, len(part), tensor.device)).sum()
    return f"{int(total) % 2**64:016x}"


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements of a contiguous tensor as integers of their width."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def odd_numbers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each of `count` positions: int64, by which words are weighted in a sum."""
    places = torch.arange(first, first + count, device=device) * _GOLDEN
    return places ^ (places >> 29) | 1


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta:
                yield prefix + name, tensor
        packed = getattr(module, "cpu_linear", None)
        if packed is not None:
            yield from ((f"{prefix}packed{place}", part) for place, part in enumerate(_parts(packed, module)))


def _parts(packed: Any, module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Return the tensors that a packed layer's function computes with.

    None stands for a handle, even if the module keeps a weight next to it, as an output head does. A function that
    reads the module's own weight has none.
    """
    kept: list[Any] = []
    if isinstance(packed, functools.partial):
        kept = [*packed.args, *packed.keywords.values()]
    elif hasattr(packed, "__closure__"):
        kept = [cell.cell_contents for cell in packed.__closure__ or ()]
    elif hasattr(packed, "__dict__"):
        kept = [*vars(packed).values()]
    parts = [part for part in kept if isinstance(part, torch.Tensor)]
    weight = module._parameters.get("weight")
    if not parts and (kept or weight is None or not weight.numel()):
        return [None]
    return [*parts]
