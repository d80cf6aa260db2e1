"""Rank 0's end: calls the other ranks' senders."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from slipstream.weight_sync.ranks.channel import Answer, Call, Channel
from slipstream.weight_sync.transports.base import Sender, Sent, TransferError
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# Seconds for a rank's answer to a call that only it can delay.
ANSWER_S = 60.0

# Seconds for the end of a thread that listens.
CLOSE_S = 5.0


class FollowingRanks:
    """The other ranks, as rank 0 calls them. `close` ends its threads."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        """Begin to listen. `channels`: to rank 1, 2 and so on."""
        self._channels = channels
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers, self._links = itertools.count(1), itertools.count(1)
        self._failed: str | None = None
        self._threads = [
            threading.Thread(target=self._listen, args=(rank, channel), name=f"share-{rank}", daemon=True)
            for rank, channel in enumerate(channels, start=1)
        ]
        for thread in self._threads:
            thread.start()

    def give_up(self, why: str) -> None:
        """End all calls, and those that come, as a rank is gone: nothing else ends a wait for its answer."""
        self._failed = why
        for number in [*self._calls]:
            self._settle(Answer(number, error=why))

    def close(self) -> None:
        """Stop listening. Calls that still wait fail."""
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.join(CLOSE_S)

    @property
    def count(self) -> int:
        """Ranks of the learner, this one included."""
        return 1 + len(self._channels)

    def senders(self, transport: str) -> list[RemoteSender]:
        """Make the other ranks' ends of a connection to one server."""
        link = next(self._links)
        return [RemoteSender(self, rank, link, transport) for rank in range(1, self.count)]

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
                self.give_up(f"rank {rank} of the learner cannot be reached: {error}")
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
            "open", transport=self._transport, server_url=server_url, workers=workers, shares=self._ranks.count
        )
        return found

    async def meet(self) -> None:
        await self._call("meet", timeout_s=None)

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        # It may wait for a place among the servers that pull.
        found: dict[str, Any] = await self._call("offer", timeout_s=None, snapshot=snapshot.version)
        return found

    async def offer_labelled(self, snapshot: Snapshot) -> dict[str, Any]:
        return await self.offer(snapshot)  # the other rank has added the label of its own snapshot

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
