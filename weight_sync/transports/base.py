"""Transports: each brings one snapshot to one server, with its calls to that server in its own order.

A transport object joins the learner to the workers of one server, so a server that fails takes no other with it. Queue,
server states and proof are not its concern. `StagedTransport` has the order that all staged ones share: everything
during generation, then one call that swaps. Each rank of the learner that holds a share of the weights sends it itself,
by a `Sender`. `AutoTransport` asks each server which transport it was started with.
"""

from __future__ import annotations

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import gather, on_thread, shielded
from slipstream.weight_sync.server.engine import Engine
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.registry import SEND_DELTAS, TRANSPORTS, of_backend
from slipstream.weight_sync.weights.delta_base import DeltaPath
from slipstream.weight_sync.weights.snapshot import Snapshot, SnapshotDamaged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """Costs of one publication to one server.

    Attributes:
        sent_bytes: Bytes that were sent.
        whole_bytes: Bytes of the whole snapshot.
        share_changed: Share of values that a delta changed, 0 to 1; None without a delta.
    """

    sent_bytes: int
    whole_bytes: int
    share_changed: float | None = None

    @classmethod
    def of(cls, snapshot: Snapshot, path: DeltaPath | None = None) -> Sent:
        """Count the whole snapshot, or the deltas of `path` alone."""
        whole = snapshot.manifest.total_bytes()
        return cls(whole, whole) if path is None else cls(path.total_bytes, whole, path.share)

    @classmethod
    def total(cls, shares: Sequence[Sent]) -> Sent:
        """Add up what several ranks sent. Of a share that was sent whole, all values count as changed."""
        whole = sum(share.whole_bytes for share in shares)
        changed = None
        if any(share.share_changed is not None for share in shares):
            parts = [1.0 if share.share_changed is None else share.share_changed for share in shares]
            weighted = sum(part * share.whole_bytes for part, share in zip(parts, shares, strict=True))
            changed = weighted / max(1, whole)
        return cls(sum(share.sent_bytes for share in shares), whole, changed)


class TransferError(RuntimeError):
    """The weights did not arrive whole."""


async def checked(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot that is what it was copied from. Raises `TransferError` for one that is not."""
    try:
        await on_thread(snapshot.check)
    except SnapshotDamaged as error:
        raise TransferError(str(error)) from error
    return snapshot


class Transport(Protocol):
    """The learner's end of one connection. After an error or `close` a new one takes its place.

    Attributes:
        stages: How it loads. True: weights arrive during generation and only the exchange needs the pause; the old
            weights stay whole until then, so the server is resumed whatever happens. False: the model is overwritten
            under the pause; after an error half of it may be new, so the server stays paused until a publication
            succeeds.
    """

    stages: bool

    @property
    def sent(self) -> Sent | None:
        """Costs of the newest publication, None before the first."""

    async def connect(self, server: Engine, workers: int) -> None:
        """Connect to the server's `workers`, after ending a transfer that an earlier learner left open there.

        Raises:
            ControlError: A call to the server failed.
            TransferError: The workers did not connect.
        """

    async def publish(self, server: Engine, snapshot: Snapshot, pause: Pause) -> None:
        """Load `snapshot` and label it `snapshot.label`. Returns when every worker serves it.

        Args:
            pause: Holds generation still: by `pause.held()`, or by a swap for which it is due.

        Raises:
            ControlError: A call to the server failed.
            TransferError: The weights did not arrive whole; or not connected, before anything is asked of the server.
        """

    async def close(self) -> None:
        """Close the connection. Never raises, and may be called at any time and again."""


class Sender(ABC):
    """One rank's end of the connection to all workers of one server. Calls come in this order; after an error only
    `done` and `close` follow. Each may raise `TransferError`."""

    @abstractmethod
    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        """Prepare to be joined. Returns what each worker's `Receiver` is made from."""

    async def meet(self) -> None:  # noqa: B027 - most need not
        """Wait until the workers have joined, while the server answers the call that has them join."""

    @abstractmethod
    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        """Prepare to send. Returns what each worker's `Receiver.receive` gets."""

    async def offer_labelled(self, snapshot: Snapshot) -> dict[str, Any]:
        """Do as `offer`, and add the `label` of what this rank sends, which the worker compares with the others'."""
        return await self.offer(snapshot) | {"label": snapshot.label}

    async def send(self, snapshot: Snapshot) -> None:  # noqa: B027
        """Send to all workers, which have begun to receive. Cancelled if one of them fails."""

    async def done(self, snapshot: Snapshot, whole: bool) -> Sent:
        """End what `offer` began. Never raises.

        Args:
            whole: Whether every worker has the snapshot.
        """
        return Sent.of(snapshot)

    @abstractmethod
    async def close(self) -> None:
        """Close the connection. Never raises, and may be called at any time and again."""


class StagedTransport:
    """See `Transport`. `senders`: of each rank that holds a share of the weights, this one's first."""

    stages = True

    def __init__(self, section: WeightSyncSection, senders: Sequence[Sender]) -> None:
        self.senders = senders
        self.sent: Sent | None = None
        self._section = section
        self._connected = False

    async def connect(self, server: Engine, workers: int) -> None:
        await server.end_transfer()
        try:
            shares = await gather(*(sender.open(server.url, workers) for sender in self.senders))
            await gather(server.init_transfer({"shares": shares}), *(sender.meet() for sender in self.senders))
        except BaseException:
            await self.close()
            raise
        self._connected = True

    async def publish(self, server: Engine, snapshot: Snapshot, pause: Pause) -> None:
        if not self._connected:
            raise TransferError("the transport is not connected")
        await server.start_update()
        await self.bring(server, snapshot)
        await pause.until_due()
        swap = await server.swap(snapshot.label, pause.clear_cache)
        pause.seconds += swap.pause_s

    async def bring(self, server: Engine, snapshot: Snapshot) -> None:
        """Bring the snapshot to the workers. Returns when each has built it next to its live model."""
        whole = False
        try:
            shares = await gather(*(sender.offer_labelled(snapshot) for sender in self.senders))
            # The engine answers at once: it receives and builds on a thread.
            await server.update({"shares": shares})
            await gather(self._until_staged(server, snapshot), *(sender.send(snapshot) for sender in self.senders))
            whole = True
        finally:
            sent = await shielded(gather(*(sender.done(snapshot, whole) for sender in self.senders)))
        self.sent = Sent.total(sent)

    async def close(self) -> None:
        self._connected = False
        await shielded(gather(*(sender.close() for sender in self.senders)))

    async def _until_staged(self, server: Engine, snapshot: Snapshot) -> None:
        """Wait until all workers are ready. Raises `TransferError` if one fails or `weight_sync.timeout_s` is over."""
        timeout_s = self._section.timeout_s
        ends = time.monotonic() + timeout_s
        while True:
            # Short enough that the others' sending ends soon after a worker has failed.
            staged = await server.staged(max(0.0, min(ends - time.monotonic(), timeout_s / 2, WATCH_EVERY_S)))
            if staged.stage == "ready":
                return
            if staged.stage == "failed":
                raise TransferError(f"{server.url}: the weights were not staged: {staged.error}")
            if time.monotonic() >= ends:
                what = "model that takes longer to build"
                if staged.stage == "receiving":
                    size = snapshot.manifest.total_bytes() / 1e6
                    what = (
                        f"slow line: {size:.1f} MB need {size / timeout_s:.3g} MB/s from the learner to arrive in time"
                    )
                raise TransferError(
                    f"{server.url}: still {staged.stage} after weight_sync.timeout_s = {timeout_s:g} s; raise it for a "
                    f"{what}"
                )


class AutoTransport(StagedTransport):
    """Uses the transport that the server was started with, which `connect` asks for. It has to be one that stages: the
    others are for quantised servers, and the run file has to name them."""

    def __init__(self, section: WeightSyncSection, others: OtherSenders) -> None:
        super().__init__(section, ())
        self._others = others

    async def connect(self, server: Engine, workers: int) -> None:
        found = (await server.state()).transport
        name = of_backend(found)
        if name is None:
            raise TransferError(
                f"{server.url}: its weight transfer is {found or 'off'}, which Slipstream does not know; start it with "
                f"slipstream vllm run.toml"
            )
        if not TRANSPORTS[name].stages:
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
        self.senders = _senders(self._section, name, self._others)
        await super().connect(server, workers)


# Seconds of one question whether the workers are ready.
WATCH_EVERY_S = 1.0

# Makes the senders of the other ranks that hold a share, for a transport's name.
OtherSenders = Callable[[str], Sequence[Sender]]


def no_others(transport: str) -> Sequence[Sender]:
    """Return no sender: this rank holds all weights."""
    return ()


def build_transport(section: WeightSyncSection, others: OtherSenders = no_others) -> Transport:
    """Make the learner's end of the transport that `section` names, not connected yet."""
    name = section.transport
    if name == "auto":
        return AutoTransport(section, others)
    if TRANSPORTS[name].stages:
        return StagedTransport(section, _senders(section, name, others))
    transport: Transport = _learners_end(name)(section)
    return transport


def _senders(section: WeightSyncSection, name: str, others: OtherSenders) -> Sequence[Sender]:
    remote = others(name)
    return [build_sender(of_share(section, 1 + len(remote)), name), *remote]


def of_share(section: WeightSyncSection, shares: int) -> WeightSyncSection:
    """Return the settings of one of several ranks that send at once: all have buckets of `bucket_bytes` together."""
    return section.model_copy(update={"bucket_bytes": max(1, section.bucket_bytes // shares)})


def build_sender(section: WeightSyncSection, name: str) -> Sender:
    """Make this rank's end of the staged transport `name`, not open yet."""
    sender: Sender = _learners_end(name)(section)
    return sender


def _learners_end(name: str) -> Callable[[WeightSyncSection], Any]:
    module, _, cls = TRANSPORTS[name].learner.partition(":")
    made: Callable[[WeightSyncSection], Any] = getattr(import_module(module), cls)
    return made


def local_host_towards(host: str) -> str:
    """Return this machine's address as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
