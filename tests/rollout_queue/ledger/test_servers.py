"""Server states: what may follow what, and which groups a failed proof taints."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.messages import Rollout, Server, ServerState
from slipstream.rollout_queue.ledger import leases
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    GroupFacts,
    Refusal,
    RunState,
    SampledBy,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.server_registry import ALLOWED, ServerRegistry
from slipstream.rollout_queue.ledger.servers import distrust_unproven, drain, put, remove
from tests.kit import config, group
from tests.kit.messages import segment

J, SY, SE, ST, Q, D, DR = (
    ServerState.JOINING,
    ServerState.SYNCING,
    ServerState.SERVING,
    ServerState.STALE,
    ServerState.QUARANTINED,
    ServerState.DOWN,
    ServerState.DRAINING,
)
WAY = {J: (), SY: (SY,), SE: (SY, SE), ST: (SY, ST), Q: (SY, Q), D: (SY, D), DR: (SY, SE, DR)}
PERMITTED = {
    *((state, J) for state in ServerState if state is not DR),
    *((state, SY) for state in (J, SE, ST, Q, D)),
    *((SY, state) for state in (SE, ST, Q, D)),
    *((SE, state) for state in (SE, ST, Q, D)),
    *((state, D) for state in (J, ST, Q)),
    *((state, DR) for state in ServerState if state is not DR),
}
# The verdict on a version that was on its way when the drain began: it is kept, and the server drains on.
KEPT = {(DR, SE), (DR, Q)}


def move(
    fleet: ServerRegistry, state: ServerState, version: int | None = None, serial: int = 0, name: str = "a"
) -> None:
    record = fleet.decide(Server(name, f"http://{name}", state, version), wall_time=5.0, serial=serial)
    if record is not None:
        fleet.apply(record)


def fleet_in(state: ServerState) -> ServerRegistry:
    fleet = ServerRegistry()
    move(fleet, J)
    for step in WAY[state]:
        move(fleet, step, 3)
    return fleet


def sampled_by(servers: list[str], newest_version: int) -> GroupFacts:
    return sampled(**dict.fromkeys(servers, (0, newest_version)))


def sampled(**versions: tuple[int, int]) -> GroupFacts:
    """A group of which each server sampled the versions from one to another."""
    return GroupFacts(bytes=1, tokens=1, servers=tuple(SampledBy(name, *of_it) for name, of_it in versions.items()))


@pytest.mark.parametrize("before", list(ServerState))
@pytest.mark.parametrize("after", list(ServerState))
def test_transitions(before: ServerState, after: ServerState) -> None:
    fleet = fleet_in(before)
    if (before, after) in PERMITTED:
        move(fleet, after, 4)
        assert fleet.servers[0].state is after
    elif (before, after) in KEPT:
        move(fleet, after, 4)
        assert fleet.servers[0].state is before
    else:
        with pytest.raises(Refusal) as refusal:
            move(fleet, after, 4)
        assert refusal.value.reason == "transition_forbidden"
        assert f"is {before} " in refusal.value.message
        assert f"become {after};" in refusal.value.message
        assert fleet.servers[0].state is before


def test_the_table_names_every_state() -> None:
    assert set(ALLOWED) == set(ServerState)


def test_an_unknown_server_must_join_first() -> None:
    with pytest.raises(Refusal, match="not registered"):
        move(ServerRegistry(), SY)


def test_a_later_version_is_proven_while_the_one_before_serves() -> None:
    fleet = fleet_in(SE)
    move(fleet, SE, 4)
    assert fleet.served_version == 4


@pytest.mark.parametrize("state", [SE, Q])
def test_a_proof_needs_a_version(state: ServerState) -> None:
    fleet = ServerRegistry()
    move(fleet, J)
    move(fleet, SY)
    with pytest.raises(Refusal, match="without a version"):
        move(fleet, state)


def test_i5_a_restarted_server_is_unverified() -> None:
    fleet = fleet_in(SE)
    assert fleet.served_version == 3
    move(fleet, J)
    assert fleet.served_version is None
    assert fleet.servers[0].version is None


def test_served_version_is_the_lowest_that_serves() -> None:
    fleet = fleet_in(SE)
    for name, state, version in (("b", SE, 2), ("c", Q, 1)):
        move(fleet, J, name=name)
        move(fleet, SY, name=name)
        move(fleet, state, version, name=name)
    assert fleet.served_version == 2


def test_a_lost_answer_may_be_repeated() -> None:
    fleet = fleet_in(SE)
    changed_at = fleet.servers[0].changed_at
    assert fleet.decide(Server("a", "http://a", SE, 3), wall_time=99.0, serial=0) is None
    assert fleet.servers[0].changed_at == changed_at


def test_i5_tokens_sampled_under_a_failed_proof_are_tainted() -> None:
    fleet = fleet_in(SE)
    move(fleet, Q, 4, serial=10)
    assert fleet.distrusted(sampled_by(["b", "a"], 4), serial=9) == "a"
    assert fleet.distrusted(sampled_by(["a"], 3), serial=9) is None
    assert fleet.distrusted(sampled_by(["b"], 4), serial=9) is None


def test_i5_the_taint_stays_on_tickets_that_were_out_then() -> None:
    fleet = fleet_in(SE)
    move(fleet, Q, 4, serial=10)
    move(fleet, SY, serial=12)
    move(fleet, SE, 4, serial=15)
    assert fleet.distrusted(sampled_by(["a"], 4), serial=14) == "a"
    assert fleet.distrusted(sampled_by(["a"], 4), serial=15) is None


def test_i5_a_second_failure_keeps_the_first_bad_version() -> None:
    fleet = fleet_in(SE)
    move(fleet, Q, 4)
    move(fleet, SY)
    move(fleet, Q, 6)
    assert fleet.distrusted(sampled_by(["a"], 4), serial=0) == "a"


def test_i5_a_failed_proof_drops_the_ready_groups_that_it_taints_and_no_others() -> None:
    def ready(index: int, servers: list[str], newest_version: int) -> TicketRecord:
        ticket = TicketRecord(index=index, attempt=0, serial=index, worker_id="w", version=0)
        return ticket.to(TicketState.READY, group=sampled_by(servers, newest_version))

    groups = [ready(0, ["a", "b"], 4), ready(1, ["a"], 3), ready(2, ["b"], 4)]
    counts = {TicketState.READY: 3}
    ledger = Ledger(config(), StoreContents(live=groups, counts=counts, next_index=3), now=0.0)
    decision = put(fleet_in(SE), ledger, Server("a", "http://a", Q, 4, "probe"), wall_time=5.0)
    assert [(record.id, record.state, record.reason) for record in decision.tickets] == [
        ("0.0", TicketState.DROPPED, "unverified_server")
    ]
    assert [record.server.state for record in decision.servers] == [Q]
    assert not put(fleet_in(Q), ledger, Server("a", "http://a", Q, 3), wall_time=9.0), "a repeat changes nothing"


def test_taint_goes_by_the_spans_of_the_server_that_failed() -> None:
    """The group is of versions 3 to 5, but `a` sampled version 3 of it alone, before its weights went wrong."""
    fleet = fleet_in(SE)
    move(fleet, Q, 4, serial=10)
    assert fleet.distrusted(sampled(a=(3, 3), b=(4, 5)), serial=9) is None
    assert fleet.distrusted(sampled(a=(3, 4), b=(5, 5)), serial=9) == "a"


def test_what_a_server_samples_after_it_is_proven_again_is_good_for_old_tickets_too() -> None:
    fleet = fleet_in(SE)
    move(fleet, Q, 4, serial=10)
    move(fleet, SY, serial=12)
    move(fleet, SE, 6, serial=15)
    assert fleet.distrusted(sampled(a=(6, 6)), serial=9) is None
    assert fleet.distrusted(sampled(a=(5, 6)), serial=9) == "a"


def test_a_version_that_failed_and_was_then_pushed_rightly_ends_with_the_next_one() -> None:
    fleet = fleet_in(SE)
    move(fleet, Q, 4, serial=10)
    move(fleet, SY)
    move(fleet, SE, 4, serial=15)
    assert fleet.distrusted(sampled(a=(5, 5)), serial=14) == "a", "it may have sampled more before the proof"
    move(fleet, SE, 5, serial=20)
    assert fleet.distrusted(sampled(a=(5, 5)), serial=14) is None
    assert fleet.distrusted(sampled(a=(4, 4)), serial=14) == "a"
    assert fleet.distrusted(sampled(a=(4, 4)), serial=15) is None


@pytest.mark.parametrize("gone", [J, D])
def test_an_episode_that_left_a_crashed_server_for_a_good_one_is_taken(gone: ServerState) -> None:
    """Unreachable is not unproven."""
    fleet = fleet_in(SE)
    move(fleet, gone, serial=1)
    for state, version in ((J, None), (SY, None), (SE, 3)):
        move(fleet, state, version, name="b")
    fleet.check_group(sampled(a=(3, 3), b=(3, 3)), serial=0)


def test_attack_7_a_server_that_joined_again_samples_for_no_later_ticket_until_it_is_proven() -> None:
    fleet = fleet_in(SE)
    for state, version, serial in ((J, None, 10), (J, None, 20), (SY, None, 30)):
        move(fleet, state, version, serial)
        fleet.check_group(sampled(a=(3, 3)), serial=9)
        with pytest.raises(Refusal, match="joined again") as refusal:
            fleet.check_group(sampled(a=(3, 3)), serial=10)
        assert refusal.value.reason == "unverified_server"
    move(fleet, SE, 3, serial=40)
    fleet.check_group(sampled(a=(3, 3)), serial=10)


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("ghost", None, "span_server_unknown"),
        ("", None, "span_server_unknown"),
        ("new", J, "unverified_server"),
        ("new", SY, "unverified_server"),
        ("new", Q, "unverified_server"),
    ],
)
def test_the_door_takes_nothing_from_a_server_that_never_served(
    name: str, state: ServerState | None, reason: str
) -> None:
    fleet = fleet_in(SE)
    for step in () if state is None else (J, *WAY[state]):
        move(fleet, step, 3, name=name)
    fleet.check_group(sampled(a=(3, 3)), serial=0)
    with pytest.raises(Refusal) as refusal:
        fleet.check_group(sampled(**{"a": (3, 3), name: (3, 3)}), serial=0)
    assert refusal.value.reason == reason


def test_facts_of_a_group_say_which_server_sampled_which_versions() -> None:
    versions = (None, 3, 4, 5)
    rollouts = [
        Rollout([segment(versions, server=0)], 0.0, "stop"),
        Rollout([segment((None, 7), server=1)], 1.0, "stop"),
    ]
    facts = GroupFacts.of(group(server_names=["b", "a", "idle"], rollouts=rollouts), 9)
    assert facts == GroupFacts(9, 4, 3, (SampledBy("a", 7, 7), SampledBy("b", 3, 5)))


def test_i5_facts_of_a_group_keep_apart_what_a_server_sampled_before_and_after_a_failed_proof() -> None:
    """One range from 3 to 5 would cover the version 4 that failed, of which the group has no token."""
    fleet = fleet_in(SE)
    for state, version in ((Q, 4), (SY, None), (SE, 5)):
        move(fleet, state, version, serial=9)
    facts = GroupFacts.of(group(server_names=["a"], versions=(None, 3, 5, 5)), 9)
    assert facts.servers == (SampledBy("a", 3, 3), SampledBy("a", 5, 5))
    assert fleet.distrusted(facts, serial=0) is None
    assert fleet.distrusted(GroupFacts.of(group(server_names=["a"], versions=(3, 4, 5)), 9), serial=0) == "a"


def test_facts_of_a_group_stay_small_whatever_versions_it_names() -> None:
    facts = GroupFacts.of(group(server_names=["a"], versions=range(0, 2000, 2)), 9)
    assert len(facts.servers) == 32
    assert facts.servers[-1] == SampledBy("a", 62, 1998), "what is beyond is one range: distrusted rather than trusted"


def test_i5_a_restarted_server_sampled_nothing_for_tickets_of_later_until_it_is_proven_again() -> None:
    fleet = fleet_in(SE)
    move(fleet, J, serial=10)
    move(fleet, SY, serial=12)
    move(fleet, J, serial=14)
    fleet.check_group(sampled(a=(3, 3)), serial=9)
    with pytest.raises(Refusal) as refusal:
        fleet.check_group(sampled(a=(3, 3)), serial=10)
    assert refusal.value.reason == "unverified_server"
    move(fleet, SY, serial=15)
    move(fleet, SE, 3, serial=16)
    fleet.check_group(sampled(a=(3, 3)), serial=12)


def test_the_fleet_has_a_greatest_size_and_its_reasons_too() -> None:
    fleet = ServerRegistry()
    for number in range(1024):
        move(fleet, J, name=str(number))
    with pytest.raises(Refusal, match="1024 servers") as refusal:
        move(fleet, J, name="one more")
    assert refusal.value.reason == "too_many"
    record = fleet.decide(Server("5", "u", J, reason="r" * 9999), 0.0, 0)
    assert record is not None
    assert record.server.reason == "r" * 1024


# Between a swap and its proof (I5), and leaving.


def ledger_with(*groups: TicketRecord) -> Ledger:
    return Ledger(config(), StoreContents(live=list(groups), run=RunState(version=5, step=5, session=1)), 0.0)


def ready(index: int, facts: GroupFacts) -> TicketRecord:
    return TicketRecord(index=index, attempt=0, serial=index, worker_id="w", version=0).to(
        TicketState.READY, group=facts
    )


def test_i5_what_was_sampled_between_swap_and_proof_is_not_leased_before_the_proof() -> None:
    fleet, ledger = fleet_in(SE), ledger_with(ready(0, sampled(a=(3, 4))), ready(1, sampled(a=(3, 3))))
    assert fleet.unproven(sampled(a=(3, 4))) == "a"
    assert [record.id for record in leases.lease(ledger, fleet, "l", 9).tickets] == ["1.0"]
    move(fleet, SE, 4)
    assert [record.id for record in leases.lease(ledger, fleet, "l", 9).tickets] == ["0.0", "1.0"]


@pytest.mark.parametrize("state", [ST, Q, D, J])
def test_i5_what_awaits_its_proof_is_dropped_where_the_server_leaves_service_before_it(state: ServerState) -> None:
    fleet, ledger = fleet_in(SE), ledger_with(ready(0, sampled(a=(3, 4))), ready(1, sampled(a=(3, 3))))
    decision = put(fleet, ledger, Server("a", "http://a", state, 4 if state is Q else None), 0.0)
    assert [(record.id, record.reason) for record in decision.tickets] == [("0.0", "unverified_server")]
    for record in decision.servers:
        fleet.apply(record)
    with pytest.raises(Refusal) as refusal:
        fleet.check_group(sampled(a=(3, 4)), serial=0)
    assert refusal.value.reason == "unverified_server"
    if state is not J:  # of which the tickets since then take nothing
        fleet.check_group(sampled(a=(3, 3)), serial=0)  # unreachable is not unproven


def test_i5_what_a_learner_left_unproven_when_it_died_is_distrusted_by_the_next_session() -> None:
    fleet, ledger = fleet_in(SE), ledger_with(ready(0, sampled(a=(4, 4))), ready(1, sampled(a=(2, 3))))
    for record in distrust_unproven(fleet, ledger, 6).servers:
        fleet.apply(record)
    move(fleet, SE, 6, serial=9)
    decision = leases.lease(ledger, fleet, "l", 9)
    assert {record.id: record.state for record in decision.tickets} == {
        "0.0": TicketState.DROPPED,
        "1.0": TicketState.LEASED,
    }
    assert fleet.distrusted(sampled(a=(6, 6)), serial=9) is None


def test_sessions_that_prove_nothing_do_not_pile_up_distrust() -> None:
    fleet = fleet_in(SE)
    for version in range(6, 60):
        for record in distrust_unproven(fleet, ledger_with(), version).servers:
            fleet.apply(record)
    assert len(fleet.records[0].distrust) == 1


def test_a_server_that_leaves_drains_then_is_gone_and_its_distrust_outlives_it() -> None:
    fleet, ledger = fleet_in(SE), ledger_with()
    move(fleet, Q, 4, serial=3)
    for decision in (drain(fleet, ledger, "a", 1.0), drain(fleet, ledger, "a", 2.0)):
        for record in decision.servers:
            fleet.apply(record)
    assert [server.state for server in fleet.servers] == [DR]
    assert fleet.served_version is None
    for record in remove(fleet, ledger, ["a"]).servers:
        fleet.apply(record)
    assert fleet.servers == []
    assert fleet.get("a") is None
    assert fleet.distrusted(sampled(a=(4, 4)), serial=0) == "a"
    fleet.check_group(sampled(a=(3, 3)), serial=0)  # what it sampled before stays good
    assert fleet.leave("a", 0.0) is None
    with pytest.raises(Refusal, match="not registered"):
        fleet.leave("b", 0.0)
    move(fleet, J)
    assert fleet.distrusted(sampled(a=(4, 4)), serial=0) == "a"


@pytest.mark.parametrize("verdict", [SE, Q])
def test_a_version_that_was_on_its_way_when_the_drain_began_is_judged_and_the_server_drains_on(
    verdict: ServerState,
) -> None:
    """I5, and I1: what a server sampled by weights that proved good was refused, as it was draining."""
    fleet, ledger = fleet_in(SE), ledger_with()
    for record in drain(fleet, ledger, "a", 1.0).servers:
        fleet.apply(record)
    assert fleet.records[0].awaits_verdict
    fleet.check_group(sampled(a=(3, 4)), serial=0)  # waits for the verdict
    move(fleet, verdict, 4)
    assert [(of.state, of.version, of.changed_at) for of in fleet.servers] == [(DR, 4, 1.0)]
    assert not fleet.records[0].awaits_verdict
    for record in remove(fleet, ledger, ["a"]).servers:
        fleet.apply(record)
    fleet.check_group(sampled(a=(3, 3)), serial=0)
    with pytest.raises(Refusal, match="failed their proof or left") if verdict is Q else nullcontext():
        fleet.check_group(sampled(a=(3, 4)), serial=0)


def test_a_draining_server_to_which_nothing_came_any_more_waits_for_no_verdict() -> None:
    fleet, ledger = fleet_in(SE), ledger_with()
    for record in drain(fleet, ledger, "a", 1.0).servers:
        fleet.apply(record)
    move(fleet, DR)
    assert not fleet.records[0].awaits_verdict
    with pytest.raises(Refusal, match="never proven"):  # and will not be
        fleet.check_group(sampled(a=(3, 4)), serial=0)


def test_the_reason_of_a_state_may_change_and_its_beginning_does_not() -> None:
    fleet = fleet_in(ST)
    record = fleet.decide(Server("a", "http://a", ST, None, "why"), wall_time=99.0, serial=0)
    assert record is not None
    assert (record.server.reason, record.server.changed_at, record.server.version) == ("why", 5.0, 3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("state"), st.sampled_from(list(ServerState)), st.integers(0, 9)),
            st.tuples(st.just("session"), st.just(SE), st.integers(0, 9)),
        ),
        max_size=25,
    ),
    st.integers(0, 9),
)
def test_i5_nothing_is_leased_that_no_proof_has_vouched_for(
    events: list[tuple[str, ServerState, int]], version: int
) -> None:
    """Whatever a server goes through, a group of one version is leased only if that version, or a newer one, was proven
    on it, and no failure of an older or the same version stands against it."""
    fleet, proven = ServerRegistry(), -1
    move(fleet, J)
    for what, state, number in events:
        if what == "session":
            for record in distrust_unproven(fleet, ledger_with(), number).servers:
                fleet.apply(record)
            continue
        try:
            move(fleet, state, number)
        except Refusal:
            continue
        if state is SE:
            proven = max(proven, number)
    facts = sampled(a=(version, version))
    leased = leases.lease(ledger_with(ready(0, facts)), fleet, "l", 1).tickets
    if leased and leased[0].state is TicketState.LEASED:
        assert proven >= version
        assert fleet.distrusted(facts, 0) is None


def test_a_serving_server_becomes_slow_and_no_longer_is_without_a_change_of_state() -> None:
    fleet = fleet_in(SE)
    before = fleet.get("a")
    assert before is not None
    for slow in ("up to 9 s", None):
        record = fleet.decide(Server("a", "http://a", SE, before.version, slow=slow), wall_time=99.0, serial=7)
        assert record is not None
        fleet.apply(record)
        now = fleet.get("a")
        assert now is not None
        assert (now.slow, now.state, now.version, now.changed_at) == (slow, SE, before.version, before.changed_at)
    assert fleet.decide(Server("a", "http://a", SE, before.version), wall_time=99.0, serial=7) is None
