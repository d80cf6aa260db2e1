"""`GET /v1/rollouts`: what the policy says can be read, also where no step was ever made."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from slipstream.protocol import access
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.messages import BeginSession, TicketRequest
from slipstream.protocol.rollouts import RolloutView
from slipstream.rollout_queue.observe.windows import MAX_BYTES, MAX_GROUPS, RecentRollouts, pick_rollouts
from tests.kit import config, group
from tests.kit.messages import group_of_roles
from tests.kit.queue import serve_version, serving


def with_messages(messages: bytes | None, **fields: Any) -> RolloutView:
    made = group(rewards=(0.5, 1.0), **fields)
    made.rollouts[0].messages = messages
    return msgspec.json.decode(pick_rollouts(made)[0].json, type=RolloutView)


def read(recent: RecentRollouts, limit: int = 256, worst: bool = False) -> list[RolloutView]:
    return msgspec.json.decode(recent.json(limit, worst), type=list[RolloutView])


async def test_recent_rollouts_are_there_before_any_step_newest_first_or_worst_first() -> None:
    async with serving(config(rollout={"group_size": 4})) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        tickets = (await client.tickets(TicketRequest("w", 2, wait_s=0.0))).tickets
        for ticket, rewards in zip(tickets, [(0.5, 0.25), (1.0, 0.0)], strict=True):
            sent = group(ticket, rewards=rewards)
            sent.rollouts[0].messages = json.dumps([{"role": "assistant", "content": "42"}]).encode()
            await client.submit(sent)

        async def shown(query: str) -> list[RolloutView]:
            return msgspec.json.decode(await client.call("GET", access.ROLLOUTS + query), type=list[RolloutView])

        assert [(view.ticket_id, view.number) for view in await shown("")] == [
            ("1.0", 0),
            ("1.0", 1),
            ("0.0", 0),
            ("0.0", 1),
        ]
        assert [view.reward for view in await shown("?worst=1&limit=2")] == [0.0, 0.25]
        assert (await shown("?limit=1"))[0].messages == [{"role": "assistant", "content": "42"}]
        for limit in ("0", "-1", "many", "9" * 5000):
            with pytest.raises(QueueRefused) as refused:
                await client.call("GET", f"{access.ROLLOUTS}?limit={limit}")
            assert refused.value.status == 422


def test_of_a_large_group_the_worst_the_best_and_some_between_are_kept() -> None:
    views = [msgspec.json.decode(shown.json, type=RolloutView) for shown in pick_rollouts(group(rewards=range(64)))]
    assert [(view.number, view.reward) for view in views] == [(0, 0.0), (21, 21.0), (42, 42.0), (63, 63.0)]


def test_each_role_of_a_group_is_kept() -> None:
    """The critic's rewards are all below the solver's."""
    made = group_of_roles(*(("solver", float(n)) for n in range(8)), *(("critic", -1.0 - n) for n in range(8)))
    views = [msgspec.json.decode(shown.json, type=RolloutView) for shown in pick_rollouts(made)]
    assert [(view.role, view.reward) for view in views] == [
        ("solver", 0.0),
        ("solver", 7.0),
        ("critic", -1.0),
        ("critic", -8.0),
    ]
    assert views[0].reward_components == {"solver": 0.0}, "without those of other roles"
    many = group_of_roles(*((f"role-{n % 16}", float(n)) for n in range(64)))
    assert {msgspec.json.decode(shown.json, type=RolloutView).role for shown in pick_rollouts(many)} == {
        f"role-{n}" for n in range(16)
    }


def test_the_window_is_bounded_in_groups_and_in_bytes() -> None:
    recent = RecentRollouts()
    for number in range(3 * MAX_GROUPS):
        recent.add(pick_rollouts(group(f"{number}.0")), now=0.0)
    assert {view.ticket_id for view in read(recent)} == {
        f"{number}.0" for number in range(2 * MAX_GROUPS, 3 * MAX_GROUPS)
    }
    long = json.dumps([{"role": "assistant", "content": "x" * 3000}] * 20).encode()
    for number in range(MAX_GROUPS):
        large = group(f"{number}.0", rewards=range(4))
        for rollout in large.rollouts:
            rollout.messages = long
        recent.add(pick_rollouts(large), now=0.0)
    assert len(recent.json(256, worst=False)) <= MAX_BYTES + 1024
    assert read(recent)[0].ticket_id == f"{MAX_GROUPS - 1}.0"


def test_a_full_window_takes_few_groups_a_second() -> None:
    recent = RecentRollouts()
    for _ in range(MAX_GROUPS):
        assert recent.wants(10.0)
        recent.add(pick_rollouts(group()), 10.0)
    assert [recent.wants(now) for now in (10.0, 10.4, 10.5)] == [False, False, True]


@pytest.mark.parametrize(
    "hostile",
    [
        b"[" + b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}]",
        b"[" * 100_000,
        b'[{"a": 1' + b"0" * 400 + b"}]",
        b'[{"a": 123456789012345678901234567890}]',
        b"not json",
        json.dumps([{"role": "assistant", "content": "x" * 3000}] * 60).encode(),
    ],
)
def test_hostile_messages_are_left_out_or_shown_and_never_fail_the_group(hostile: bytes) -> None:
    assert with_messages(hostile).reward == 0.5


def test_eight_megabytes_of_empty_containers_take_no_memory() -> None:
    made = group()
    made.rollouts[0].messages = b"[" + b"{}," * (8 * 1024**2 // 3) + b"{}]"
    tracemalloc.start()
    pick_rollouts(made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024**2
