"""Builders and stand-ins for the learner's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch

from learner.feed.packing import Sample
from protocol import codec
from protocol.client import Refused
from protocol.config import RunConfig
from protocol.messages import (
    BeginSession,
    Group,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    Problem,
    Rollout,
    RunPosition,
    Segment,
    VersionSpan,
)
from protocol.status import GroupCounts, LearnerStatus, Rates, Staleness, Stall, Status, TicketCounts

VOCABULARY = 64


def run_file(model_path: str | Path = "model", **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_path)},
        "task": {"path": "task.py:task"},
        "vllm": {"max_model_len": 64},
        "rollout": {"max_turn_tokens": 16, "group_size": 2},
        "learner": {"token_budget": 64, "groups_per_step": 2},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return RunConfig.model_validate(values)


def segment(versions: Sequence[int | None], seed: int = 0) -> Segment:
    """One token for each entry: the version that sampled it, or None for a token that was given."""
    random = np.random.default_rng(seed)
    mask = np.array([version is not None for version in versions])
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if version is None:
            continue
        if spans and spans[-1].version == version and spans[-1].end == i:
            spans[-1] = VersionSpan(version, spans[-1].start, i + 1, 0)
        else:
            spans.append(VersionSpan(version, i, i + 1, 0))
    return Segment(
        token_ids=random.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32),
        version_spans=spans,
    )


def group(ticket_id: str, rewards: Sequence[float], versions: Sequence[int | None] = (None, None, 0, 0)) -> Group:
    """A group of one rollout for each reward, all with the same pattern of versions."""
    rollouts = [Rollout([segment(versions, seed)], reward, "stop") for seed, reward in enumerate(rewards)]
    return Group(ticket_id, 0, 0, rollouts, "worker-0", ["vllm-0"], 0.0, 1.0)


def sample(length: int, prompt: int, seed: int) -> Sample:
    """A sequence of `length` random tokens, sampled from `prompt` on."""
    random = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt
    return Sample(
        token_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        sampled=sampled,
        behaviour=np.where(sampled, random.normal(-4.2, 0.3, length), 0).astype(np.float32),
        weights=(sampled & (random.random(length) < 0.9)).astype(np.float32),
        advantage=float(random.normal()),
    )


class FakeQueue:
    """The learner's side of the queue, in memory, with the face of `QueueClient`.

    `supply(n, version)` makes up to n further groups when the learner is at `version`. `log` gathers what happened,
    in order; a publisher may share it.
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
        self.policy_now = RunPosition(version, 0, 0, 0, None, None, False)
        self.leases: dict[str, dict[str, Group]] = {}
        self.trained: list[str] = []
        self.dropped: dict[str, str] = {}
        self.renewed: list[str] = []
        self.refuse_renewals = False
        self.fail_lease: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append("closed")

    async def begin_session(self, begin: BeginSession) -> RunPosition:
        now = self.policy_now
        self.policy_now = RunPosition(now.version, begin.step, begin.total_steps, now.session + 1, None, None, False)
        self.log.append(("begin", begin.step, begin.resume))
        return self.copy()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        if self.fail_lease is not None:
            raise self.fail_lease
        held = self.leases.setdefault(request.lease_id, {})
        assert set(request.have) == set(held), "the learner holds other groups than the queue leased to it"
        fresh = list(self.supply(request.max_groups, self.policy_now.version))
        if not fresh:
            await asyncio.sleep(min(request.wait_s, 0.005))
        held.update({item.ticket_id: item for item in fresh})
        self.log.append(("lease", request.lease_id, len(fresh)))
        raw = [msgspec.Raw(codec.encode(item)) for item in fresh]
        return LeaseReply(request.lease_id, raw, [self.policy_now.version] * len(fresh), self.expires_in_s)

    async def ack(self, lease_id: str, ack: LeaseAck) -> RunPosition:
        held = self.leases[lease_id]
        for ticket_id in [*ack.trained, *ack.dropped]:
            del held[ticket_id]
        self.dropped.update(ack.dropped)
        if ack.trained:
            assert ack.step == self.policy_now.step + 1
            assert ack.version == self.policy_now.version + 1
            assert not held, "groups of the lease that were neither trained nor dropped"
            self.trained.extend(ack.trained)
            self.policy_now.step, self.policy_now.version = ack.step, ack.version
            self.log.append(("ack", ack.version))
        return self.copy()

    async def renew(self, lease_id: str, session: int) -> None:
        if self.refuse_renewals:
            raise Refused(410, Problem("lease_lapsed", "the lease lapsed"))
        self.renewed.append(lease_id)

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

    async def finish(self) -> None:
        self.policy_now.finished = True
        self.log.append("finished")

    async def status(self) -> Status:
        return status(stall=Stall(True, 9.0, "no worker is connected"))

    def copy(self) -> RunPosition:
        return msgspec.structs.replace(self.policy_now)


def endless(
    rewards: Sequence[float] = (0.0, 1.0), versions: Callable[[int], Sequence[int | None]] | None = None
) -> Callable[[int, int], list[Group]]:
    """A supply that always has groups, numbered from `t0` on, sampled by the version of the moment."""
    count = 0
    pattern = versions or (lambda version: (None, None, version, version))

    def supply(n: int, version: int) -> list[Group]:
        nonlocal count
        count += n
        return [group(f"t{i}", rewards, pattern(version)) for i in range(count - n, count)]

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
