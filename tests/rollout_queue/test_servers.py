"""Server states: what may follow what, and which groups a failed proof taints."""

from __future__ import annotations

import pytest

from protocol.messages import Server, ServerState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.ledger.servers import ALLOWED, Fleet

J, SY, SE, ST, Q, D = (
    ServerState.JOINING,
    ServerState.SYNCING,
    ServerState.SERVING,
    ServerState.STALE,
    ServerState.QUARANTINED,
    ServerState.DOWN,
)
WAY = {J: (), SY: (SY,), SE: (SY, SE), ST: (SY, ST), Q: (SY, Q), D: (SY, D)}
PERMITTED = {
    *((state, J) for state in ServerState),
    *((state, SY) for state in (J, SE, ST, Q, D)),
    *((SY, state) for state in (SE, ST, Q, D)),
    *((SE, state) for state in (SE, ST, Q, D)),
}


def put(fleet: Fleet, state: ServerState, version: int | None = None, serial: int = 0, name: str = "a") -> None:
    record = fleet.decide(Server(name, f"http://{name}", state, version), wall_time=5.0, serial=serial)
    if record is not None:
        fleet.apply(record)


def fleet_in(state: ServerState) -> Fleet:
    fleet = Fleet()
    put(fleet, J)
    for step in WAY[state]:
        put(fleet, step, 3)
    return fleet


@pytest.mark.parametrize("before", list(ServerState))
@pytest.mark.parametrize("after", list(ServerState))
def test_transitions(before: ServerState, after: ServerState) -> None:
    fleet = fleet_in(before)
    if (before, after) in PERMITTED:
        put(fleet, after, 4)
        assert fleet.servers[0].state is after
    else:
        with pytest.raises(Refusal) as refusal:
            put(fleet, after, 4)
        assert refusal.value.status == 409
        assert f"is {before} " in refusal.value.message
        assert f"become {after};" in refusal.value.message
        assert fleet.servers[0].state is before


def test_the_table_names_every_state() -> None:
    assert set(ALLOWED) == set(ServerState)


def test_an_unknown_server_must_join_first() -> None:
    with pytest.raises(Refusal, match="not registered"):
        put(Fleet(), SY)


def test_a_later_version_is_proven_while_the_one_before_serves() -> None:
    fleet = fleet_in(SE)
    put(fleet, SE, 4)
    assert fleet.served_version == 4


@pytest.mark.parametrize("state", [SE, Q])
def test_a_proof_needs_a_version(state: ServerState) -> None:
    fleet = Fleet()
    put(fleet, J)
    put(fleet, SY)
    with pytest.raises(Refusal, match="without a version"):
        put(fleet, state)


def test_i5_f16_a_restarted_server_is_unverified() -> None:
    fleet = fleet_in(SE)
    assert fleet.served_version == 3
    put(fleet, J)
    assert fleet.served_version is None
    assert fleet.servers[0].version is None


def test_served_version_is_the_lowest_that_serves() -> None:
    fleet = fleet_in(SE)
    for name, state, version in (("b", SE, 2), ("c", Q, 1)):
        put(fleet, J, name=name)
        put(fleet, SY, name=name)
        put(fleet, state, version, name=name)
    assert fleet.served_version == 2


def test_a_lost_answer_may_be_repeated() -> None:
    fleet = fleet_in(SE)
    changed_at = fleet.servers[0].changed_at
    assert fleet.decide(Server("a", "http://a", SE, 3), wall_time=99.0, serial=0) is None
    assert fleet.servers[0].changed_at == changed_at


def test_i5_tokens_sampled_under_a_failed_proof_are_tainted() -> None:
    fleet = fleet_in(SE)
    put(fleet, Q, 4, serial=10)
    assert fleet.unverified(["b", "a"], newest_version=4, serial=9) == "a"
    assert fleet.unverified(["a"], newest_version=3, serial=9) is None
    assert fleet.unverified(["b"], newest_version=4, serial=9) is None


def test_i5_the_taint_stays_on_tickets_that_were_out_then() -> None:
    fleet = fleet_in(SE)
    put(fleet, Q, 4, serial=10)
    put(fleet, SY, serial=12)
    put(fleet, SE, 4, serial=15)
    assert fleet.unverified(["a"], newest_version=4, serial=14) == "a"
    assert fleet.unverified(["a"], newest_version=4, serial=15) is None


def test_i5_a_second_failure_keeps_the_first_bad_version() -> None:
    fleet = fleet_in(SE)
    put(fleet, Q, 4)
    put(fleet, SY)
    put(fleet, Q, 6)
    assert fleet.unverified(["a"], newest_version=4, serial=0) == "a"
