"""The queue's decisions in simulated time, with faults: the rules hold, and a decision that is wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slipstream.rollout_queue.ledger import leases, tickets
from slipstream.rollout_queue.ledger.admission import Admission
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, TicketState
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.weight_sync.fleet import decisions
from tests.nights.faults import possible
from tests.nights.simulation import B, Broken, Simulation

STEPS = 20_000
# By then each of the wrong decisions has been met; most of them in the first tenth.
MAX_STEPS = 300_000


@pytest.mark.parametrize("seed", [0, 1])
def test_i1_i2_i3_i5_i7_hold_while_everything_is_hurt(seed: int) -> None:
    found = Simulation(seed, STEPS).run().happened
    assert found["optimiser step"] > STEPS / 100
    done = {fault.name for fault in possible("simulated") if found[fault.name]}
    assert len(done) >= 12, f"only {done} were done"


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_a_million_events() -> None:
    for seed in range(10, 14):
        found = Simulation(seed, 250_000).run().happened
        assert all(found[fault.name] for fault in possible("simulated"))


def more_is_admitted(right: Any) -> Any:
    return lambda *arguments: right(*arguments) + B


def no_version_is_skipped(right: Any) -> Any:
    """A resume continues with the version that the session before it had reached."""
    return lambda ledger, message: right(ledger, message) - bool(message.resume)


def nothing_waits_for_its_proof(right: Any) -> Any:
    return lambda *arguments: None


def nothing_is_undone(right: Any) -> Any:
    """What was trained after the checkpoint stays trained, although its step is made again."""

    def begin(ledger: Ledger, *arguments: Any) -> Decision:
        decision: Decision = right(ledger, *arguments)
        kept = [of for of in decision.tickets if ledger.get(of.id, TicketState.TRAINED) is None and ledger.get(of.id)]
        return msgspec.structs.replace(decision, tickets=tuple(kept))

    return begin


def nothing_expires(right: Any) -> Any:
    return lambda *arguments: Decision()


def nobody_is_too_far_behind(right: Any) -> Any:
    return lambda *arguments: None


def anybody_may_begin(right: Any) -> Any:
    return lambda *arguments: None


@pytest.mark.parametrize(
    ("where", "name", "wrong", "says"),
    [
        (Admission, "_bound", more_is_admitted, "over-age although nothing was hurt"),
        (leases, "_first_version", no_version_is_skipped, "is used again"),
        (ServerRegistry, "unproven", nothing_waits_for_its_proof, "I5: .* tokens of other weights"),
        (leases, "begin", nothing_is_undone, "I1: rows .* are lost"),
        (tickets, "expire", nothing_expires, "is held for ever|no step for"),
        (decisions, "find_lag", nobody_is_too_far_behind, "no step for .* nothing was hurt"),
        (leases, "_require_no_other", anybody_may_begin, "a second learner took the run"),
    ],
)
def test_a_wrong_decision_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Callable[[Any], Any], says: str
) -> None:
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    with pytest.raises(Broken, match=says):
        simulated(2, MAX_STEPS)


def simulated(seeds: int, steps: int) -> None:
    for seed in range(seeds):
        Simulation(seed, steps // seeds).run()
