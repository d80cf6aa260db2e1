"""The stall alarm: when it is raised and what it blames."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import Server, ServerState
from protocol.status import GroupCounts
from rollout_queue.observe.stall import Scene, judge

SERVING = [Server("vllm-0", "u", ServerState.SERVING, 3)]
QUARANTINED = [Server("vllm-0", "u", ServerState.QUARANTINED, 3, "probe")]


def groups(tickets: int = 0, ready: int = 0, leased: int = 0) -> GroupCounts:
    outstanding = tickets + ready + leased
    return GroupCounts(tickets, ready, leased, outstanding, bytes=0, capacity_groups=9, capacity_bytes=9, limit=9)


def scene(**changes: Any) -> Scene:
    values: dict[str, Any] = {
        "quiet_s": 130.0,
        "stall_after_s": 120.0,
        "finished": False,
        "session": 1,
        "servers": SERVING,
        "groups": groups(),
        "groups_per_step": 4,
        "bytes_refused": False,
        "blocked_by": None,
        "learner_seen_s_ago": 1.0,
        "learner_waits_for": None,
        "worker_seen_s_ago": 1.0,
    }
    return Scene(**{**values, **changes})


@pytest.mark.parametrize(
    ("blame", "changes"),
    [
        ("no learner has begun", {"session": 0}),
        ("learner was last heard from 90 s ago", {"learner_seen_s_ago": 90.0}),
        ("learner was never heard from", {"learner_seen_s_ago": None}),
        ("no vLLM server is serving: vllm-0 is quarantined (probe)", {"servers": QUARANTINED}),
        (
            "learner waits for publication although 4 groups",
            {"groups": groups(ready=1, leased=3), "learner_waits_for": "publication"},
        ),
        ("2 groups fill queue.capacity_bytes", {"groups": groups(ready=2), "bytes_refused": True}),
        ("workers were never heard from", {"worker_seen_s_ago": None}),
        ("workers hold 3 tickets", {"groups": groups(tickets=3)}),
        ("no ticket is given: the depth limit", {"blocked_by": "the depth limit"}),
        ("the workers ask for none", {}),
    ],
)
def test_i7_f7_a_stall_names_the_first_broken_link(blame: str, changes: dict[str, Any]) -> None:
    verdict = judge(scene(**changes))
    assert verdict.stalled
    assert blame in (verdict.why or "")


@pytest.mark.parametrize("in_flight", [groups(), groups(tickets=5), groups(leased=5)])
def test_f9_the_alarm_does_not_depend_on_work_in_flight(in_flight: GroupCounts) -> None:
    assert judge(scene(groups=in_flight)).stalled


@pytest.mark.parametrize("calm", [{"quiet_s": 119.0}, {"finished": True}])
def test_no_alarm_while_there_is_progress_or_nothing_left_to_do(calm: dict[str, Any]) -> None:
    verdict = judge(scene(**calm))
    assert not verdict.stalled
    assert verdict.why is None
