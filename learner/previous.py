"""The policy before the last optimiser step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from learner.ranks import wrapping


class PreviousWeights:
    """A copy of the parameters that train, as they were before the last optimiser step; not of buffers.

    A learner that resumes has none before its first step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        """Take the weights as they are; called right before each optimiser step."""
        if not self._copies:
            self._copies = [torch.empty_like(wrapping.local(parameter.detach())) for parameter in self._parameters]
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.copy_(wrapping.local(parameter.detach()))

    @property
    def known(self) -> bool:
        return bool(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the previous weights, and then its own again: pointers change hands, nothing is copied
        unless ranks share the weights out."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if isinstance(parameter, DTensor):  # FSDP2 keeps a view of it
                held, copy = parameter.to_local(), self._copies[index]
                before = held.clone()
                held.copy_(copy)
                copy.copy_(before)
            else:
                parameter.data, self._copies[index] = self._copies[index], parameter.data
