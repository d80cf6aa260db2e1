"""Segments and groups that keep every rule of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.messages import Group, Rollout, Segment, Ticket, VersionSpan

VOCABULARY = 64
SERVER = "vllm-0"


def segment(versions: Sequence[int | None], seed: int = 0, server: int = 0) -> Segment:
    """One token for each entry: the version that sampled it, or None for a token that was given."""
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
    """The group of a ticket, one rollout for each reward, all with the same pattern of versions: by default two given
    tokens and three that the ticket's version sampled. `fields` are the group's."""
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
