from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.feeder import Feeder, LeaseLost, Starved
from slipstream.learner.feed.packing import PackedRow
from slipstream.protocol import reasons
from slipstream.protocol.client import GaveUp, QueueClient, QueueError, RunFinished, Unreachable
from slipstream.protocol.config import fingerprint
from slipstream.protocol.messages import (
    BeginSession,
    Group,
    LearnerReport,
    LeaseReply,
    LeaseRequest,
    Server,
    ServerState,
)
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger import leases
from slipstream.rollout_queue.ledger.records import TicketState
from tests.kit import LEARNER, config, group
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.learner import FakeQueue, endless, in_turn
from tests.kit.live_queue import live_queue
from tests.kit.queue import serve_version

REPORT = LearnerReport(1, 0.0, 0.0, 0.0, 1, 0.0, 0)


@contextmanager
def feeding(
    queue: FakeQueue, /, steps: int = 3, clock: Callable[[], float] = time.monotonic, **sections: dict[str, Any]
) -> Iterator[Feeder]:
    with BlockingQueueClient(cast(QueueClient, queue)) as client:
        start = client.call(lambda queue: queue.begin_session(BeginSession(0, 0, steps, resume=False)))
        with Feeder(config(LEARNER, **sections), client, start, clock) as feeder:
            yield feeder


def test_i1_batches_come_in_order_and_each_group_once() -> None:
    queue = FakeQueue(endless())
    trained = []
    with feeding(queue) as feeder:
        for step in (1, 2, 3):
            batch = feeder.next_batch()
            assert (batch.step, batch.version) == (step, step - 1)
            assert feeder.trained(batch, REPORT).version == step
            trained += batch.ticket_ids
    assert len(trained) == len(set(trained)) == 6
    assert queue.trained == trained
    assert not any(queue.leases.values())


def test_rows_for_a_gpu_are_pinned_in_the_feeder_s_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's thread would wait for it."""
    threads = []

    def pinned(row: PackedRow) -> PackedRow:
        threads.append(threading.current_thread().name)
        return replace(row, longest=-1)

    monkeypatch.setattr(PackedRow, "pinned", pinned)
    with BlockingQueueClient(cast(QueueClient, FakeQueue(endless()))) as client:
        start = client.call(lambda queue: queue.begin_session(BeginSession(0, 0, 1, resume=False)))
        with Feeder(config(LEARNER), client, start, pin=True) as feeder:
            batch = feeder.next_batch()
    assert [row.longest for row in batch.rows] == [-1] * len(batch.rows)
    assert set(threads) == {"queue-client"}


def test_no_group_is_leased_past_the_last_step() -> None:
    queue = FakeQueue(endless())
    with feeding(queue, steps=2, learner={"prefetch_steps": 5}) as feeder:
        for _ in range(2):
            feeder.trained(feeder.next_batch(), REPORT)
    assert sum(entry[2] for entry in queue.log if entry[0] == "lease") == 4


def test_prefetch_leases_the_next_step_while_this_one_trains_and_no_more() -> None:
    leased = threading.Event()
    queue = FakeQueue()
    supply = endless()

    def watched(n: int, version: int) -> list[Group]:
        groups = supply(n, version)
        if groups[0].ticket_id == "t2":
            leased.set()
        return groups

    queue.supply = watched
    with feeding(queue, learner={"prefetch_steps": 1}) as feeder:
        feeder.next_batch()
        assert leased.wait()
        assert {entry[1] for entry in queue.log if entry[0] == "lease"} == {"1-1", "1-2"}


def test_i2_a_prefetched_batch_is_judged_at_the_version_that_trains_it() -> None:
    """The groups of two steps are sampled at version 0, before the first: the second's are too old for K = 0."""
    old = [group(f"old{i}", [0, 1]) for i in range(4)]
    queue = FakeQueue(in_turn(*old, group("new0", [0, 1], (None, 1)), group("new1", [0, 1], (None, 1))))
    with feeding(queue, queue={"max_staleness": 0}) as feeder:
        batch = feeder.next_batch()
        assert batch.ticket_ids == ["old0", "old1"]
        feeder.trained(batch, REPORT)
        assert feeder.next_batch().ticket_ids == ["new0", "new1"]


def test_nothing_is_leased_for_a_step_for_which_whatever_can_be_sampled_now_is_too_old() -> None:
    """With K = 1, two steps may be held: a third would drop whatever comes until the first is trained."""
    numbers = itertools.count()
    queue = FakeQueue(lambda n, version: [group(f"t{next(numbers)}", [0, 1], (None, version)) for _ in range(n)])
    with feeding(queue, steps=6, learner={"prefetch_steps": 4}, queue={"max_staleness": 1}) as feeder:
        for _ in range(6):
            feeder.trained(feeder.next_batch(), REPORT)
    for step in range(3, 7):
        leased = next(i for i, entry in enumerate(queue.log) if entry[:2] == ("lease", f"1-{step}"))
        assert ("ack", step - 2) in queue.log[:leased]
    assert not queue.dropped


def test_groups_without_variance_are_given_up_at_once_and_replaced() -> None:
    """The supply stands still until the drop is acknowledged, as admission does."""
    queue = FakeQueue()
    flat, good = [group(f"flat{i}", [1, 1]) for i in range(2)], [group(f"good{i}", [0, 1]) for i in range(2)]
    first = in_turn(*flat)
    then = in_turn(*good)
    queue.supply = lambda n, version: then(n, version) if len(queue.dropped) == 2 else first(n, version)
    with feeding(queue, steps=1) as feeder:
        batch = feeder.next_batch()
        assert batch.ticket_ids == ["good0", "good1"]
        assert (batch.counts.rollouts, batch.counts.reward_mean) == (8, 0.75), "rewards are over the dropped groups too"
    assert queue.dropped == {"flat0": "zero_variance", "flat1": "zero_variance"}


def test_open_leases_are_renewed() -> None:
    queue = FakeQueue(endless(), expires_in_s=0.03)
    renewed = threading.Event()
    renew = queue.renew

    async def watched(lease_id: str, session: int, have: Sequence[str] = ()) -> dict[str, str]:
        if lease_id == "1-1" and not have:
            renewed.set()
        return await renew(lease_id, session, have)

    queue.renew = watched  # type: ignore[method-assign]
    with feeding(queue, steps=1) as feeder:
        batch = feeder.next_batch()
        assert renewed.wait()
        feeder.trained(batch, REPORT)
        queue.refuse_renewals = reasons.LEASE_LAPSED  # harmless: the lease is over


def test_a_lease_that_the_queue_refuses_to_renew_ends_the_learner() -> None:
    queue = FakeQueue(in_turn(group("a", [0, 1])), expires_in_s=0.03)
    queue.refuse_renewals = reasons.SESSION_SUPERSEDED
    with feeding(queue) as feeder, pytest.raises(LeaseLost, match=r"1-1 cannot be renewed: .*session_superseded"):
        feeder.next_batch()


@pytest.mark.parametrize("prefetched", [0, 2])
def test_i1_a_lease_that_lapses_costs_nothing_and_no_group_is_trained_twice(prefetched: int, tmp_path: Path) -> None:
    """The queue could not be reached for longer than leases last: whatever the learner holds goes back there, while it
    is in training, and while it is prepared."""
    settings = {"groups_per_step": 2, "prefetch_steps": prefetched, "zero_variance": "keep", "steps": 8}
    run_config = config(LEARNER, run={"dir": str(tmp_path)}, learner=settings)

    async def lapse(broker: Broker) -> None:
        for lease_id in {record.lease_id for record in broker.ledger.tickets(TicketState.LEASED)}:
            await broker.apply(leases.release(broker.ledger, lease_id or ""))
        broker.groups_came.notify()

    trained: list[str] = []
    with live_queue(run_config) as queue, BlockingQueueClient(QueueClient(queue.url)) as client:
        declared = fingerprint.of(run_config, tiny_tokenizer())
        start = client.call(lambda it: it.begin_session(BeginSession(0, 0, 8, resume=False, fingerprint=declared)))
        queue.call(lambda it: serve_version(it, 0))
        with Feeder(run_config, client, start) as feeder:
            for step in range(1, 9):
                asyncio.run_coroutine_threadsafe(lapse(queue.broker), queue.loop).result(30)
                batch = feeder.next_batch()
                asyncio.run_coroutine_threadsafe(lapse(queue.broker), queue.loop).result(30)
                time.sleep(0.1)  # whatever is prepared meanwhile asks for groups, these among them
                feeder.trained(batch, REPORT)
                queue.call(lambda it, step=step: serve_version(it, step))  # type: ignore[misc]
                trained += batch.ticket_ids
        counts = queue.call(lambda it: it.status()).ledger
    assert len(trained) == len(set(trained)) == counts.trained == 16


def test_open_leases_are_given_back_at_the_end() -> None:
    queue = FakeQueue(endless())
    with feeding(queue, learner={"prefetch_steps": 0}) as feeder:
        feeder.next_batch()
    assert ("release", "1-1") in queue.log
    assert queue.log[-1] == "closed"


def test_what_ends_the_thread_reaches_the_learner() -> None:
    queue = FakeQueue()
    queue.fail_lease = Unreachable("the queue did not answer")
    with feeding(queue) as feeder, pytest.raises(Unreachable, match="did not answer"):
        feeder.next_batch()


def test_a_starved_learner_gives_up_with_the_cause() -> None:
    ticks = itertools.count(step=400.0)
    with (
        feeding(FakeQueue(), clock=lambda: next(ticks)) as feeder,
        pytest.raises(Starved, match="stall_timeout_s = 3600 s: no worker is connected"),
    ):
        feeder.next_batch()


def test_the_wait_that_a_starved_learner_gives_up_after_begins_when_a_server_serves() -> None:
    """Hole 2, in the feeder: loading for an hour is not starving."""
    ticks, queue = itertools.count(step=400.0), FakeQueue()
    queue.fleet = [Server("vllm-0", "http://a", ServerState.JOINING)]
    asked, fleet = 0, queue.servers

    async def loads_for_long() -> list[Server]:
        nonlocal asked
        asked += 1
        if asked == 30:
            queue.fleet, queue.now.served_version = [Server("vllm-0", "http://a", ServerState.SERVING)], 0
        return await fleet()

    queue.servers = loads_for_long  # type: ignore[method-assign]
    with feeding(queue, clock=lambda: next(ticks)) as feeder, pytest.raises(Starved):
        feeder.next_batch()
    assert asked == 30
    assert len([entry for entry in queue.log if entry[0] == "lease"]) > 30


def test_the_learner_s_patience_exceeds_the_longest_time_to_a_group() -> None:
    with pytest.raises(
        ValueError, match=r"learner.stall_timeout_s = 1800 is not more than worker.episode_timeout_s = 18"
    ):
        config(LEARNER, learner={"stall_timeout_s": 1800.0})
    assert config(LEARNER).learner.stall_timeout_s == 3600
    config(LEARNER, learner={"stall_timeout_s": 5.0}, worker={"episode_timeout_s": 2.0, "reward_timeout_s": 2.0})


def test_a_lease_that_is_refused_since_the_run_gave_up_says_why() -> None:
    queue = FakeQueue()
    queue.fail_lease = GaveUp("the first 16 groups failed")
    with feeding(queue) as feeder, pytest.raises(GaveUp, match="the first 16 groups failed"):
        feeder.next_batch()


def test_a_run_that_was_finished_ends_the_wait() -> None:
    queue = FakeQueue()
    with feeding(queue) as feeder:
        queue.now.finished = True
        with pytest.raises(RunFinished):
            feeder.next_batch()


def test_a_version_that_the_queue_counts_otherwise_is_an_error() -> None:
    queue = FakeQueue(endless())

    async def elsewhere(*_: object) -> Any:
        queue.now.version = 9
        return queue.copy()

    with feeding(queue) as feeder:
        batch = feeder.next_batch()
        queue.ack = elsewhere  # type: ignore[method-assign]
        with pytest.raises(QueueError, match="version 9 after step 1, the learner at 1"):
            feeder.trained(batch, REPORT)


def test_i7_a_wait_that_lasts_is_reported_and_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.feed.blocking_client.REPORT_WAIT_AFTER_S", 0.0)
    queue = FakeQueue()
    supply = endless()
    queue.supply = lambda n, version: supply(n, version) if ("waiting", "groups") in queue.log else []
    with feeding(queue) as feeder:
        feeder.next_batch()
        waits = [entry for entry in queue.log if entry[0] == "waiting"]
    assert waits == [("waiting", "groups"), ("waiting", None)]


def test_attack_6_a_learner_that_loads_for_long_says_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.feed.blocking_client.REPORT_WAIT_AFTER_S", 0.0)
    monkeypatch.setattr("slipstream.learner.feed.blocking_client.REPORT_WAIT_AGAIN_S", 0.001)
    queue = FakeQueue()
    with BlockingQueueClient(cast(QueueClient, queue)) as client, client.waiting(1, "loading"):
        while queue.log.count(("waiting", "loading")) < 3:
            time.sleep(0.001)
    assert [entry for entry in queue.log if entry[0] == "waiting"][-1] == ("waiting", None)


def test_a_group_that_is_revoked_after_it_was_packed_is_replaced_before_its_step() -> None:
    queue = FakeQueue(endless())
    with feeding(queue) as feeder:
        feeder.trained(feeder.next_batch(), REPORT)
        queue.revoke = {"t2": reasons.UNVERIFIED_SERVER}
        batch = feeder.next_batch()
        assert "t2" not in batch.ticket_ids
        assert len(batch.ticket_ids) == 2
        assert batch.counts.groups_dropped == {"unverified_server": 1}
        assert batch.counts.groups_trained == 2
        feeder.trained(batch, REPORT)
    assert queue.dropped == {"t2": "unverified_server"}


def test_a_batch_that_is_revoked_whole_is_filled_anew() -> None:
    queue = FakeQueue(endless())
    queue.revoke = {"t0": reasons.UNVERIFIED_SERVER, "t1": reasons.UNVERIFIED_SERVER}
    with feeding(queue, steps=1) as feeder:
        batch = feeder.next_batch()
        assert batch.ticket_ids == ["t2", "t3"]
        assert batch.counts.groups_trained == 2
        feeder.trained(batch, REPORT)


def test_groups_of_a_lapsed_lease_leave_the_draft_and_stay_the_queues() -> None:
    """The first answer gives one group; by the second the lease has lapsed and the group went elsewhere."""
    queue = FakeQueue(in_turn(group("a", [0, 1])))
    lease = queue.lease

    async def lapse_once(request: LeaseRequest) -> LeaseReply:
        if request.have == ["a"]:
            del queue.leases[request.lease_id]["a"]
            queue.supply = in_turn(group("b", [0, 1]), group("c", [0, 1]))
            return LeaseReply(request.lease_id, [], [], 60.0, {"a": reasons.LEASE_LAPSED})
        return await lease(request)

    queue.lease = lapse_once  # type: ignore[method-assign]
    with feeding(queue, steps=1) as feeder:
        assert feeder.next_batch().ticket_ids == ["b", "c"]
    assert queue.dropped == {}
