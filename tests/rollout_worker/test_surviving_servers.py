"""Whole workers whose servers die, go stale or fail their proof in mid-turn: what is lost, and what is not."""

import asyncio
from collections import Counter

import pytest

from slipstream.protocol.messages import Server, ServerState
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault
from tests.kit.fake_vllm.policies import multiplying, scripted
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, fake, multiply, roll, row, task, until

GROUP, TICKETS = 8, 8
CONFIG = config(WORKER, rollout={"group_size": GROUP}, worker={"request_timeout_s": 3600.0}, queue={"max_staleness": 9})
SCRIPT = scripted(TOKENIZER, multiplying)
HEADER = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)


def continuing(token_ids, index):
    """Continues in the middle of a turn as it would have gone on without the break."""
    places = range(len(token_ids) - len(HEADER), -1, -1)
    begin = len(HEADER) + next(place for place in places if token_ids[place : place + len(HEADER)] == HEADER)
    return SCRIPT(token_ids[:begin], index)[len(token_ids) - begin :]


class Fleet:
    """Three servers, each with its own version, so that a span shows which one truly sampled it. The first stands
    still after `after` continuations, with others still to come; `calls`: those of the tool."""

    def __init__(self, after=5):
        self.turns = Counter()
        self.calls = 0
        self.fakes = [fake(self._policy(number, after), version=7 + number) for number in range(3)]
        self.queue = StandInQueue(tickets_for(TICKETS, GROUP, version=9))
        self.task = task(dataset=[row(12, b) for b in range(30, 30 + TICKETS)], tools=[self._tool()])

    def _policy(self, number, after):
        def policy(token_ids, index):
            self.turns[number] += 1
            if number == 0 and self.turns[0] == after:
                self.fakes[0].engine.pause()
            return continuing(token_ids, index)

        return policy

    def _tool(self):
        def counted(a: int, b: int) -> int:
            """Multiply.

            Args:
                a: One.
                b: Other.
            """
            self.calls += 1
            return multiply(a, b)

        counted.__name__ = "multiply"
        return counted

    async def run(self, strike):
        """Run the worker over all tickets; `strike` once the first server stands still with requests on it."""

        async def in_mid_turn():
            first, *others = [server.engine for server in self.fakes]
            await until(lambda: first.paused and first.running and not any(other.running for other in others))
            await until(lambda: len(self.queue.groups) > 0)
            strike()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_mid_turn())
            run = tasks.create_task(roll(self.task, *self.fakes, config=CONFIG, queue=self.queue))
        return run.result()

    def put(self, state, version=7):
        """The queue's record of the first server changes."""
        first, *others = self.queue.servers
        self.queue.servers = [Server(first.name, first.url, state, version, changed_at=2.0), *others]
        self.queue.changed.set()


@pytest.fixture
def heartbeats(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 0.02)


def sampled_by(run):
    """Tokens by server and version, over all rollouts."""
    tokens = Counter()
    for group in run.queue.groups:
        for rollout in group.rollouts:
            for span in rollout.segments[0].version_spans:
                tokens[group.server_names[span.server], span.version] += span.end - span.start
    return tokens


def check_nothing_lost(fleet, run, rollouts=GROUP * TICKETS):
    """All episodes came to their end, each token is some server's own, and the sums agree."""
    assert run.queue.failures == {}
    assert len(run.rollouts) == rollouts
    assert {(rollout.reward, rollout.turns, rollout.finish_reason) for rollout in run.rollouts} == {(1.0, 2, "stop")}
    tokens = sampled_by(run)
    assert set(tokens) <= {("vllm-0", 7), ("vllm-1", 8), ("vllm-2", 9)}, "a token named the wrong server"
    assert tokens.total() == run.worker.counters.tokens_sampled
    assert run.worker.report().requests_retried > 0


def check_each_token_arrived(fleet, run):
    generated = {f"vllm-{number}": server.engine.generated_tokens for number, server in enumerate(fleet.fakes)}
    assert {name: count for (name, _), count in sampled_by(run).items()} == generated


async def test_a_server_that_dies_in_mid_turn_costs_the_broken_turns_and_no_episode():
    fleet = Fleet()
    run = await fleet.run(fleet.fakes[0].crash)
    check_nothing_lost(fleet, run)
    check_each_token_arrived(fleet, run)
    assert sampled_by(run)["vllm-0", 7] > 0, "turns that it had finished stay"
    assert fleet.calls == GROUP * TICKETS, "no finished turn was sampled again"
    moved = [
        rollout for rollout in run.rollouts if len({span.server for span in rollout.segments[0].version_spans}) > 1
    ]
    assert len(moved) >= 5
    assert all(rollout.metrics["servers/moves"] >= 1.0 for rollout in moved)


async def test_a_server_that_the_registry_calls_down_is_left_at_once(heartbeats):
    """Its requests would hang for an hour."""
    fleet = Fleet()
    run = await fleet.run(lambda: fleet.put(ServerState.DOWN))
    check_nothing_lost(fleet, run)
    check_each_token_arrived(fleet, run)
    assert fleet.calls == GROUP * TICKETS


async def test_a_worker_that_asks_for_tickets_hears_of_a_server_that_leaves_before_its_next_heartbeat(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 3600.0)
    fleet = Fleet()
    async with asyncio.timeout(15):
        run = await fleet.run(lambda: fleet.put(ServerState.STALE))
    check_nothing_lost(fleet, run)


async def test_a_stale_server_hands_its_episodes_on_with_the_tokens_so_far(heartbeats):
    fleet = Fleet()
    fleet.fakes[0].engine.aborted_after = 3
    run = await fleet.run(lambda: fleet.put(ServerState.STALE))
    check_nothing_lost(fleet, run)
    check_each_token_arrived(fleet, run)
    in_mid_turn = [
        rollout
        for rollout in run.rollouts
        for before, after in zip(rollout.segments[0].version_spans, rollout.segments[0].version_spans[1:], strict=False)
        if before.end == after.start and before.server != after.server
    ]
    assert in_mid_turn, "no turn continued elsewhere after what the abort gave back"


async def test_i5_a_failed_proof_costs_the_episodes_with_its_tokens_and_the_groups_are_handed_in_without(heartbeats):
    """Five of a group hold tokens of the failed version; the three others, and all other groups, are whole."""
    fleet = Fleet()
    run = await fleet.run(lambda: fleet.put(ServerState.QUARANTINED))
    tainted = Counter(run.worker.counters.failures)["unverified_server"]
    assert tainted >= 5
    check_nothing_lost(fleet, run, rollouts=GROUP * TICKETS - tainted)
    assert ("vllm-0", 7) not in sampled_by(run)


async def test_i5_episodes_of_the_version_before_the_failed_one_are_kept(heartbeats):
    fleet = Fleet()
    run = await fleet.run(lambda: fleet.put(ServerState.QUARANTINED, version=8))
    check_nothing_lost(fleet, run)
    assert sampled_by(run)["vllm-0", 7] > 0


async def test_a_server_with_the_wrong_model_is_told_once_and_costs_nothing():
    fleet = Fleet(after=0)
    fleet.fakes[0].faults.append(Fault("status", status=404, times=None))
    run = await roll(fleet.task, *fleet.fakes, config=CONFIG, queue=fleet.queue)
    check_nothing_lost(fleet, run)
    (notice,) = run.worker.report().notices
    assert notice.kind == "server"
    assert "HTTP 404" in notice.text
    assert run.worker.counters.episodes_failed == 0


async def test_d2_a_server_that_refuses_whatever_is_asked_costs_nothing():
    fleet = Fleet(after=0)
    fleet.fakes[0].faults.append(Fault("status", status=400, times=None))
    run = await roll(fleet.task, *fleet.fakes, config=CONFIG, queue=fleet.queue)
    check_nothing_lost(fleet, run)
    assert run.worker.counters.episodes_failed == 0


async def test_d2_a_request_that_is_wrong_fails_its_ticket_with_what_vllm_said_and_no_other():
    fleet = Fleet(after=0)
    fleet.fakes[0].faults.append(Fault("status", status=400))
    run = await roll(fleet.task, fleet.fakes[0], config=CONFIG, queue=fleet.queue)
    (failure,) = run.queue.failures.values()
    assert (failure.reason, failure.retryable) == ("rejected", False)
    assert "HTTP 400: a fault was asked for" in failure.detail
    assert len(run.queue.groups) == TICKETS - 1


async def test_i7_a_worker_reports_the_episodes_that_wait_for_a_server():
    fleet = Fleet(after=0)
    for server in fleet.fakes:
        server.faults.append(Fault("status", status=404, times=None))
    many = config(WORKER, rollout={"group_size": GROUP}, worker={"request_attempts": 99})
    run = await roll(
        fleet.task,
        *fleet.fakes,
        config=many,
        queue=fleet.queue,
        stop_when=lambda worker: worker.report().waiting_for_servers == GROUP * TICKETS,
    )
    assert run.worker.report().waiting_for_servers == 0
