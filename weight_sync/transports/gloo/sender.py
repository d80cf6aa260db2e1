"""The learner's end of the gloo transport, over plain TCP."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.transports.base import Sender, Sent, TransferError
from slipstream.weight_sync.transports.gloo.group import NOT_MAPPED, OK, GlooGroup, GlooInitInfo
from slipstream.weight_sync.transports.gloo.receiver import DeltaInfo
from slipstream.weight_sync.transports.gloo.rendezvous import Rendezvous
from slipstream.weight_sync.weights.delta_base import DeltaBase, DeltaHistory, DeltaPath
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# The history that the connections of this process share, while there are any: it has a copy of the weights.
_shared: WeakValueDictionary[str, DeltaHistory] = WeakValueDictionary()


class GlooSender(Sender):
    """See `Sender`. Blocking calls of gloo run on threads.

    Without the group's secret nobody is answered at the rendezvous or over gloo's own connections. After that these are
    neither encrypted nor authenticated: whoever can change packets between the machines can change weights.
    """

    def __init__(self, section: WeightSyncSection) -> None:
        self.rendezvous: Rendezvous | None = None
        self._section = section
        self._info: GlooInitInfo | None = None
        self._group: GlooGroup | None = None
        self._base = DeltaBase(section.full_every)
        self._history: DeltaHistory | None = None
        self._path: DeltaPath | None = None
        self._sent: Sent | None = None

    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        if self._section.delta and self._history is None:
            self._history = _shared.setdefault("history", DeltaHistory())
        self._base = DeltaBase(self._section.full_every)
        self._info = await on_thread(self.listen, workers)
        return asdict(self._info)

    async def meet(self) -> None:
        await on_thread(self._meet)

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        history = self._history
        found = await on_thread(self._base.find_path, history, snapshot) if history is not None else None
        self._path, self._sent, delta = None, None, None
        if found is not None:
            self._path = found[0]
            delta = asdict(DeltaInfo(found[1], [len(part) for part in self._path.payloads]))
        return snapshot.manifest.as_dict() | {"delta": delta}

    async def send(self, snapshot: Snapshot) -> None:
        if self._group is None:
            raise TransferError("the transport is not connected")
        self._sent = await on_thread(self._send, self._group, snapshot, self._path)

    async def done(self, snapshot: Snapshot, whole: bool) -> Sent:
        sent, self._path = self._sent or Sent.of(snapshot), None
        if whole:
            self._base.arrived(snapshot, snapshot.digest.hex(), by_delta=sent.share_changed is not None)
        return sent

    async def close(self) -> None:
        await on_thread(self._let_go)

    def listen(self, workers: int) -> GlooInitInfo:
        """Open the rendezvous for so many workers and return where it is. Raises `TransferError` if it cannot."""
        host, timeout_s = self._section.host, self._section.timeout_s
        secret = secrets.token_bytes(32)
        try:
            self.rendezvous = Rendezvous(host, secret, workers + 1, timeout_s)
        except OSError as error:
            raise TransferError(
                f"weight_sync.host = {host}: cannot listen there: {error}; name an address of the learner's machine"
            ) from error
        port = self.rendezvous.port
        return GlooInitInfo(host, port, workers + 1, self._section.bucket_bytes, timeout_s, secret.hex())

    def _meet(self) -> None:
        rendezvous, info = self.rendezvous, self._info
        if rendezvous is None or info is None:
            raise TransferError("the transport was closed")
        try:
            self._group = GlooGroup(rendezvous.store, 0, info, info.master_address)
        except RuntimeError as error:
            away = rendezvous.turned_away
            strangers = f"; {away} connections without the secret were turned away there" if away else ""
            raise TransferError(
                f"the server's workers did not come to {info.master_address}:{info.master_port}: {error}{strangers}"
            ) from error
        finally:
            rendezvous.close()  # all have come, or the wait is over

    def _send(self, group: GlooGroup, snapshot: Snapshot, path: DeltaPath | None) -> Sent:
        """Send the snapshot. Returns when every worker has staged it and its digest agrees."""
        try:
            sent = Sent.of(snapshot, path)
            if path is None:
                self._send_bytes(group, snapshot, snapshot.flat)
            else:
                self._send_bytes(group, snapshot, path.joined)
                answers = [group.hear(rank)[0] for rank in group.receivers]
                fits = set(answers) == {OK}
                for rank in group.receivers:
                    group.tell(rank, int(not fits))
                if not fits:
                    logger.warning("version %s: the delta did not fit, everything is sent", snapshot.version)
                    self._send_bytes(group, snapshot, snapshot.flat)
                    sent = Sent(path.total_bytes + sent.whole_bytes, sent.whole_bytes)
            statuses = [group.hear(rank)[0] for rank in range(1, group.size)]
        except RuntimeError as error:
            raise TransferError(f"the transfer broke off: {error}") from error
        _check(statuses)
        return sent

    def _send_bytes(self, group: GlooGroup, snapshot: Snapshot, flat: torch.Tensor) -> None:
        """Send `flat` to all that receive, and then the snapshot's digest."""
        for _ in group.buckets(flat):
            snapshot.digest  # noqa: B018 - computed once for all servers, while the first buckets travel
        words = torch.frombuffer(bytearray(snapshot.digest), dtype=torch.int64).tolist()
        for rank in group.receivers:
            group.tell(rank, *words)

    def _let_go(self) -> None:
        rendezvous, self.rendezvous = self.rendezvous, None
        if rendezvous is not None:
            rendezvous.close()
        self._group = None  # blocks until gloo's threads have ended
        self._history = None


def _check(statuses: list[int]) -> None:
    """Raise `TransferError` if a worker did not get the bytes that were sent. `statuses`: in the order of their
    ranks."""
    unmapped = [worker for worker, status in enumerate(statuses) if status == NOT_MAPPED]
    if unmapped:
        raise TransferError(f"workers {unmapped} cannot map the memory of the one that received for them")
    bad = [worker for worker, status in enumerate(statuses) if status != OK]
    if bad:
        raise TransferError(f"the bytes that workers {bad} received have another digest than those sent")
