"""Makes segments and groups that keep every rule of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.protocol.messages import Group, Rollout, Segment, Ticket, TurnEnd, VersionSpan

VOCABULARY = 64
SERVER = "vllm-0"


def segment(versions: Sequence[int | None], seed: int = 0, server: int = 0) -> Segment:
    """Make a segment with one random token for each entry of `versions`.

    Args:
        versions: For each token the version that sampled it, or None for a token that was given.
        seed: Seed of the tokens.
        server: Index of the server in the group's `server_names`.
    """
    random = np.random.default_rng(seed)
    mask = np.array([version is not None for version in versions], dtype=np.bool_)
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if version is None:
            continue
        if spans and spans[-1].version == version and spans[-1].end == i:
            spans[-1] = VersionSpan(version, spans[-1].start, i + 1, server)
        else:
            spans.append(VersionSpan(version, i, i + 1, server))
    return Segment(
        token_ids=random.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32),
        version_spans=spans,
    )


def group(
    ticket: Ticket | str = "0.0",
    rewards: Sequence[float] = (0.0, 1.0),
    versions: Sequence[int | None] | None = None,
    **fields: Any,
) -> Group:
    """Make the group of a ticket, with one rollout for each reward.

    Args:
        ticket: The ticket, or its id.
        rewards: One reward for each rollout.
        versions: Versions of each rollout's tokens, as for `segment`. By default two tokens are given and the ticket's
            version sampled three.
        **fields: Fields of `Group` that replace the defaults.
    """
    version = ticket.version if isinstance(ticket, Ticket) else 0
    pattern = (None, None, version, version, version) if versions is None else versions
    rollouts = [Rollout([segment(pattern, seed)], reward, "stop") for seed, reward in enumerate(rewards)]
    values = {
        "ticket_id": ticket.id if isinstance(ticket, Ticket) else ticket,
        "index": ticket.index if isinstance(ticket, Ticket) else 0,
        "epoch": 0,
        "rollouts": rollouts,
        "worker_id": "w",
        "server_names": [SERVER],
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return Group(**{**values, **fields})


def group_of_turns(
    *rewards: Sequence[float], ticket: Ticket | str = "0.0", states: Sequence[Sequence[int]] | None = None
) -> Group:
    """Make a group with a rollout for each sequence of rewards, one reward at each of its turns.

    A turn is two tokens, sampled after one that was given: token `states[rollout][turn]`, or the number of the turn.
    """
    made = group(ticket, [float(sum(of)) for of in rewards])
    version = ticket.version if isinstance(ticket, Ticket) else 0
    for number, (rollout, of) in enumerate(zip(made.rollouts, rewards, strict=True)):
        one = segment((None, version, version) * len(of), number)
        one.token_ids[::3] = range(len(of)) if states is None else states[number]
        rollout.segments, rollout.turns = [one], len(of)
        rollout.turn_ends = [TurnEnd(0, 3 * turn + 3) for turn in range(len(of))]
        rollout.turn_rewards = [float(value) for value in of]
    return made


def group_of_roles(*roles: tuple[str, float], ticket: Ticket | str = "0.0") -> Group:
    """Make a group with a rollout for each role and its reward."""
    made = group(ticket, rewards=[reward for _, reward in roles])
    for rollout, (role, reward) in zip(made.rollouts, roles, strict=True):
        rollout.role, rollout.reward_components = role, {role: reward, "another": None}
    return made
