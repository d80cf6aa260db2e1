"""Proves layers of a model during generation: by fingerprints where their weights can be read, else by products.

Linear layers that are packed behind a handle, or quantised, cannot be read. Each is multiplied by 8 one-hot vectors,
other columns at each update, and by 8 vectors of random signs, which involve every element of the weight. The products
must be those of the weight as it was loaded, before it was packed, up to rounding. After (columns / 8) updates every
element was read alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.weight_sync.vllm.engine.fingerprints import (
    Difference,
    ModelFingerprints,
    Products,
    cannot_be_read,
    compare,
    fingerprint,
    held,
)

logger = logging.getLogger(__name__)

HALF = 8

# Rows of a weight that are made float32 at once.
ROWS = 4096

# By bits of a quantised weight: the share of an element's own size, and of the largest element's, that rounding may
# change. These are estimates, with room for one scale a tensor and for the few bits of a float.
ROUNDED = {8: (1 / 6, 1 / 120), 4: (1 / 2, 1 / 5)}


class Reading(threading.Thread):
    """Finds a `difference` on a thread during generation. Nothing is written."""

    def __init__(self) -> None:
        super().__init__(name="layer-proof", daemon=True)
        self._found: Difference | None = None
        self._error: Exception | None = None

    def difference(self) -> Difference:
        """Compare the worker's weights with the proven ones."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self._found = self.difference()
        except Exception as error:
            self._error = error

    def result(self) -> dict[str, Any]:
        """Return the fields of `Difference`, after the thread's end. Raises RuntimeError if it failed."""
        if self._found is None:
            raise RuntimeError(f"the layers could not be read: {self._error!r}") from self._error
        return vars(self._found)


_streams: dict[torch.device, Any] = {}


@contextmanager
def beside_the_engine(device: torch.device, after: Any | None) -> Iterator[None]:
    """Put this thread's work onto its own stream, where it does not delay the engine's steps.

    The same stream each time: torch keeps a cache of memory for every one that was used.

    Args:
        device: The model's device.
        after: Event of the engine's stream to wait for; None on a CPU.
    """
    if after is None:
        yield
        return
    torch.cuda.set_device(device)  # a new thread has device 0, which is another worker's
    if device not in _streams:
        make: Any = torch.cuda.Stream
        _streams[device] = make(device)
    stream = _streams[device]
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


class ModelReading(Reading):
    """Compares the weights of `model` with `proven`, and adds `probed`: the engine thread's findings by products."""

    def __init__(self, model: torch.nn.Module, proven: ModelFingerprints, probed: Difference | None = None) -> None:
        super().__init__()
        self._model = model
        self._proven = proven
        self._probed = probed or Difference(0, [], [])
        self._device = device = next(model.parameters()).device
        # The weights are written once the engine's stream has done what it was given until now.
        self._written = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def difference(self) -> Difference:
        with beside_the_engine(self._device, self._written):
            found = compare(self._proven, held(self._model))
        probed = tuple(f"{name}.packed" for name in self._proven.products)
        unread = self._probed.unread + [name for name in found.unread if not name.startswith(probed)]
        return Difference(found.checked + self._probed.checked, found.wrong + self._probed.wrong, unread)


_updates = itertools.count()


@dataclass
class Watched:
    """Weights as they were loaded, before they were packed.

    Attributes:
        products: Products of those that cannot be read back, by the layer's name.
        prints: Fingerprints of the others by the weight's name, if they were wanted.
    """

    products: dict[str, Products] = field(default_factory=dict)
    prints: dict[str, str] = field(default_factory=dict)


def vectors(columns: int, number: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the vectors of update `number`, [2 * HALF, columns]: first the one-hot ones, then those of signs."""
    x = torch.zeros(2 * HALF, columns)
    x[torch.arange(HALF), _hot(columns, number)] = 1.0
    seeded = torch.Generator().manual_seed(number)
    x[HALF:] = torch.randint(0, 2, (HALF, columns), generator=seeded) * 2.0 - 1.0
    return x.to(device=device, dtype=dtype)


def of_weight(weight: torch.Tensor, number: int, bits: int | None = None) -> Products:
    """Compute the products of a layer that holds `weight` [rows, columns].

    Args:
        number: Number of the update.
        bits: Bits that a quantised layer keeps of each element; None: all.
    """
    columns, signs = weight.shape[1], vectors(weight.shape[1], number, torch.float32, weight.device)[HALF:]
    largest = float(weight.abs().max())
    parts = [
        _of_rows(rows.float(), _hot(columns, number), signs, weight.dtype, bits, largest)
        for rows in weight.detach().split(ROWS)  # type: ignore[no-untyped-call]
    ]
    expected, slack = (torch.cat(of, dim=1) for of in zip(*parts, strict=True))
    return Products(number, weight.dtype, columns, expected, slack)


@torch.inference_mode()
def probe_products(model: torch.nn.Module, proven: ModelFingerprints) -> Difference:
    """Compare the live layers' products with the `proven` ones, under the rule of `fingerprints.compare`.

    To be called on the engine's thread, as oneDNN's functions are not thread-safe.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    differ, unread = dict[str, str](), list[str]()
    for name, products in proven.products.items():
        try:
            why = _differs(modules[name], products)
        except Exception as error:  # a kernel may not take such vectors, which must not end generation
            logger.warning("%s cannot be multiplied, so log-probs alone prove it: %r", name, error)
            unread.append(name)
            continue
        if why is not None:
            differ[name] = why
    right = proven.products.keys() - differ.keys() - set(unread)
    wrong = (
        differ if proven.known is None else {name: why for name, why in differ.items() if _known(name) in proven.known}
    )
    if proven.known is not None:
        proven.known.update(_known(name) for name in right)
    unread += differ.keys() - wrong.keys()
    return Difference(len(right) + len(wrong), sorted(f"{name} ({why})" for name, why in wrong.items()), sorted(unread))


def _known(name: str) -> str:
    return f"{name}.products"


@contextmanager
def watching(layers: Iterable[tuple[str, Any, Any]], prints: bool = False) -> Iterator[Watched]:
    """Note the values of weights while they are loaded, before vLLM packs or quantises them.

    Args:
        layers: Name, live module, and the module that is loaded, which may be the same one.
        prints: Whether to take fingerprints too, of the weights that can be read back.
    """
    number = next(_updates)
    watched, undo = Watched(), list[Callable[[], None]]()
    names = {id(loaded): (name, live, cannot_be_read(live)) for name, live, loaded in layers if _is_linear(live)}
    methods = {id(live.quant_method): live.quant_method for _, live, unread in names.values() if unread or prints}

    def note(layer: Any) -> None:
        name, live, unread = names.get(id(layer), ("", None, False))
        weight = getattr(layer, "weight", None)
        if not name or not isinstance(weight, torch.Tensor) or weight.is_meta or weight.ndim != 2 or not weight.numel():
            return
        if unread and weight.is_floating_point() and weight.itemsize > 1:
            watched.products[name] = of_weight(weight, number, _bits(live))
        elif prints and not unread:
            watched.prints[f"{name}.weight"] = fingerprint(weight)

    for method in methods.values():
        undo.append(_noting(method, note))
    try:
        yield watched
    finally:
        for each in undo:
            each()


def _noting(method: Any, note: Callable[[Any], None]) -> Callable[[], None]:
    original = method.process_weights_after_loading

    def process(layer: Any, *args: Any, **named: Any) -> Any:
        with torch.no_grad():
            note(layer)
        return original(layer, *args, **named)

    method.process_weights_after_loading = process
    return lambda: method.__dict__.pop("process_weights_after_loading", None)


def _is_linear(module: Any) -> bool:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, LinearBase | ParallelLMHead) and getattr(module, "quant_method", None) is not None


def _bits(live: Any) -> int | None:
    """Return the bits that a live layer keeps of each element, None for all."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if type(live.quant_method).__name__.startswith("Unquantized"):
        return None
    # While a live layer is loaded in place, vLLM keeps what it held elsewhere.
    aside = get_layerwise_info(live).kernel_tensors
    parameters = aside[0] if aside is not None else live._parameters
    kept = {tensor.dtype for tensor in parameters.values() if tensor is not None and tensor.itemsize == 1}
    return 8 if kept and torch.uint8 not in kept else 4


def _hot(columns: int, number: int) -> torch.Tensor:
    return (torch.arange(HALF) + HALF * number) % columns


def _of_rows(
    rows: torch.Tensor, hot: torch.Tensor, signs: torch.Tensor, dtype: torch.dtype, bits: int | None, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expected and slack [2 * HALF, n] of float32 rows [n, columns]."""
    alone, together = rows[:, hot.to(rows.device)].T, signs @ rows.T
    norm, sizes = rows.norm(dim=1), rows.abs().sum(dim=1)
    eps, exact = _epsilon(dtype)
    slack_alone = torch.zeros_like(alone) if exact else eps * alone.abs()
    # The result is rounded, and parts of the sum may be; the sum itself is in float32.
    slack_together = eps * (together.abs() + norm / (4 if exact else 1)) + 2.0**-21 * sizes
    if bits is not None:
        own, others = ROUNDED[bits]
        slack_alone = own * alone.abs() + others * largest
        slack_together = slack_together + 3 * (own * norm + others * largest * math.sqrt(rows.shape[1]))
    return torch.cat([alone, together]), torch.cat([slack_alone, slack_together])


def _epsilon(dtype: torch.dtype) -> tuple[float, bool]:
    """Return the machine epsilon of a product's type, and whether a product with a one-hot vector is exact."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-7, False
    return torch.finfo(dtype).eps, True


def _differs(layer: Any, products: Products) -> str | None:
    device = products.expected.device
    given = layer.quant_method.apply(layer, vectors(products.columns, products.number, products.dtype, device), None)
    if given.shape != products.expected.shape:
        raise ValueError(f"its products are {tuple(given.shape)}, not {tuple(products.expected.shape)}")
    off = ~((given.float() - products.expected).abs() <= products.slack)
    rows = off.any(dim=0).nonzero().flatten().tolist()
    if not rows:
        return None
    return f"products of {len(rows)} rows, among them row {rows[0]}" if len(rows) > 1 else f"products of row {rows[0]}"
