"""What a transport must do: move one snapshot to one server's workers, beside their generation.

A link joins the learner to the workers of one server, so that a server that fails takes no other with it.
"""

from __future__ import annotations

from typing import Any, Protocol

from weight_sync.snapshot import Snapshot


class TransferError(RuntimeError):
    """Weights did not arrive whole. The server still has the ones before."""


class Link(Protocol):
    """The learner's end. Its calls block; the publisher makes them on a thread. All raise `TransferError`."""

    def init_info(self) -> dict[str, Any]:
        """Body of `/init_weight_transfer_engine`; the learner listens from here on."""

    def connect(self) -> None:
        """Meet the server's workers, while they handle `/init_weight_transfer_engine`."""

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        """Body of `/update_weights`, which returns at once: workers receive on a thread of their own."""

    def send(self, snapshot: Snapshot) -> None:
        """Send all of it; returns when every worker has it staged and its digest agrees."""

    def close(self) -> None:
        """Let go of the connection; never raises."""
