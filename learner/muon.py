"""Muon for the matrices of the layers, AdamW for the rest, as one optimiser (kellerjordan.github.io/posts/muon).

Choose it for training all weights: Muon makes a step of a matrix as long in every direction. torch's `adjust_lr_fn =
"match_rms_adamw"` (arXiv:2502.16982, section 2.2) is the default here, so that one learning rate suits both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """`groups`: with a weight decay each. Embeddings and the output layer of `model`, vectors, and tensors of more than
    two dimensions (fused experts) are AdamW's."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        model: torch.nn.Module,
        lr: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        eps: float = 1e-8,
    ) -> None:
        """momentum, nesterov, ns_steps, adjust_lr_fn: Muon's; betas, eps: AdamW's. Raises `ValueError`."""
        apart = _words_of(model)
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            for split, wanted in ((matrices, True), (others, False)):
                params = [p for p in group["params"] if (p.ndim == 2 and id(p) not in apart) is wanted]
                if params:
                    split.append({**group, "params": params})
        if not matrices:
            raise ValueError("no matrix of a layer trains; choose learner.optim = adamw_torch_fused")
        self._parts: list[Optimizer] = [
            Muon(
                matrices,
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )
        ]
        if others:
            self._parts.append(AdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("MuonWithAdamW.step() takes no closure")
        rest = iter(self.param_groups)
        for part in self._parts:
            # Whoever loads a state makes groups and state anew.
            part.param_groups = [next(rest) for _ in part.param_groups]
            part.state = self.state
            part.step()


def _words_of(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters of embeddings and output layer."""
    network: Any = getattr(model, "model", model)
    layers = (network.get_input_embeddings(), network.get_output_embeddings())
    return {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
