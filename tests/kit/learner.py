"""Builders and stand-ins for the learner's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import torch

from learner.feed.packing import Sample
from protocol import codec, reasons
from protocol.client import Refused
from protocol.messages import BeginSession, Group, LeaseAck, LeaseReply, LeaseRequest, Problem, RunPosition, Server
from protocol.status import GroupCounts, LearnerStatus, Rates, Staleness, Stall, Status, TicketCounts
from tests.kit.messages import VOCABULARY, group


def sample(length: int, prompt: int, seed: int) -> Sample:
    """A sequence of `length` random tokens, sampled from `prompt` on."""
    random = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt
    return Sample(
        token_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        sampled=sampled,
        behaviour=np.where(sampled, random.normal(-4.2, 0.3, length), 0).astype(np.float32),
        weights=(sampled & (np.arange(length) > 0) & (random.random(length) < 0.9)).astype(np.float32),
        staleness=random.integers(0, 3, length).astype(np.int32),
        advantage=float(random.normal()),
    )


class FakeQueue:
    """The learner's side of the queue, in memory, with the face of `QueueClient`.

    `supply(n, version)` makes up to n more groups when the learner is at `version`. `log` records what happened, in
    order; a publisher may share it.
    """

    def __init__(
        self,
        supply: Callable[[int, int], Iterable[Group]] = lambda n, version: [],
        version: int = 0,
        expires_in_s: float = 60.0,
    ) -> None:
        self.supply = supply
        self.expires_in_s = expires_in_s
        self.log: list[Any] = []
        self.now = RunPosition(version, 0, 0, 0, None, None, False)
        self.leases: dict[str, dict[str, Group]] = {}
        self.trained: list[str] = []
        self.dropped: dict[str, str] = {}
        self.renewed: list[str] = []
        self.begun: list[BeginSession] = []
        self.refuse_renewals = False
        self.revoke: dict[str, str] = {}
        self.fail_lease: Exception | None = None
        self.fleet: list[Server] = []
        self.shown = status(stall=Stall(True, 9.0, "no worker is connected"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append("closed")

    async def begin_session(self, begin: BeginSession) -> RunPosition:
        session = self.now.session + 1
        self.now = RunPosition(self.now.version, begin.step, begin.total_steps, session, None, None, False)
        self.begun.append(begin)
        self.log.append(("begin", begin.step, begin.resume))
        return self.copy()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        if self.fail_lease is not None:
            raise self.fail_lease
        held = self.leases.setdefault(request.lease_id, {})
        assert set(request.have) == set(held), "the learner holds other groups than the queue leased to it"
        fresh = list(self.supply(request.max_groups, self.now.version))
        if not fresh:
            await asyncio.sleep(min(request.wait_s, 0.005))
        held.update({item.ticket_id: item for item in fresh})
        self.log.append(("lease", request.lease_id, len(fresh)))
        raw = [msgspec.Raw(codec.encode(item)) for item in fresh]
        return LeaseReply(request.lease_id, raw, [self.now.version] * len(fresh), self.expires_in_s)

    async def ack(self, lease_id: str, ack: LeaseAck) -> RunPosition:
        held = self.leases[lease_id]
        for ticket_id in [*ack.trained, *ack.dropped]:
            del held[ticket_id]
        self.dropped.update(ack.dropped)
        if ack.trained:
            assert ack.step == self.now.step + 1
            assert ack.version == self.now.version + 1
            assert not held, "groups of the lease that were neither trained nor dropped"
            self.trained.extend(ack.trained)
            self.now.step, self.now.version = ack.step, ack.version
            self.log.append(("ack", ack.version))
        return self.copy()

    async def renew(self, lease_id: str, session: int, have: Sequence[str] = ()) -> dict[str, str]:
        if self.refuse_renewals:
            raise Refused(410, Problem(reasons.LEASE_LAPSED, "the lease expired"))
        self.renewed.append(lease_id)
        return {ticket_id: reason for ticket_id, reason in self.revoke.items() if ticket_id in have}

    async def release(self, lease_id: str, session: int) -> None:
        self.log.append(("release", lease_id))
        self.leases.pop(lease_id)

    async def position(self) -> RunPosition:
        return self.copy()

    async def checkpointed(self, session: int, step: int) -> RunPosition:
        self.log.append(("checkpointed", step))
        return self.copy()

    async def waiting(self, session: int, what: str | None) -> RunPosition:
        self.log.append(("waiting", what))
        return self.copy()

    async def finish(self, session: int) -> None:
        assert session == self.now.session
        self.now.finished = True
        self.log.append("finished")

    async def status(self) -> Status:
        return self.shown

    async def servers(self) -> list[Server]:
        return self.fleet

    def copy(self) -> RunPosition:
        return msgspec.structs.replace(self.now)


def endless() -> Callable[[int, int], list[Group]]:
    """A supply that always has groups, numbered from `t0` on, sampled by the learner's version at the time."""
    count = 0

    def supply(n: int, version: int) -> list[Group]:
        nonlocal count
        count += n
        return [group(f"t{i}", versions=(None, None, version, version)) for i in range(count - n, count)]

    return supply


def in_turn(*groups: Group) -> Callable[[int, int], list[Group]]:
    """A supply of these groups, once."""
    rest = list(groups)

    def supply(n: int, version: int) -> list[Group]:
        taken, rest[:] = rest[:n], rest[n:]
        return taken

    return supply


def status(**changes: Any) -> Status:
    plain = Status(
        run="test",
        uptime_s=1.0,
        version=0,
        served_version=None,
        step=0,
        total_steps=0,
        checkpoint_step=None,
        finished=False,
        max_staleness=4,
        depth=3.5,
        depth_target=1.0,
        groups=GroupCounts(0, 0, 0, 7, 0, 10, 10, 10),
        staleness=Staleness(),
        rates=Rates(),
        learner=LearnerStatus(),
        workers=[],
        servers=[],
        waits=[],
        stall=Stall(False, 0.0),
        ledger=TicketCounts(),
    )
    return msgspec.structs.replace(plain, **changes)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
