"""Runs the queue's decisions without HTTP, on a store, with crashes at random times.

State machines that test these decisions are built on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger import evaluations, servers
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit.messages import SERVER


class SabotagedQueue(RuleBasedStateMachine):
    """Is the base of a state machine. The machine adds `run_config` and rules for the users of the queue.

    Attributes:
        run_config: The run file.
        now: The clock, in seconds.
        crash_after_commit: Whether the queue restarts after its next commit, before memory is updated.
    """

    run_config: ClassVar[RunConfig]

    def open_store(self) -> Store:
        """Open a new store for an example."""
        return MemoryStore()

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()
        self.now = 0.0
        self.crash_after_commit = False
        self.restart_queue()

    def teardown(self) -> None:
        self.store.close()

    # The queue carries out a decision on disk first and then in memory. A rule can ask for a crash in between.

    def restart_queue(self) -> None:
        contents = self.store.load()
        self.ledger = Ledger(self.run_config, contents, self.now)
        self.fleet = ServerRegistry(contents.servers)

    def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, self.now)
        bodies = {name: Payload.of(body) for name, body in (payloads or {}).items()}
        self.store.commit(Changes.of([decision], bodies, self.ledger.run.pruned_below))
        if self.crash_after_commit:
            self.crash_after_commit = False
            self.restart_queue()
            return
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)

    # Crashes of the queue.

    @rule()
    def queue_killed_between_answers(self) -> None:
        self.restart_queue()

    @rule()
    def queue_will_be_killed_after_its_next_commit(self) -> None:
        self.crash_after_commit = True

    # Weight sync.

    @rule()
    def publish(self) -> None:
        self.put_server(ServerState.SYNCING)
        self.put_server(ServerState.SERVING)

    @rule(state=st.sampled_from([ServerState.STALE, ServerState.DOWN]))
    def server_leaves_service(self, state: ServerState) -> None:
        self.put_server(ServerState.SYNCING)
        self.put_server(state)

    @rule()
    def server_drains(self) -> None:
        self.put_server(ServerState.SYNCING)
        self.commit(servers.drain(self.fleet, self.ledger, SERVER, 0.0))

    def put_server(self, state: ServerState) -> None:
        """Put the server into a state. A server that drains is removed first and registers again."""
        known = self.fleet.get(SERVER)
        if known is not None and known.state is ServerState.DRAINING:
            self.commit(servers.remove(self.fleet, self.ledger, [SERVER]))
        if self.fleet.get(SERVER) is None:
            joins = Server(SERVER, "http://s")
            self.commit(servers.put(self.fleet, self.ledger, joins, 0.0))
        wanted = Server(SERVER, "http://s", state, self.ledger.run.version)
        self.commit(servers.put(self.fleet, self.ledger, wanted, 0.0))
