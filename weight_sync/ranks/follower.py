"""The end of a rank other than 0: keeps this rank's snapshots and sends them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from slipstream.protocol.config import RunConfig, WeightSyncSection
from slipstream.weight_sync.ranks.channel import Answer, Call, Channel
from slipstream.weight_sync.transports.base import (
    Sender,
    TransferError,
    build_sender,
    checked,
    local_host_towards,
    of_share,
)
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

logger = logging.getLogger(__name__)

# Seconds for the end of this rank's connections.
CLOSE_S = 10.0


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
        # The newest version that was filled, and what is set, and replaced, with each.
        self._newest = -1
        self._filled = asyncio.Event()
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> ShareFollower:
        threading.Thread(target=self._loop.run_forever, name="share-senders", daemon=True).start()
        self._listening = threading.Thread(target=self._listen, name="share-calls", daemon=True)
        self._listening.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._listening.join(CLOSE_S)
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
            self._newest = version
        self._loop.call_soon_threadsafe(self._tell_filled)

    def _tell_filled(self) -> None:
        filled, self._filled = self._filled, asyncio.Event()
        filled.set()

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
            except RuntimeError:  # this process ends, perhaps as rank 0 has gone
                return
            self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: Call) -> None:
        if call.name == "cancel":
            if (task := self._tasks.get(call.number)) is not None:
                task.cancel()
            return
        task = self._tasks[call.number] = self._loop.create_task(self._answer(call))
        task.add_done_callback(lambda _: self._tasks.pop(call.number))  # one that is cancelled at once never runs

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
        with suppress(RuntimeError):  # rank 0 has gone
            self._channel.send(msgspec.json.encode(answer))

    async def _do(self, call: Call) -> Any:
        match call.name:
            case "open":
                url, workers = call.arguments["server_url"], call.arguments["workers"]
                section = of_share(self._section_towards(url), call.arguments["shares"])
                sender = build_sender(section, call.arguments["transport"])
                self._senders[call.link] = sender
                return await sender.open(url, workers)
            case "close":
                closed = self._senders.pop(call.link, None)
                return await closed.close() if closed is not None else None
        sender = self._sender(call.link)
        match call.name:
            case "meet":
                return await sender.meet()
            case "offer":
                return await sender.offer_labelled(await checked(await self._snapshot(call)))
            case "send":
                return await sender.send(await self._snapshot(call))
            case "done":
                whole, snapshot = call.arguments["whole"], await self._snapshot(call)
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

    async def _snapshot(self, call: Call) -> Snapshot:
        """Return this rank's share of the version, once it is filled: rank 0 may have been done earlier."""
        version: int = call.arguments["snapshot"]
        while True:
            filled = self._filled
            with self._lock:
                snapshot, newest = self._snapshots.get(version), self._newest
            if snapshot is not None:
                return snapshot
            if version <= newest:
                raise TransferError(f"version {version} was dropped before it was sent")
            await filled.wait()

    def _section_towards(self, url: str) -> WeightSyncSection:
        """Return the settings with this rank's own address, and a port that is not another rank's."""
        section = self._section
        host = section.host if self._beside_rank_0 else local_host_towards(urlsplit(url).hostname or section.host)
        port = section.http_port + self._rank if section.http_port and self._beside_rank_0 else section.http_port
        return section.model_copy(update={"host": host, "http_port": port})
