"""What a transport must do: bring one snapshot onto one server, with its calls to that server in its own order.

A transport object joins the learner to the workers of one server, so that a server that fails takes no other with it.
Queue, server states and probe are no concern of a transport.

`weight_sync.transport = "auto"`: which transport it is.

Who starts a server chooses by its machine (`transports.choice`); the learner asks each server what it has and takes
the same, so that the two ends cannot differ.

The order that all staged transports share: everything beside generation, then one call that swaps.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from protocol.config import WeightSyncSection
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.registry import SEND_DELTAS, TRANSPORTS, of_backend
from weight_sync.weights.delta_base import DeltaPath
from weight_sync.weights.snapshot import Snapshot


def build_transport(section: WeightSyncSection) -> Transport:
    """The learner's end of the transport that `section` names, not connected yet."""
    if section.transport == "auto":
        from weight_sync.transports.base import AutoTransport

        return AutoTransport(section)
    module, _, name = TRANSPORTS[section.transport].learner.partition(":")
    transport: Transport = getattr(import_module(module), name)(section)
    return transport


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


logger = logging.getLogger(__name__)


class AutoTransport:
    """See `base.Transport`. Becomes, with `connect`, the one that the server was started with."""

    # As all that is chosen does, but for quantised servers, for which the run file has to say it.
    stages = True

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self._chosen: Transport | None = None

    @property
    def sent(self) -> Sent | None:
        return self._chosen.sent if self._chosen is not None else None

    async def connect(self, server: ServerControl, workers: int) -> None:
        found = (await server.state()).transport
        name = of_backend(found)
        if name is None:
            raise TransferError(
                f"{server.url}: its weight transfer is {found or 'off'}, which Slipstream does not know; start it with "
                f"slipstream vllm run.toml"
            )
        chosen = build_transport(self._section.model_copy(update={"transport": name}))
        if not chosen.stages:
            raise TransferError(
                f"{server.url} loads weights under the pause ({name}), which is not chosen by itself: set "
                f"weight_sync.transport = {name}"
            )
        if self._section.delta and name not in SEND_DELTAS:
            logger.warning(
                "%s: weight_sync.delta = true, and %s, which the server was started with, sends everything; start the "
                "servers with weight_sync.transport = http, or leave delta out",
                *(server.url, name),
            )
        logger.info("%s: weights travel by %s, which the server was started with", server.url, name)
        self._chosen = chosen
        await chosen.connect(server, workers)

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        if self._chosen is None:
            raise TransferError("the transport is not connected")
        await self._chosen.publish(server, snapshot, pause)

    async def close(self) -> None:
        if self._chosen is not None:
            await self._chosen.close()


class StagedTransport(ABC):
    """See `base.Transport`. A transport gives `connected`, `connect`, `send` and `close`."""

    stages = True

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self.sent: Sent | None = None

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def connect(self, server: ServerControl, workers: int) -> None: ...

    async def send(self, server: ServerControl, snapshot: Snapshot) -> None:
        """Bring the bytes to all workers, which have begun to receive. Raises `ControlError` or `TransferError`.

        For those that leave `bring` as it is.
        """
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None: ...

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        """What the engines are told before the bytes come."""
        return snapshot.manifest.as_dict()

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        if not self.connected:
            raise TransferError("the transport is not connected")
        await server.start_update()
        await self.bring(server, snapshot)
        await pause.until_due()
        swap = await server.swap(snapshot.label, pause.clear_cache)
        pause.seconds += swap.pause_s

    async def bring(self, server: ServerControl, snapshot: Snapshot) -> None:
        """Returns when every worker has the snapshot built beside its live model."""
        # The engine answers at once, and receives and builds on a thread of its own.
        await server.update(self.update_info(snapshot))
        await self.send(server, snapshot)
        await self._until_staged(server)
        self.sent = Sent.of(snapshot)

    async def _until_staged(self, server: ServerControl) -> None:
        """Raises `TransferError` where a worker fails, or is not ready `weight_sync.timeout_s` after the last byte."""
        timeout_s = self._section.timeout_s
        ends = time.monotonic() + timeout_s
        while True:
            staged = await server.staged(max(0.0, min(ends - time.monotonic(), timeout_s / 2)))
            if staged.stage == "ready":
                return
            if staged.stage == "failed":
                raise TransferError(f"{server.url}: the weights were not staged: {staged.error}")
            if time.monotonic() >= ends:
                raise TransferError(
                    f"{server.url}: still {staged.stage} after weight_sync.timeout_s = {timeout_s:g} s; raise it for a "
                    f"model that takes longer to build"
                )
