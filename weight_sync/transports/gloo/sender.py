"""The learner's end of the gloo transport, over plain TCP."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.cancellation import gather, on_thread
from weight_sync.server.control import ServerControl
from weight_sync.transports.base import Sent, StagedTransport, TransferError
from weight_sync.transports.gloo.group import NOT_MAPPED, OK, GlooGroup, GlooInitInfo
from weight_sync.transports.gloo.receiver import DeltaInfo
from weight_sync.transports.gloo.rendezvous import Rendezvous
from weight_sync.weights.delta_base import DeltaBase, DeltaHistory, DeltaPath, SharedHistory
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

HISTORY = SharedHistory()


class GlooTransport(StagedTransport):
    """See `StagedTransport`. Blocking calls of gloo run on threads.

    Without the group's secret nobody is answered at the rendezvous or over gloo's own connections. After that these are
    neither encrypted nor authenticated: whoever can change packets between the machines can change weights.
    """

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self.rendezvous: Rendezvous | None = None
        self._group: GlooGroup | None = None
        self._base = DeltaBase(section.full_every)
        self._history: DeltaHistory | None = None

    @property
    def connected(self) -> bool:
        return self._group is not None

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        if self._section.delta and self._history is None:
            self._history = HISTORY.take()
        self._base = DeltaBase(self._section.full_every)
        info = await on_thread(self.listen, workers)
        await gather(server.init_transfer(asdict(info)), on_thread(self._meet, info))

    async def bring(self, server: ServerControl, snapshot: Snapshot) -> None:
        group, history = self._group, self._history
        if group is None:
            raise TransferError("the transport is not connected")
        found = await on_thread(self._base.find_path, history, snapshot) if history is not None else None
        path, delta = None, None
        if found is not None:
            path = found[0]
            delta = asdict(DeltaInfo(found[1], [len(part) for part in path.payloads]))
        await server.update(snapshot.manifest.as_dict() | {"delta": delta})
        self.sent = await on_thread(self._send, group, snapshot, path)
        await self._until_staged(server)
        self._base.arrived(snapshot, snapshot.digest.hex(), by_delta=self.sent.share_changed is not None)

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

    def _meet(self, info: GlooInitInfo) -> None:
        rendezvous = self.rendezvous
        if rendezvous is None:
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
        if self._history is not None:
            self._history = None
            HISTORY.leave()


def _check(statuses: list[int]) -> None:
    """Raise `TransferError` if a worker did not get the bytes that were sent. `statuses`: in the order of their
    ranks."""
    unmapped = [worker for worker, status in enumerate(statuses) if status == NOT_MAPPED]
    if unmapped:
        raise TransferError(f"workers {unmapped} cannot map the memory of the one that received for them")
    bad = [worker for worker, status in enumerate(statuses) if status != OK]
    if bad:
        raise TransferError(f"the bytes that workers {bad} received have another digest than those sent")
