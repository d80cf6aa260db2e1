"""Lets each rank of a learner send its share of the weights, led by rank 0.

Rank 0 alone has the fleet, and calls the servers. Another rank has a `ShareFollower`, which keeps this rank's snapshots
and runs a `Sender` for each connection; on rank 0 a `RemoteSender` stands for it. They exchange short messages in JSON,
which name a snapshot by its version; weights travel from each rank straight to the servers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from protocol.config import RunConfig, WeightSyncSection
from weight_sync.transports.base import Sender, Sent, TransferError, build_sender, local_host_towards
from weight_sync.weights.snapshot import Probe, Snapshot

logger = logging.getLogger(__name__)

# Seconds for a rank's answer to a call that only it can delay.
ANSWER_S = 60.0
# Seconds for the end of this rank's connections.
CLOSE_S = 10.0
# The wait for a message, which may be as long as the run.
FOR_EVER = timedelta(days=20)


class Channel(Protocol):
    """Carries messages between rank 0 and one other rank, in order. Each end sends and receives on one thread."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes:
        """Wait for the next message. Raises RuntimeError once the other end is gone."""


class StoreChannel:
    """A `Channel` over torch's store, which the ranks have anyway.

    Args:
        sending: A client of the store.
        receiving: Another one, as a wait keeps its client busy.
        rank: The rank other than 0.
        leads: Whether this end is rank 0's.
    """

    def __init__(self, sending: Any, receiving: Any, rank: int, leads: bool) -> None:
        self._sending, self._receiving = sending, receiving
        to_rank, to_lead = (f"share/{rank}/to", f"share/{rank}/from")
        self._out, self._in = (to_rank, to_lead) if leads else (to_lead, to_rank)
        self._sent, self._received = itertools.count(), itertools.count()
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._sending.set(f"{self._out}/{next(self._sent)}", message)

    def receive(self) -> bytes:
        key = f"{self._in}/{next(self._received)}"
        self._receiving.wait([key], FOR_EVER)
        message: bytes = self._receiving.get(key)
        self._receiving.delete_key(key)
        return message


class Call(msgspec.Struct):
    """A message to a rank.

    Attributes:
        number: Of the call; a call "cancel" has the number of the one that it ends.
        name: Of a method of `Sender`.
        link: Of the connection.
        arguments: Of the method; a snapshot is its version.
    """

    number: int
    name: str
    link: int
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct):
    """A rank's answer to the call `number`: its result, or the text of its error."""

    number: int
    result: Any = None
    error: str | None = None


class FollowingRanks:
    """The other ranks, as rank 0 calls them. `close` ends its threads with the store's connections."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        """Begin to listen. `channels`: to rank 1, 2 and so on."""
        self._channels = channels
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers, self._links = itertools.count(1), itertools.count(1)
        self._failed: str | None = None
        for rank, channel in enumerate(channels, start=1):
            threading.Thread(target=self._listen, args=(rank, channel), name=f"share-{rank}", daemon=True).start()

    def senders(self, transport: str) -> list[RemoteSender]:
        """Make the other ranks' ends of a connection to one server."""
        link = next(self._links)
        return [RemoteSender(self, rank, link, transport) for rank in range(1, len(self._channels) + 1)]

    async def call(self, rank: int, name: str, link: int, timeout_s: float | None = ANSWER_S, **arguments: Any) -> Any:
        """Call a rank's sender and return its result. Raises `TransferError` with the rank's error."""
        if self._failed is not None:
            raise TransferError(self._failed)
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(rank, Call(number, name, link, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise TransferError(f"rank {rank} of the learner did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._send(rank, Call(number, "cancel", link))
            raise
        finally:
            self._calls.pop(number, None)

    def _send(self, rank: int, call: Call) -> None:
        try:
            self._channels[rank - 1].send(msgspec.json.encode(call))
        except RuntimeError as error:
            raise TransferError(f"rank {rank} of the learner cannot be reached: {error}") from error

    def _listen(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                answer = msgspec.json.decode(channel.receive(), type=Answer)
            except RuntimeError as error:
                self._failed = f"rank {rank} of the learner cannot be reached: {error}"
                for number in [*self._calls]:
                    self._settle(Answer(number, error=self._failed))
                return
            if answer.error is not None:
                answer.error = f"rank {rank} of the learner: {answer.error}"
            self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        waiting = self._calls.get(answer.number)
        if waiting is None:
            return

        def settle() -> None:
            if waiting.done():
                return
            if answer.error is not None:
                waiting.set_exception(TransferError(answer.error))
            else:
                waiting.set_result(answer.result)

        with suppress(RuntimeError):  # the publisher's loop has ended
            waiting.get_loop().call_soon_threadsafe(settle)


class RemoteSender(Sender):
    """Another rank's `Sender`."""

    def __init__(self, ranks: FollowingRanks, rank: int, link: int, transport: str) -> None:
        self._ranks, self._rank, self._link, self._transport = ranks, rank, link, transport

    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        found: dict[str, Any] = await self._call(
            "open", transport=self._transport, server_url=server_url, workers=workers
        )
        return found

    async def meet(self) -> None:
        await self._call("meet", timeout_s=None)

    async def check_met(self) -> None:
        await self._call("check_met")

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        # It may wait for a place among the servers that pull.
        found: dict[str, Any] = await self._call("offer", timeout_s=None, snapshot=snapshot.version)
        return found

    async def send(self, snapshot: Snapshot) -> None:
        await self._call("send", timeout_s=None, snapshot=snapshot.version)

    async def done(self, snapshot: Snapshot, whole: bool) -> Sent:
        try:
            return Sent(**await self._call("done", snapshot=snapshot.version, whole=whole))
        except TransferError as error:
            logger.warning("%s", error)
            return Sent(0, 0)

    async def close(self) -> None:
        with suppress(TransferError):
            await self._call("close")

    async def _call(self, name: str, timeout_s: float | None = ANSWER_S, **arguments: Any) -> Any:
        return await self._ranks.call(self._rank, name, self._link, timeout_s, **arguments)


class ShareFollower:
    """Keeps the snapshots of a rank other than 0, and sends them as rank 0 asks. Use it as a context manager."""

    def __init__(self, config: RunConfig, channel: Channel, rank: int, beside_rank_0: bool = True) -> None:
        """Prepare to follow.

        Args:
            beside_rank_0: Whether this rank is on rank 0's machine, whose address `weight_sync.host` is.
        """
        self._section = config.weight_sync
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._channel = channel
        self._rank = rank
        self._beside_rank_0 = beside_rank_0
        self._senders: dict[int, Sender] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._snapshots: dict[int, Snapshot] = {}
        self._free: list[torch.Tensor] = []
        # Versions whose buffer a thread may still read after a transfer that was cut off.
        self._read: set[int] = set()
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> ShareFollower:
        threading.Thread(target=self._loop.run_forever, name="share-senders", daemon=True).start()
        threading.Thread(target=self._listen, name="share-calls", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def fill(self, told: Mapping[str, Any], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's share of a version, while rank 0 copies its own.

        Args:
            told: `version`; the `run`'s id; and earlier versions that may still be sent, `kept`: the others are
                dropped.
        """
        version = told["version"]
        with self._lock:
            for old in [old for old in self._snapshots if old not in told["kept"]]:
                snapshot = self._snapshots.pop(old)
                if old in self._read:
                    self._read.discard(old)
                else:
                    self._free.append(snapshot.flat)
            buffer = self._free.pop() if self._free else None
            self._free.clear()
        nothing = Probe([], np.zeros(0, dtype=np.float32))
        filled = Snapshot(version, weights, nothing, self._dtype, buffer, told["run"])
        with self._lock:
            self._snapshots[version] = filled

    async def _close(self) -> None:
        senders = [*self._senders.values()]
        self._senders.clear()
        for task in self._tasks.values():
            task.cancel()
        for sender in senders:
            await sender.close()

    def _listen(self) -> None:
        while True:
            try:
                call = msgspec.json.decode(self._channel.receive(), type=Call)
            except RuntimeError:  # rank 0 has gone, and this process ends
                return
            self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: Call) -> None:
        if call.name == "cancel":
            if (task := self._tasks.get(call.number)) is not None:
                task.cancel()
            return
        self._tasks[call.number] = self._loop.create_task(self._answer(call))

    async def _answer(self, call: Call) -> None:
        answer = Answer(call.number)
        try:
            answer.result = await self._do(call)
        except asyncio.CancelledError:
            answer.error = "cancelled"
        except Exception as error:
            answer.error = str(error) or type(error).__name__
            if not isinstance(error, TransferError):
                logger.exception("a share could not be sent")
        finally:
            del self._tasks[call.number]
        with suppress(RuntimeError):  # rank 0 has gone
            self._channel.send(msgspec.json.encode(answer))

    async def _do(self, call: Call) -> Any:
        match call.name:
            case "open":
                url, workers = call.arguments["server_url"], call.arguments["workers"]
                sender = build_sender(self._section_towards(url), call.arguments["transport"])
                self._senders[call.link] = sender
                return await sender.open(url, workers)
            case "close":
                closed = self._senders.pop(call.link, None)
                return await closed.close() if closed is not None else None
        sender = self._sender(call.link)
        match call.name:
            case "meet":
                return await sender.meet()
            case "check_met":
                return await sender.check_met()
            case "offer":
                return await sender.offer(self._snapshot(call))
            case "send":
                return await sender.send(self._snapshot(call))
            case "done":
                whole, snapshot = call.arguments["whole"], self._snapshot(call)
                if not whole:
                    with self._lock:
                        self._read.add(snapshot.version)
                return asdict(await sender.done(snapshot, whole))
        raise ValueError(f"rank 0 asks for {call.name}, which this rank does not know")

    def _sender(self, link: int) -> Sender:
        sender = self._senders.get(link)
        if sender is None:
            raise TransferError("the transport is not connected")
        return sender

    def _snapshot(self, call: Call) -> Snapshot:
        with self._lock:
            snapshot = self._snapshots.get(call.arguments["snapshot"])
        if snapshot is None:
            raise TransferError(f"version {call.arguments['snapshot']} was dropped before it was sent")
        return snapshot

    def _section_towards(self, url: str) -> WeightSyncSection:
        """Return the settings with this rank's own address, and a port that is not another rank's."""
        section = self._section
        host = section.host if self._beside_rank_0 else local_host_towards(urlsplit(url).hostname or section.host)
        port = section.http_port + self._rank if section.http_port and self._beside_rank_0 else section.http_port
        return section.model_copy(update={"host": host, "http_port": port})


__all__ = ["Channel", "FollowingRanks", "RemoteSender", "ShareFollower", "StoreChannel"]
