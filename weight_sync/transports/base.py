"""What a transport must do: bring one snapshot onto one server, with its calls to that server in its own order.

A transport object joins the learner to the workers of one server, so that a server that fails takes no other with it.
Queue, server states and probe are no concern of a transport.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.weights.delta_base import DeltaPath
from weight_sync.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Sent:
    """What one publication to one server took: `sent_bytes`, where everything is `whole_bytes`; `share_changed`: values
    that differ from the version before, 0 to 1, where a delta was sent."""

    sent_bytes: int
    whole_bytes: int
    share_changed: float | None = None

    @classmethod
    def of(cls, snapshot: Snapshot, way: DeltaPath | None = None) -> Sent:
        """Everything, or by `way` alone."""
        whole = snapshot.manifest.total_bytes()
        return cls(whole, whole) if way is None else cls(way.total_bytes, whole, way.share)


class TransferError(RuntimeError):
    """Weights did not arrive whole."""


class Transport(Protocol):
    """The learner's end. Connected once; after an error or `close` a new one takes its place.

    `stages` says how it loads. True: weights arrive beside generation and only the exchange needs the pause; until
    then the server has its old weights whole, so it is resumed whatever happens. False: the model is overwritten
    under the pause; after an error half of it may be new, so the server stays paused until a publication succeeds.
    """

    stages: bool

    @property
    def sent(self) -> Sent | None:
        """What the newest publication took, None before the first."""

    async def connect(self, server: ServerControl, workers: int) -> None:
        """Meet the server's `workers`, after ending whatever transfer an earlier learner left open there.

        Raises `ControlError` or `TransferError`.
        """

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        """Load `snapshot` and label it `snapshot.label`, while generation stands still in `pause.held()`.

        Returns when every worker serves it. Raises `ControlError` or `TransferError`; when not connected, before
        anything is asked of the server.
        """

    async def close(self) -> None:
        """Let go of the connection; never raises, and may be called at any time and again."""
