"""The least work of an optimiser step: the model's matrix products alone, of the same shapes and in the same type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream.learner.feed.packing import PackedRow

# Words of the vocabulary that a product of the output layer takes at a time.
WORDS = 768


class Floor:
    """Multiplies as a step must: for each matrix the outputs, the gradient of its inputs, and its own.

    Attention, which has no weights, is left out. The output layer takes the tokens that are scored.
    """

    def __init__(self, model: Any, rows: Sequence[PackedRow], dtype: torch.dtype, device: torch.device) -> None:
        head = model.get_output_embeddings()
        layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
        shapes = [tuple(layer.weight.shape) for layer in layers]
        vocabulary, hidden = head.weight.shape
        self._products: list[Callable[[], None]] = []
        made: dict[tuple[int, int, int], Callable[[], None]] = {}
        for row in rows:
            of_row = [(row.tokens, *shape) for shape in shapes]
            of_row += [(len(row.targets), min(WORDS, vocabulary), hidden)] * -(-vocabulary // WORDS)
            for tokens, out, given in of_row:
                key = tokens, out, given
                if key not in made:
                    made[key] = _products(*key, dtype, device)
                self._products.append(made[key])

    def step(self) -> None:
        """Multiply all of it once."""
        for products in self._products:
            products()


def _products(tokens: int, out: int, given: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    inputs, weight, upstream = new(tokens, given), new(out, given), new(tokens, out)
    outputs, to_inputs, to_weight = new(tokens, out), new(tokens, given), new(out, given)

    def multiply() -> None:
        torch.mm(inputs, weight.T, out=outputs)
        torch.mm(upstream, weight, out=to_inputs)
        torch.mm(upstream.T, inputs, out=to_weight)

    return multiply
