"""What limits a run under way, from the learner's steps, the workers' slots, and versions on their way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slipstream.protocol.messages import LearnerReport, WorkerReport
from slipstream.rollout_queue.observe.limits import (
    LimitInputs,
    LimitWindow,
    SlotTimes,
    limit_of,
    scaling_of,
    slowest_tool,
)
from slipstream.rollout_queue.observe.windows import ToolCounts
from slipstream.rollout_queue.observe.workers import WorkerReports
from tests.kit.config import config


def inputs(**changes: Any) -> LimitInputs:
    shares = dict.fromkeys(LimitInputs.__struct_fields__, 0.0)
    return LimitInputs(**{**shares, "slots": 128, "requests": 128, "more": 0.3, **changes})


@pytest.mark.parametrize(
    ("given", "queue", "part", "said"),
    [
        ({"learner_wait": 0.02, "ticket_wait": 0.6}, {}, "learner", "The learner limits the run: the learner waits 2%"),
        ({"learner_wait": 0.8}, {}, "servers", "The vLLM servers limit the run: the learner waits 80% of its time"),
        ({"learner_wait": 0.8, "slots": 32}, {}, "workers' slots", "all 32 are taken, and the servers would run 128"),
        ({"learner_wait": 0.8, "slots": 32, "more": 0.02}, {}, "servers", "The vLLM servers limit the run"),
        ({"learner_wait": 0.5, "ticket_wait": 0.5}, {"max_staleness": 0}, "staleness bound", "queue.max_staleness = 0"),
        ({"learner_wait": 0.5, "ticket_wait": 0.5}, {"depth": 1}, "staleness bound", "queue.depth = 1"),
        ({"learner_wait": 0.9, "ticket_wait": 0.8, "in_tools": 0.9}, {}, "tools", "90% of their time in tools"),
        ({"learner_wait": 0.9, "ticket_wait": 0.8, "in_judgement": 0.9}, {}, "judge", "90% of their time in judgement"),
        ({"learner_wait": 0.9, "open_wait": 0.6, "in_tools": 0.8}, {}, "tools", "80% of their time in tools"),
        ({"learner_wait": 0.8, "ticket_wait": 0.8, "publishing": 1.0}, {}, "publication", "servers 100% of the time"),
        ({"learner_wait": 0.02, "ticket_wait": 0.02}, {}, None, "No part by itself limits the run: the learner waits"),
    ],
)
def test_the_part_that_others_wait_for_limits(
    given: dict[str, Any], queue: dict[str, Any], part: str | None, said: str
) -> None:
    limit = limit_of(inputs(**given), config({"queue": queue}))
    assert limit.part == part
    assert said in limit.text


@pytest.mark.parametrize(
    ("given", "counts", "wanted"),
    [
        # Servers that are all busy, with slots enough: one more.
        ({"learner_wait": 0.8}, (2, 4), (3, 4)),
        # Slots four times as many as the servers run at once: fewer workers.
        ({"learner_wait": 0.8, "slots": 512}, (2, 4), (3, 3)),
        # The learner limits, and the slots wait: fewer of both.
        ({"learner_wait": 0.02, "ticket_wait": 0.6}, (4, 4), (3, 3)),
        # As many as the learner needs.
        ({"learner_wait": 0.05, "ticket_wait": 0.05}, (4, 2), (4, 2)),
        # Tools take the time: workers, and no servers.
        ({"learner_wait": 0.9, "in_tools": 0.95}, (2, 4), (1, 5)),
        # Groups under way are few: servers make each quicker, and more workers would wait, too.
        ({"learner_wait": 0.5, "ticket_wait": 0.5}, (1, 1), (2, 1)),
        # The last one stays.
        ({"learner_wait": 0.0, "ticket_wait": 0.9}, (1, 1), (1, 1)),
    ],
)
def test_one_more_is_wanted_where_it_brings_its_share(
    given: dict[str, Any], counts: tuple[int, int], wanted: tuple[int, int]
) -> None:
    found = scaling_of(inputs(**given), config(), *counts, ranks=1)
    assert (found.servers_wanted, found.workers_wanted) == wanted, found.one_more


def test_no_more_workers_are_wanted_than_the_queue_takes() -> None:
    few = config({"queue": {"max_workers": 4}})
    assert scaling_of(inputs(learner_wait=0.9, in_tools=0.95), few, 2, 4, ranks=1).workers_wanted == 4


def test_what_was_added_is_not_taken_away_again() -> None:
    """Of servers that limit, the time that the learner waits falls as theirs grows."""
    for servers in range(1, 20):
        limits = inputs(learner_wait=0.8, slots=4096, requests=128 * servers)
        if scaling_of(limits, config(), servers, 8, ranks=1).servers_wanted > servers:
            gain = scaling_of(limits, config(), servers, 8, ranks=1).one_more["server"]
            after = inputs(learner_wait=max(0.0, 1 - 0.2 * (1 + gain)), slots=4096, requests=128 * (servers + 1))
            assert scaling_of(after, config(), servers + 1, 8, ranks=1).servers_wanted > servers


def test_the_tool_that_takes_most_of_the_time_is_named() -> None:
    tools = {"search": ToolCounts(calls=40, seconds=90.0), "add": ToolCounts(calls=400, seconds=10.0)}
    assert slowest_tool({}) is slowest_tool({"add": ToolCounts(calls=3)}) is None
    slow = inputs(learner_wait=0.9, ticket_wait=0.8, in_tools=0.9, slowest_tool=slowest_tool(tools))
    said = "; episodes pass 90% of their time in tools, 90% of that in search, 2.2 s a call."
    assert limit_of(slow, config()).text.endswith(said)


@pytest.mark.parametrize(
    ("share", "every", "advised"), [(0.09, 1, None), (0.13, 1, 2), (0.13, 2, 4), (0.3, 1, 4), (1.0, 3, 42)]
)
def test_publications_that_take_much_of_the_servers_are_advised_less_often(
    share: float, every: int, advised: int | None
) -> None:
    run = config({"weight_sync": {"every": every}})
    servers = limit_of(inputs(learner_wait=0.9, published=share), run)
    assert servers.part == "servers"
    said = f"weight_sync.every = {every} to {advised}"
    assert (said in servers.text) if advised else ("weight_sync.every" not in servers.text)
    learner = limit_of(inputs(ticket_wait=0.9, published=share), run)
    assert (learner.part, "weight_sync.every" in learner.text) == ("learner", False)


@pytest.mark.parametrize(
    ("reported", "share"), [(0.2, 0.2), (-1.0, 0.0), (7.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0)]
)
def test_what_publications_take_is_the_newest_report_and_forgotten_with_the_session(
    reported: float, share: float
) -> None:
    window = LimitWindow()
    window.slots(SlotTimes(slot_s=40.0, episode_s=40.0), 9.0)
    for number in range(1, 12):
        reports = {3: {"weight_sync/generation_share": 0.5}, 5: {"weight_sync/generation_share": reported}}
        window.stepped(msgspec.structs.replace(step(number, wait_s=0.9), metrics=reports.get(number, {})))
    found = window.inputs(4, 4, 10.0)
    assert found is not None
    assert found.published == share
    window.session_began()
    for number in range(12, 20):
        window.stepped(step(number, wait_s=0.9))
    found = window.inputs(4, 4, 10.0)
    assert found is not None
    assert found.published == 0.0


def test_what_a_tool_took_long_ago_hides_nothing_of_what_workers_do_now() -> None:
    window = LimitWindow()
    for number in range(1, 40):
        window.stepped(step(number, wait_s=0.9))
        window.slots(SlotTimes(slot_s=4.0, episode_s=4.0), float(number))
    for second in range(40, 71):
        window.slots(SlotTimes(slot_s=4.0, episode_s=4.0, tools_s=3.8), float(second))
    found = window.inputs(4, 4, 70.0)
    assert found is not None
    assert found.in_tools > 0.9


def step(number: int, wait_s: float) -> LearnerReport:
    return LearnerReport(number, 0.5, wait_s, 1.0, tokens_trained=1, staleness_mean=0.0, staleness_max=0)


def heartbeat(elapsed_s: float, waited_s: float, **counts: int) -> WorkerReport:
    return WorkerReport("w", [], capacity=4, elapsed_s=elapsed_s, waited_s=waited_s, **counts)


def test_a_window_holds_the_newest_steps_and_minutes() -> None:
    window = LimitWindow()
    workers = WorkerReports(8, window.slots)
    window.session_began()
    # The first step waits for the start; three more are wanted.
    for number, wait_s in enumerate((60.0, 0.5, 0.5), start=1):
        window.stepped(step(number, wait_s))
    workers.report(heartbeat(10.0, 10.0), now=10.0)
    assert window.inputs(4, 8, now=10.0) is None
    window.stepped(step(4, 0.2))
    found = window.inputs(4, 8, now=10.0)
    assert found is not None
    assert (found.learner_wait, found.ticket_wait) == (pytest.approx(0.4), 1.0)
    # Between two heartbeats the slots waited for 2 s of 10; the first ones are forgotten after five minutes.
    workers.report(heartbeat(290.0, 10.0), now=290.0)
    workers.report(heartbeat(300.0, 12.0, episodes_generating=1, episodes_in_tools=3), now=300.0)
    found = window.inputs(4, 8, now=580.0)
    assert found is not None
    assert (found.ticket_wait, found.in_tools, found.in_judgement) == (pytest.approx(2 / 290), 0.75, 0.0)
    found = window.inputs(4, 8, now=605.0)
    assert found is not None
    assert found.ticket_wait == pytest.approx(0.2)
    # A worker that was started again counts from its start.
    workers.report(heartbeat(1.0, 1.0), now=640.0)
    found = window.inputs(4, 8, now=640.0)
    assert found is not None
    assert found.ticket_wait == 1.0


def test_a_version_is_on_its_way_until_all_servers_have_it() -> None:
    window = LimitWindow()
    WorkerReports(8, window.slots).report(heartbeat(10.0, 0.0), now=10.0)
    for number in range(1, 12):
        window.stepped(step(number, 0.5))

    def share(now: float) -> float:
        found = window.inputs(4, 8, now)
        assert found is not None
        return found.publishing

    window.versions(1, 0, now=10.0)
    window.versions(2, 0, now=11.0)
    window.versions(2, 1, now=12.0)
    assert share(14.0) == pytest.approx(0.4), "of the ten steps' 10 s"
    window.versions(2, 2, now=15.0)
    assert share(18.0) == pytest.approx(0.5)
    assert share(23.0) == pytest.approx(0.2)
    assert share(30.0) == 0.0
    window.session_began()
    assert window.inputs(4, 8, now=30.0) is None
