"""The policy before the last optimiser step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


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
            self._copies = [torch.empty_like(parameter.detach()) for parameter in self._parameters]
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.copy_(parameter.detach())

    @property
    def known(self) -> bool:
        return bool(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the previous weights, and then its own again: pointers change hands, nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.data, self._copies[index] = self._copies[index], parameter.data
