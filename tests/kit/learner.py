"""Builds samples, tokens and statuses for the learner's tests, and stands in for the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.algorithm.step_data import StepRollouts, Tokens
from slipstream.learner.feed.packing import Sample
from slipstream.protocol import codec
from slipstream.protocol.client import QueueRefused
from slipstream.protocol.messages import (
    BeginSession,
    ErrorBody,
    Group,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    RunPosition,
    Server,
)
from slipstream.protocol.status import GroupCounts, LearnerStatus, Rates, Staleness, Stall, Status, TicketCounts
from tests.kit.messages import VOCABULARY, group


def sample(length: int, prompt: int, seed: int, rollout: int = 0) -> Sample:
    """Make a sequence of random tokens.

    Args:
        length: Number of tokens.
        prompt: Number of tokens that were given. The others are sampled.
        seed: Seed of the random values.
        rollout: Number of the rollout it belongs to.
    """
    random = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt
    return Sample(
        token_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        behaviour=np.where(sampled, random.normal(-4.2, 0.3, length), 0).astype(np.float32),
        weights=(sampled & (np.arange(length) > 0) & (random.random(length) < 0.9)).astype(np.float32),
        staleness=(staleness := random.integers(0, 3, length).astype(np.int32)),
        fresh=sampled & (staleness == 0),
        rollout=rollout,
    )


def step_rollouts(samples: Sequence[Sample], group_size: int = 2) -> StepRollouts:
    """Make the rollouts of samples, with random rewards.

    Rollouts have the numbers from 0 to the highest in `samples`; each group has `group_size` of them.
    """
    count = 1 + max(item.rollout for item in samples)
    tokens = np.zeros(count, dtype=np.int64)
    for item in samples:
        tokens[item.rollout] += np.count_nonzero(item.weights)
    return StepRollouts.of(np.random.default_rng(count).normal(size=count), np.arange(count) // group_size, tokens)


def tokens(
    ratios: npt.ArrayLike, advantages: npt.ArrayLike, weights: npt.ArrayLike | None = None, **changes: Any
) -> Tokens:
    """Make N tokens with the given ratios. The sampler's log-prob of each is -2.

    All belong to one rollout, unless `changes` has other values. Sums over rollouts are computed from the rest.

    Args:
        ratios: p / p_behaviour, [N].
        advantages: Advantages, [N].
        weights: Weights, [N]; None for ones.
        **changes: Fields of `Tokens` that replace the defaults.
    """
    log_ratios = torch.from_numpy(np.log(np.asarray(ratios, dtype=np.float32)))
    size = len(log_ratios)
    behaviour = changes.pop("behaviour", torch.full((size,), -2.0))
    logprobs = changes.pop("logprobs", behaviour + log_ratios).detach().requires_grad_()
    one = np.ones(size) if weights is None else weights
    rollout = changes.pop("rollout", torch.zeros(size, dtype=torch.int64))
    given = {"behaviour": behaviour, "old": behaviour, "proximal": logprobs.detach(), "rollout": rollout, **changes}

    def of_rollouts(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(int(rollout.max()) + 1)
        return sums.index_add_(0, rollout, values.float())[rollout]

    sums = {
        "lengths": of_rollouts(torch.ones(size)),
        "drift": of_rollouts(logprobs.detach() - behaviour),
        "old_drift": of_rollouts(given["old"] - behaviour),
        "proximal_drift": of_rollouts(given["proximal"] - behaviour),
    }
    return Tokens(
        logprobs=logprobs,
        advantages=torch.from_numpy(np.asarray(advantages, dtype=np.float32)),
        weights=torch.from_numpy(np.asarray(one, dtype=np.float32)),
        **{"entropy": torch.ones(size), "staleness": torch.zeros(size, dtype=torch.int32), **sums, **given},
    )


def joined(first: Tokens, second: Tokens) -> Tokens:
    """Join the tokens of two rows into one. Rollouts of the second get new numbers."""
    apart = second.but(rollout=second.rollout + first.rollout.max() + 1)
    pairs = zip(vars(first).items(), vars(apart).values(), strict=True)
    return Tokens(**{name: a if a is None or b is None else torch.cat([a, b]) for (name, a), b in pairs})


class FakeQueue:
    """Stands in for the learner's side of the queue, in memory, with the methods of `QueueClient`.

    Attributes:
        supply: `supply(n, version)` makes up to n more groups when the learner is at `version`.
        expires_in_s: Seconds until a lease expires, as each reply says.
        refuse_renewals: Reason for which every renewal is refused.
        log: Records all events in order. A publisher may share it.
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
        self.refuse_renewals = ""
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
        # A request over HTTP lets others continue, too.
        await asyncio.sleep(0 if fresh else min(request.wait_s, 0.005))
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
            raise QueueRefused(409, ErrorBody(self.refuse_renewals, "the lease is not this learner's"))
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
    """Make a supply that always has groups, numbered from `t0`. The learner's version at the time sampled them."""
    count = 0

    def supply(n: int, version: int) -> list[Group]:
        nonlocal count
        count += n
        return [group(f"t{i}", versions=(None, None, version, version)) for i in range(count - n, count)]

    return supply


def in_turn(*groups: Group) -> Callable[[int, int], list[Group]]:
    """Make a supply that gives each of these groups once, in order."""
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
