"""What requests read of the whole fleet is what its records say, after any changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger.records import Refusal, ServerRecord
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry

NAMES = ["a", "b", "c"]
Event = tuple[str, ServerState | None, int]


def decided(fleet: ServerRegistry, event: Event) -> ServerRecord | None:
    """Return the record that an event leads to; None if it changes nothing. State None: the server is removed."""
    name, state, version = event
    if state is None:
        return fleet.gone(name)
    try:
        if state is ServerState.DRAINING:
            return fleet.leave(name, 1.0)
        return fleet.decide(Server(name, name, state, version, f"v{version}"), 1.0, 0)
    except Refusal:
        return None


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from([*ServerState, None]), st.integers(0, 3)),
        max_size=40,
    ).map(lambda events: [(name, state, 0) for name in NAMES for state in list(ServerState)[:3]] + events)
)
def test_every_view_is_of_the_newest_records(events: list[Event]) -> None:
    fleet, records, revision = ServerRegistry(), dict[str, ServerRecord](), 0
    for event in events:
        record, before = decided(fleet, event), fleet.servers
        _ = (fleet.served_version, fleet.records, fleet.all_serve(NAMES))  # a look keeps nothing back
        if record is None:
            continue
        fleet.apply(record)
        records[record.server.name] = record
        present = {name: of.server for name, of in records.items() if not of.removed}
        serving = {name: of.version for name, of in present.items() if of.state is ServerState.SERVING}
        assert {of.name: of for of in fleet.servers} == present
        assert {of.server.name: of for of in fleet.records} == {name: records[name] for name in present}
        assert fleet.served_version == min((version or 0 for version in serving.values()), default=None)
        for names in ([], ["a"], ["b", "c"], NAMES, ["ghost"]):
            assert fleet.all_serve(names) == (set(names) <= set(serving))
        assert {name: fleet.get(name) for name in NAMES} == {name: present.get(name) for name in NAMES}
        assert fleet.revision == revision + (fleet.servers != before)
        revision = fleet.revision
        restarted = ServerRegistry(records.values())
        assert (restarted.served_version, restarted.all_serve(NAMES)) == (fleet.served_version, fleet.all_serve(NAMES))


def test_a_list_that_was_read_may_be_changed() -> None:
    fleet = ServerRegistry([ServerRecord(Server("a", "u"))])
    fleet.servers.clear()
    fleet.records.clear()
    assert [server.name for server in fleet.servers] == ["a"]
    assert len(fleet.records) == 1
