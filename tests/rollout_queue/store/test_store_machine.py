"""Every store keeps the same of the same run: the queue's state machines on all of them at once, with restarts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any, TypeVar

import msgspec
from hypothesis import settings
from hypothesis.stateful import rule

from slipstream.protocol.config import RunConfig
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger import evaluations
from slipstream.rollout_queue.ledger.records import Decision, StoreContents, TicketRecord
from slipstream.rollout_queue.store.base import Store, StoreSize
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.postgres import cluster, find_programs
from tests.kit.queue_machine import SabotagedQueue
from tests.rollout_queue.ledger.test_evaluation_machine import EvaluationMachine
from tests.rollout_queue.ledger.test_ledger import LearnableQueue, QueueMachine

T = TypeVar("T")

_examples = count()


@cache
def database() -> str:
    return cluster().new_database()


class EveryStore:
    """Is a store in memory that others have to agree with: SQLite, and PostgreSQL where it is installed."""

    blocks = False

    def __init__(self) -> None:
        self._open = ExitStack()
        folder = self._open.enter_context(tempfile.TemporaryDirectory())
        kinds = ["sqlite", *([database()] if find_programs() else [])]
        name = f"example-{next(_examples)}"
        self._configs = [config(run={"dir": folder, "name": name}, queue={"store": kind}) for kind in kinds]
        self._memory = MemoryStore()
        self._others: list[Store] = [self._opened(each) for each in self._configs]

    def reopen(self) -> None:
        """Open all but that in memory again, as after a restart of the queue."""
        for index, run_config in enumerate(self._configs):
            self._others[index].close()
            self._others[index] = self._opened(run_config)

    def _opened(self, run_config: RunConfig) -> Store:
        store = stores.build(run_config)
        assert store.acquire() is None
        return store

    def acquire(self) -> str | None:
        return None

    def commit(self, changes: Changes) -> None:
        for store in (self._memory, *self._others):
            store.commit(changes)

    def load(self) -> StoreContents:
        return self._agreed(lambda store: store.load(), _sorted)

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
        return self._agreed(lambda store: store.payloads(ticket_ids))

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        return self._agreed(lambda store: store.records(ticket_ids))

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        return self._agreed(lambda store: sorted(store.forgotten_after(step), key=lambda record: record.id))

    def first_forgotten_after(self, step: int) -> int | None:
        return self._agreed(lambda store: store.first_forgotten_after(step))

    def size(self) -> StoreSize:
        return self._memory.size()

    def close(self) -> None:
        for store in self._others:
            store.close()
        self._open.close()

    def _agreed(self, ask: Callable[[Any], T], shape: Callable[[T], T] = lambda found: found) -> T:
        found = shape(ask(self._memory))
        for store in self._others:
            assert shape(ask(store)) == found, type(store).__name__
        return found


def _sorted(contents: StoreContents) -> StoreContents:
    return msgspec.structs.replace(contents, to_reissue=sorted(contents.to_reissue, key=lambda record: record.id))


class _OverEveryStore(SabotagedQueue):
    """A queue over every store, all of which are opened again with it."""

    store: EveryStore

    def open_store(self) -> Store:
        return EveryStore()

    def restart_queue(self) -> None:
        self.store.reopen()
        super().restart_queue()


class RestartedQueue(_OverEveryStore, LearnableQueue):
    pass


class RestartedEvaluations(_OverEveryStore, EvaluationMachine):
    pass


class _CommittedInGroups(SabotagedQueue):
    """A queue whose decisions go one by one into its own store, and in groups into another, that has to agree."""

    def __init__(self) -> None:
        self.grouped: Store = EveryStore()
        self.decisions: list[Decision] = []
        self.bodies: dict[str, Payload] = {}
        self.pruned_below = 0
        self.named: set[str] = set()
        super().__init__()

    def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        self.decisions.append(evaluations.with_ends(self.ledger, self.fleet, decision, self.now))
        self.bodies |= {name: Payload.of(body) for name, body in (payloads or {}).items()}
        super().commit(decision, payloads)

    @rule()
    def a_group_is_committed(self) -> None:
        self.grouped.commit(changes := Changes.of(self.decisions, self.bodies, self.pruned_below))
        self.named |= {*changes.tickets, *self.bodies}
        self.pruned_below = changes.prune_below or self.pruned_below
        self.decisions, self.bodies = [], {}
        assert _sorted(self.grouped.load()) == _sorted(self.store.load())
        for ask in ("records", "payloads"):
            assert getattr(self.grouped, ask)([*self.named]) == getattr(self.store, ask)([*self.named])

    def teardown(self) -> None:
        self.a_group_is_committed()
        self.grouped.close()
        super().teardown()


class GroupedQueue(_CommittedInGroups, QueueMachine):
    pass


class GroupedEvaluations(_CommittedInGroups, EvaluationMachine):
    pass


TestGroupsOfDecisions = GroupedQueue.TestCase
TestGroupsOfDecisions.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestGroupsOfEvaluations = GroupedEvaluations.TestCase
TestGroupsOfEvaluations.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestI1OnEveryStore = RestartedQueue.TestCase
TestI1OnEveryStore.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestEvaluationsOnEveryStore = RestartedEvaluations.TestCase
TestEvaluationsOnEveryStore.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
