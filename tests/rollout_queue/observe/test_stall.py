"""The stall alarm: from when it counts, when it is raised and what it blames."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.protocol import reasons
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import GroupCounts
from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState
from slipstream.rollout_queue.observe.causes import StallInputs, judge
from slipstream.rollout_queue.observe.progress import StepProgress, alarm_after_s

SERVING = [Server("vllm-0", "u", ServerState.SERVING, 3)]
DOWN = [*SERVING, Server("vllm-1", "u", ServerState.DOWN, 3, "connection refused")]
QUARANTINED = [Server("vllm-0", "u", ServerState.QUARANTINED, 3, "probe")]


def groups(tickets: int = 0, ready: int = 0, leased: int = 0) -> GroupCounts:
    outstanding = tickets + ready + leased
    return GroupCounts(tickets, ready, leased, outstanding, bytes=0, capacity_groups=9, capacity_bytes=9, limit=9)


def scene(**changes: Any) -> StallInputs:
    values: dict[str, Any] = {
        "quiet_s": 130.0,
        "alarm_after_s": 120.0,
        "stall_after_s": 120.0,
        "finished": False,
        "session": 1,
        "servers": SERVING,
        "groups": groups(),
        "groups_per_step": 4,
        "found_full": 0,
        "ended": {},
        "why_equal": "all are 0",
        "blocked_by": None,
        "learner_seen_s_ago": 1.0,
        "learner_waits_for": None,
        "worker_seen_s_ago": 1.0,
    }
    return StallInputs(**{**values, **changes})


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
        ("2 groups fill queue.capacity_bytes", {"groups": groups(ready=2), "found_full": 1}),
        ("workers were never heard from", {"worker_seen_s_ago": None}),
        ("workers hold 3 tickets", {"groups": groups(tickets=3)}),
        (
            "32 episodes wait for a vLLM server that answers",
            {"groups": groups(tickets=3), "blocked_by": "the depth limit", "waiting_for_servers": 32},
        ),
        ("no ticket is given: the depth limit", {"blocked_by": "the depth limit"}),
        ("the workers ask for none", {}),
        (
            "workers ask for none: see their logs; of the servers, vllm-1 is down (connection refused)",
            {"servers": DOWN},
        ),
        ("3 of the 4 groups that ended since the last step were lost to overage", {"ended": {"overage": 3, "row": 1}}),
        ("raise queue.max_staleness", {"ended": {"overage": 3, "row": 1}}),
        ("rollout.mask_truncated is on: raise rollout.max_episode_tokens", {"ended": {"truncated": 9}}),
        ("lost to zero_variance: all their rewards are equal: all are 0", {"ended": {"zero_variance": 600}}),
        ("raise queue.stall_after_s = 120", {"groups": groups(leased=4)}),
        ("16 groups failed", {"gave_up": "the first 16 groups failed", "session": 0}),
    ],
)
def test_i7_a_stall_names_the_first_broken_link(blame: str, changes: dict[str, Any]) -> None:
    verdict = judge(scene(**changes))
    assert verdict.stalled
    assert blame in (verdict.why or "")


@pytest.mark.parametrize("in_flight", [groups(), groups(tickets=5), groups(leased=5)])
def test_the_alarm_does_not_depend_on_work_in_flight(in_flight: GroupCounts) -> None:
    assert judge(scene(groups=in_flight)).stalled


@pytest.mark.parametrize("calm", [{"quiet_s": 119.0}, {"finished": True}])
def test_no_alarm_while_there_is_progress_or_nothing_left_to_do(calm: dict[str, Any]) -> None:
    verdict = judge(scene(**calm))
    assert not verdict.stalled
    assert verdict.why is None


@pytest.mark.parametrize("ended", [{"overage": 3}, {"overage": 3, "row": 3}])
def test_few_or_mixed_losses_are_not_blamed(ended: dict[str, int]) -> None:
    assert "lost to" not in (judge(scene(ended=ended)).why or "")


def test_a_long_step_raises_no_alarm_before_five_median_steps() -> None:
    assert alarm_after_s(120.0, None, trains=False) == alarm_after_s(120.0, 10.0, trains=True) == 120.0
    after_s = alarm_after_s(120.0, 100.0, trains=False)
    assert not judge(scene(quiet_s=499.0, alarm_after_s=after_s)).stalled
    assert judge(scene(quiet_s=500.0, alarm_after_s=after_s)).stalled


def test_nothing_counts_before_everything_is_there() -> None:
    progress = StepProgress(0.0, start_s=600.0)
    assert progress.quiet_s(600.0) == 0.0
    progress.expect_steps(1000.0)
    progress.expect_steps(1050.0)
    assert progress.quiet_s(1100.0) == 100.0
    progress.session_began(1400.0)
    assert progress.quiet_s(2000.0) == 0.0


def test_attack_6_who_never_comes_is_missed_once_a_start_takes_no_longer() -> None:
    """The learner may have never come, may have died before it was back at a restarted queue, or no server serves."""
    progress = StepProgress(1000.0, start_s=600.0)
    assert progress.quiet_s(1720.0) == 120.0
    progress.heard(1700.0)
    assert progress.quiet_s(1720.0) == 120.0, "that it lives brings no server"
    progress.session_began(1800.0)
    assert progress.quiet_s(2520.0) == 120.0


def test_attack_6_a_learner_that_is_not_heard_from_does_not_load() -> None:
    progress = StepProgress(0.0, start_s=600.0)
    progress.loads(100.0)
    progress.heard(500.0)
    assert progress.quiet_s(1100.0) == 0.0
    assert progress.quiet_s(1220.0) == 120.0
    progress.loaded(2000.0)
    progress.expect_steps(2000.0)
    progress.loads(2100.0)
    assert progress.quiet_s(2820.0) == 220.0


def test_attack_6_the_first_step_may_take_longer_than_nothing_at_all() -> None:
    assert alarm_after_s(120.0, None, trains=True) == 1200.0


def test_the_clock_stands_while_the_learner_loads() -> None:
    progress = StepProgress(0.0, start_s=600.0)
    progress.expect_steps(0.0)
    progress.loads(10.0)
    progress.loads(20.0)
    assert progress.quiet_s(500.0) == 10.0
    progress.loaded(500.0)
    progress.loaded(501.0)
    assert progress.quiet_s(505.0) == 15.0
    progress.loads(510.0)
    progress.stepped(600.0)
    progress.loaded(700.0)
    assert progress.quiet_s(701.0) == 1.0


def test_what_went_wrong_before_the_last_step_is_not_the_cause_of_the_next_episode() -> None:
    progress = StepProgress(0.0, start_s=600.0)
    progress.found_full()
    progress.ended[reasons.OVERAGE] += 5
    progress.stepped(1.0)
    assert (progress.full, dict(progress.ended)) == (0, {})


def test_made_up_reasons_take_no_room() -> None:
    progress = StepProgress(0.0, start_s=600.0)
    issued = TicketRecord(index=0, attempt=0, serial=0, worker_id="w", version=0)
    progress.tickets_ended(issued.to(TicketState.DROPPED, reason=f"failed:{number}") for number in range(1000))
    assert len(progress.ended) == 65
    assert progress.ended.total() == 1000
