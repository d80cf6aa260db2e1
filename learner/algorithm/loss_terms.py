"""The auxiliary loss that keeps a mixture's experts evenly used, exact for a whole step.

E * sum over experts e of f_e * P_e, where f_e is how many of a token's k choices go to e and P_e the probability that
the router gives e, both means over tokens and layers (Switch Transformer, arXiv:2101.03961, eq. 4-6, with k choices and
over all layers, as in transformers' `load_balancing_loss_func`). A product of means is no sum over rows. But f_e has no
gradient: once it is known for the whole step, the rest is a sum over tokens, and packing cannot change it.

Choose it for long runs of a mixture, whose routers drift; its model's own config names the coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class Routing:
    """How a row's tokens were routed, summed over tokens and layers; a token that sequences share counts for each.

    chosen: float32 [E], how often each expert was; probabilities: float32 [E], differentiable; tokens: float32 scalar,
    tokens x layers.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, logits: Sequence[torch.Tensor], top_k: int, copies: torch.Tensor) -> Self:
        """logits: of each layer's router, [T, E]; copies: [T], how many sequences have each token."""
        counts = copies.float()
        experts = logits[0].shape[-1]
        chosen = torch.zeros(experts, device=counts.device)
        sums = torch.zeros_like(chosen)
        for layer in logits:
            probabilities = layer.float().softmax(-1)
            best = probabilities.detach().topk(top_k, dim=-1).indices
            chosen = chosen.index_add(0, best.flatten(), counts.repeat_interleave(top_k))
            sums = sums + counts @ probabilities
        return cls(chosen, sums, counts.sum() * len(logits))


class RouterLoss:
    """The loss of a step, row by row. `rows`: the routing of all of its rows, without a gradient; of this rank's rows
    where `add_up` gives the sum over the ranks."""

    def __init__(
        self,
        coefficient: float,
        rows: Sequence[Routing],
        add_up: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._coefficient = coefficient
        tokens = add_up(torch.stack([row.tokens for row in rows]).sum())
        chosen = add_up(torch.stack([row.chosen.detach() for row in rows]).sum(0))
        # The loss is linear in the probabilities with this slope, [E].
        self._slope = len(rows[0].chosen) * chosen / tokens**2

    def share(self, row: Routing) -> torch.Tensor:
        """A row's part in the loss, before the coefficient: a scalar; the parts of all rows add up to the loss."""
        return (self._slope * row.probabilities).sum()

    def __call__(self, row: Routing) -> torch.Tensor:
        return self._coefficient * self.share(row)
