"""Whole workers against fake servers and the stand-in queue."""

import asyncio
import json
import logging

import pytest

from slipstream.protocol.client import QueueRefused, Unreachable
from slipstream.protocol.messages import ErrorBody, Server, ServerState, TicketReply
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.data.order import RowOrder
from slipstream.rollout_worker.worker import work
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault, serving
from tests.kit.fake_vllm.engine import logprob_of
from tests.kit.fake_vllm.policies import in_turn, multiplying, scripted
from tests.kit.fake_vllm.tokenizer import build_tokenizer, save_model_folder
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for
from tests.kit.worker import TOKENIZER, ReadableOnce, accuracy, fake, multiply, roll, row, task, until

LONG = config(WORKER, rollout={"max_turn_tokens": 600, "max_episode_tokens": 2000}, vllm={"max_model_len": 4000})


def repr_of(value):
    return type(value).__name__


def idle(worker):
    """Whether nothing is left of any ticket: every permit back."""
    return worker.capacity.free == worker.capacity.total


@pytest.mark.parametrize("stream", [True, False])
async def test_every_ticket_becomes_a_group_of_its_row(stream):
    rows = [row(number, 7, number=number) for number in range(10, 16)]
    the_task = task(dataset=rows)
    run = await roll(the_task, fake(), fake(), tickets=9, stream_first_turn=stream)
    assert sorted(group.index for group in run.queue.groups) == list(range(9))
    for group in run.queue.groups:
        assert group.epoch == group.index // 6
        number = the_task.row_for(group.index, 0).columns["number"]
        for rollout in group.rollouts:
            assert f"Multiply {number} by 7." in TOKENIZER.decode(rollout.segments[0].token_ids)
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
        assert len({rollout.segments[0].version_spans[0].server for rollout in group.rollouts}) == 1, (
            "one prompt, one server"
        )
        assert group.versions() == [7]
        assert group.worker_id == "w0"
    assert {name for group in run.queue.groups for name in group.server_names} == {"vllm-0", "vllm-1"}
    assert run.queue.failures == {}
    assert idle(run.worker)


async def test_a_rollout_holds_what_the_server_sampled():
    server = fake()
    run = await roll(task(), server)
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        text = TOKENIZER.decode(segment.token_ids[segment.loss_mask], skip_special_tokens=False)
        call = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
        assert text == call + "<|im_end|>408<|im_end|>"
        first = TOKENIZER.encode(call + "<|im_end|>", add_special_tokens=False)
        starts = [span.start for span in segment.version_spans]
        assert len(starts) == 2
        assert segment.logprobs[starts[0] : starts[0] + len(first)].tolist() == pytest.approx(
            [logprob_of(token, place) for place, token in enumerate(first)]
        )
        assert (rollout.turns, rollout.tool_calls, rollout.tool_failures) == (2, 1, 0)
        assert rollout.reward_components == {"accuracy": 1.0}
        assert set(rollout.timings) == {"generate", "tools", "reward", "total"}
        assert 0 < rollout.metrics.pop("tools/multiply/seconds") <= rollout.timings["tools"]
        assert rollout.metrics == {"tools/offered": 1.0, "tools/multiply/calls": 1.0, "tools/multiply/failures": 0.0}


async def test_a_group_says_what_its_rewards_weigh():
    run = await roll(task(rewards=[accuracy, brief], reward_weights=[2, 0.5]), fake())
    for group in run.queue.groups:
        assert group.reward_weights == {"accuracy": 2.0, "brief": 0.5}
        for rollout in group.rollouts:
            assert rollout.reward_components == {"accuracy": 1.0, "brief": None}
            assert rollout.reward == 2.0


def brief(completions, **columns):
    return [None] * len(completions)


async def test_a_refused_suffix_becomes_a_second_segment_of_the_rollout(monkeypatch):
    append = TemplateFormat.suffix_ids

    async def refused(chat, prompt_ids, turn_ids, messages):
        """None for the row's conversation. The format check before the run has others."""
        if "Multiply 12 by 34." in TOKENIZER.decode(prompt_ids):
            return None
        return await append(chat, prompt_ids, turn_ids, messages)

    monkeypatch.setattr(TemplateFormat, "suffix_ids", refused)
    run = await roll(task(), fake(), fake())
    for group in run.queue.groups:
        for rollout in group.rollouts:
            first, second = (TOKENIZER.decode(of.token_ids, skip_special_tokens=False) for of in rollout.segments)
            assert first.endswith('"arguments": {"a": 12, "b": 34}}</tool_call><|im_end|>')
            assert second.startswith(first.partition("<|im_start|>assistant")[0])
            assert second.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n408<|im_end|>")
            sampled = [TOKENIZER.decode(of.token_ids[of.loss_mask]) for of in rollout.segments]
            assert sampled[1] == "408<|im_end|>"
            assert {span.server for of in rollout.segments for span in of.version_spans} <= {0, 1}
            assert (rollout.reward, rollout.metrics["chat/new_segments"]) == (1.0, 1.0)
            messages = json.loads(rollout.messages.decode("utf-8"))
            assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert run.queue.failures == {}


async def test_the_conversation_is_kept_with_its_prompt():
    run = await roll(task(), fake())
    messages = json.loads(run.rollouts[0].messages.decode("utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (messages[0]["content"], messages[-1]["content"]) == ("Multiply 12 by 34.", "408")


async def test_the_conversation_that_is_kept_begins_with_the_run_files_system_prompt():
    """As the policy read it; the rewards get the row's own prompt."""
    run = await roll(task(), fake(), config=config(WORKER, chat={"system_prompt": "Be brief."}))
    messages = json.loads(run.rollouts[0].messages.decode("utf-8"))
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in messages[1:]] == ["user", "assistant", "tool", "assistant"]
    assert "Be brief." in TOKENIZER.decode(run.rollouts[0].segments[0].token_ids)


async def test_no_conversation_is_kept_where_none_is_wanted():
    run = await roll(task(), fake(), config=config(WORKER, worker={"keep_messages": False}))
    assert [rollout.messages for rollout in run.rollouts] == [None, None]


class Hostile:
    def __str__(self):
        raise SystemExit(0)

    __repr__ = __str__


@pytest.mark.parametrize("odd", [Hostile(), {1, 2}, {(): 1}, "\ud800"], ids=["hostile", "set", "key", "surrogate"])
async def test_i9_what_a_reward_puts_into_messages_is_not_kept(odd):
    def meddling(completions, **columns):
        for messages in completions:
            messages.append({"role": "note", "content": odd})
        return [1.0] * len(completions)

    run = await roll(task(rewards=[meddling]), fake())
    for rollout in run.rollouts:
        assert [m["role"] for m in json.loads(rollout.messages)] == ["user", "assistant", "tool", "assistant"]
    assert len(run.rollouts) == 2


async def test_messages_are_json_whatever_was_sampled():
    call = '<tool_call>{"name": "multiply", "arguments": {"a": NaN, "b": 2}}</tool_call>'
    server = fake(scripted(TOKENIZER, in_turn([call, "done"])))
    run = await roll(task(), server)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for rollout in run.rollouts:
        first = json.loads(rollout.messages, parse_constant=refuse)[1]
        assert first["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": 2}


async def test_a_ticket_of_another_kind_is_given_back_for_good():
    (ticket,) = tickets_for(1)
    ticket.kind = "probe"
    server = fake()
    run = await roll(task(), server, queue=StandInQueue([ticket]))
    failure = run.queue.failures["t0"]
    assert (failure.reason, failure.retryable) == ("ticket_kind", False)
    assert "kind 'probe', and this worker knows train and eval only" in failure.detail
    assert server.requests == []
    assert idle(run.worker)


async def test_i5_spans_name_the_server_that_sampled_them():
    """The group begins on vllm-0, which fails from its second request on."""
    lost, other = fake(), fake(version=8)

    def leave(text, index):
        if "tool_response" not in text:
            lost.faults.append(Fault("status", status=503, times=None))
        return multiplying(text, index)

    lost.engine.policy = scripted(TOKENIZER, leave)
    run = await roll(task(), lost, other)
    (group,) = run.queue.groups
    assert group.server_names == ["vllm-0", "vllm-1"]
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        assert [(span.version, group.server_names[span.server]) for span in segment.version_spans] == [
            (7, "vllm-0"),
            (8, "vllm-1"),
        ]


async def test_i5_a_server_whose_tokens_are_not_kept_is_not_named():
    """Four episodes over two servers; those of the first one get no reward."""
    servers = [fake(scripted(TOKENIZER, lambda text, index, name=name: name)) for name in ("first", "second")]

    def silent_on_the_first(completions, **columns):
        return [None if turns[-1]["content"] == "first" else 1.0 for turns in completions]

    run_config = config(WORKER, rollout={"group_size": 4}, vllm={"max_num_seqs": 1})
    run = await roll(task(rewards=[silent_on_the_first]), *servers, config=run_config)
    (group,) = run.queue.groups
    assert [len(server.requests) for server in servers] == [2, 2]
    assert group.server_names == ["vllm-1"]
    assert {span.server for rollout in group.rollouts for span in rollout.segments[0].version_spans} == {0}


async def test_i5_a_group_on_two_servers_names_both():
    """Four episodes over two servers, each with its own version."""
    run_config = config(WORKER, rollout={"group_size": 4}, vllm={"max_num_seqs": 1})
    run = await roll(task(), fake(version=7), fake(version=8), config=run_config)
    (group,) = run.queue.groups
    assert group.server_names == ["vllm-0", "vllm-1"]
    sampled = [
        {(span.version, span.server) for span in rollout.segments[0].version_spans} for rollout in group.rollouts
    ]
    assert sorted(map(sorted, sampled)) == [[(7, 0)], [(7, 0)], [(8, 1)], [(8, 1)]]


async def test_text_prompts_give_text_completions():
    seen = []

    def reward(completions, prompts, **columns):
        seen.extend([*completions, *prompts])
        return [1.0] * len(completions)

    server = fake(scripted(TOKENIZER, lambda text, index: " 408"))
    await roll(task(dataset=[{"prompt": "12 times 34 is"}], tools=[], rewards=[reward]), server)
    assert seen == [" 408"] * 2 + ["12 times 34 is"] * 2


async def test_the_report_counts_what_was_done():
    queue = StandInQueue(tickets_for(4, 2))
    run = await roll(task(), fake(), queue=queue)
    report = run.worker.report()
    assert (report.episodes_done, report.tool_calls, report.episodes_failed) == (8, 8, 0)
    assert report.tokens_sampled == sum(group.sampled_tokens for group in queue.groups)
    assert report.elapsed_s > 0
    assert report.cpu_s > 0
    assert report.capacity == 256
    assert report.ticket_ids == []
    assert queue.reports[0].worker_id == "w0"


async def test_no_more_tickets_are_asked_for_than_there_is_room():
    """Seven slots hold three groups of two, and no more is open until a group has succeeded; then as many as keep the
    slots busy, up to the most."""
    queue = StandInQueue(tickets_for(20, 2))
    most = {"before a group succeeded": 0, "after": 0}
    original = queue.tickets

    async def tickets(request):
        reply = await original(request)
        when = "after" if queue.groups else "before a group succeeded"
        most[when] = max(most[when], 2 * (queue.issued - len(queue.groups)))
        return reply

    async def slow(completions, answer, **columns):
        await until(lambda: len(queue.groups) >= 3 or queue.issued >= 3)
        if 3 < queue.issued < 8:
            await until(lambda: 2 * (queue.issued - len(queue.groups)) == 10 or not queue.tickets_left)
        return accuracy(completions, answer)

    queue.tickets = tickets
    run_config = config(WORKER, worker={"episodes": 7, "open_episodes": 11})
    run = await roll(task(rewards=[slow]), fake(), queue=queue, config=run_config)
    assert len(queue.groups) == 20
    assert queue.requests[0].max_tickets == 3
    assert most == {"before a group succeeded": 6, "after": 10}
    assert idle(run.worker)
    assert (run.worker.capacity.open, run.worker.report().max_open) == (0, 11)


async def test_groups_that_are_judged_leave_their_slots_to_others():
    """With slots for one group, later ones are judged before the second: it waits for all others."""
    queue = StandInQueue(tickets_for(6, 2))
    reports = []

    async def judge(completions, answer, **columns):
        judge.calls += 1
        if judge.calls == 2:
            await until(lambda: len(queue.groups) == 5)
            reports.append(run_worker[0].report())
        return accuracy(completions, answer)

    judge.calls = 0
    run_worker = []

    def seen(worker):
        run_worker[:] = [worker]
        return False

    run_config = config(WORKER, worker={"episodes": 2})
    run = await roll(task(rewards=[judge]), fake(), queue=queue, config=run_config, stop_when=seen)
    assert len(queue.groups) == 6
    (then,) = reports
    assert (then.episodes_in_flight, then.episodes_in_judgement) == (2, 2)
    assert (then.episodes_generating, then.episodes_waiting, then.episodes_in_tools) == (0, 0, 0)
    assert idle(run.worker)


async def test_a_group_of_more_episodes_than_there_are_slots_is_made():
    server = fake()
    run_config = config(WORKER, rollout={"group_size": 50}, worker={"episodes": 20})
    run = await roll(task(), server, tickets=2, config=run_config)
    assert [len(group.rollouts) for group in run.queue.groups] == [50, 50]
    assert {rollout.reward for rollout in run.rollouts} == {1.0}
    assert {len({span.server for span in rollout.segments[0].version_spans}) for rollout in run.rollouts} == {1}
    assert any("slots" in rollout.timings for rollout in run.rollouts)
    assert (run.worker.capacity.free, run.worker.capacity.open, run.worker.capacity.waiting) == (20, 0, 0)


async def test_a_slow_tool_of_one_episode_does_not_hold_up_another():
    """The first call only returns when every other episode has asked for its second turn."""
    server = fake()
    waiting = []

    async def slow_once(a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        waiting.append(None)
        if len(waiting) == 1:
            await until(lambda: len(server.requests) == 4)
        return a * b

    slow_once.__name__ = "multiply"
    run = await roll(task(tools=[slow_once]), server, config=config(WORKER, rollout={"group_size": 4}))
    assert [rollout.tool_failures for rollout in run.rollouts] == [0] * 4
    assert [rollout.reward for rollout in run.rollouts] == [1.0] * 4


async def test_a_slow_reward_of_one_group_does_not_hold_up_another():
    queue = StandInQueue(tickets_for(3, 2))

    async def slow_once(completions, answer, **columns):
        if not slow_once.called:
            slow_once.called = True
            await until(lambda: len(queue.groups) == 2)
        return accuracy(completions, answer)

    slow_once.called = False
    await roll(task(rewards=[slow_once]), fake(), queue=queue)
    assert len(queue.groups) == 3


async def test_long_episodes_come_through_as_often_as_short_ones():
    rows = [row(2, 99 if number % 4 == 0 else 3) for number in range(16)]

    def wordy(text, index):
        return "hm " * 40 if "by 99." in text and "tool_response" in text else multiplying(text, index)

    server = fake(scripted(TOKENIZER, wordy))
    run = await roll(task(dataset=rows), server, tickets=16, config=config(WORKER, rollout={"max_turn_tokens": 200}))
    sizes = [group.sampled_tokens for group in run.queue.groups]
    assert len(sizes) == 16
    assert sum(size > 1.5 * min(sizes) for size in sizes) == 4


async def test_a_stuck_episode_is_bounded_and_only_shrinks_its_group():
    """Two of four requests are never answered."""
    server = fake(faults=[Fault("hang"), Fault("hang")])
    queue = StandInQueue(tickets_for(1, 4))
    run_config = config(
        WORKER,
        rollout={"group_size": 4},
        worker={"episode_timeout_s": 2.0, "request_timeout_s": 30.0},
        vllm={"max_num_seqs": 1},
    )
    run = await roll(task(), server, queue=queue, config=run_config)
    (group,) = queue.groups
    assert len(group.rollouts) == 2
    assert run.worker.counters.failures["timeout"] == 2
    assert idle(run.worker)


async def test_a_group_of_which_too_few_are_left_gives_its_ticket_back():
    server = fake(faults=[Fault("no_logprobs", times=3)])
    run_config = config(WORKER, rollout={"group_size": 4}, vllm={"max_num_seqs": 1})
    run = await roll(task(), server, config=run_config)
    failure = run.queue.failures["t0"]
    assert (failure.reason, failure.retryable) == ("missing_logprobs", True)
    assert "3 of 4 episodes failed: server vllm-0 at http" in failure.detail
    assert "no log-probs for" in failure.detail
    assert run.queue.groups == []
    assert run.worker.counters.episodes_failed == 3
    assert idle(run.worker)


def raising(completions, **columns):
    raise ValueError("no such column")


def half_silent(completions, answer, **columns):
    return [1.0] + [None] * (len(completions) - 1)


@pytest.mark.parametrize(
    ("changes", "fault", "reason", "retryable"),
    [
        ({"rewards": [raising]}, None, "reward", True),
        ({"rewards": [half_silent]}, None, "no_reward", True),
        ({"dataset": ReadableOnce([row()])}, None, "row", False),
        ({"dataset": [row(), {**row(), "prompt": []}]}, None, "row", False),
        ({"dataset": [row(), {**row(), "prompt": [{"role": "user"}]}]}, None, "prompt", False),
        ({"dataset": [row(), row(b=int("1" * 2000))]}, None, "prompt", False),
        ({}, Fault("status", status=400, times=None), "rejected", False),
        ({}, Fault("stream_error", status=400, times=None), "rejected", False),
    ],
)
async def test_no_failure_ends_the_worker_or_keeps_a_permit(changes, fault, reason, retryable):
    server = fake(faults=[fault] if fault else [])
    run = await roll(task(**changes), server, tickets=2)
    assert {(f.reason, f.retryable) for f in run.queue.failures.values()} == {(reason, retryable)}
    assert run.worker.counters.failures[f"failed:{reason}"] == len(run.queue.failures) >= 1
    assert len(run.queue.failures) + len(run.queue.groups) == 2
    assert idle(run.worker)


async def test_an_error_that_nobody_foresaw_costs_one_ticket(monkeypatch):
    first = iter([True])
    original = RowOrder.row_for

    def row_for(self, *place):
        if next(first, False):
            raise ExceptionGroup("odd", [RuntimeError("deep")])
        return original(self, *place)

    monkeypatch.setattr(RowOrder, "row_for", row_for)
    run = await roll(task(), fake(), tickets=2)
    assert len(run.queue.groups) == 1
    assert idle(run.worker)


async def test_i5_a_restarted_server_is_reported_stale_and_gets_nothing_more():
    restarted, sound = fake(), fake()
    restarted.engine.restart()
    run = await roll(task(), restarted, sound, tickets=6)
    assert len(run.queue.groups) == 6
    assert {version for group in run.queue.groups for version in group.versions()} == {7}
    assert [(server.name, server.state) for server in run.queue.put] == [("vllm-0", ServerState.JOINING)]
    assert len(restarted.requests) <= 3, "no request after the first answers"


async def test_i5_no_ticket_is_taken_while_no_server_serves(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._IDLE_HEARTBEAT_S", 0.005)
    queue = StandInQueue(tickets_for(1, 2), [Server("vllm-0", "http://127.0.0.1:1", ServerState.SYNCING)])
    server = fake()
    original = queue.heartbeat

    async def heartbeat(report):
        if len(queue.reports) == 3:
            assert queue.requests == []
            queue.servers = serving_at(url, version=7)
        return await original(report)

    queue.heartbeat = heartbeat
    async with serving(server) as url:
        run = await roll(task(), queue=queue)
    assert len(queue.groups) == 1
    assert idle(run.worker)


async def test_an_answer_without_tickets_says_nothing_of_servers():
    queue = StandInQueue(tickets_for(1, 2))
    original = queue.tickets
    empty = iter([True, True])

    async def tickets(request):
        return TicketReply([], None) if next(empty, False) else await original(request)

    queue.tickets = tickets
    await roll(task(), fake(), queue=queue)
    assert len(queue.groups) == 1


async def test_a_group_refused_for_a_lost_ticket_is_counted():
    queue = StandInQueue(tickets_for(2, 2), keep_open=True)
    queue.submit_error = QueueRefused(410, ErrorBody("ticket_ended", "ticket was superseded"))
    run = await roll(task(), fake(), queue=queue, stop_when=lambda worker: worker.counters.failures["lost"] == 2)
    assert queue.failures == {}
    assert idle(run.worker)


async def test_a_group_refused_at_the_door_is_counted_by_reason_and_told_once(caplog):
    queue = StandInQueue(tickets_for(3, 2), keep_open=True)
    queue.submit_error = QueueRefused(422, ErrorBody("logprobs_nan", "log-probs are not finite"))
    with caplog.at_level(logging.WARNING, "slipstream.rollout_worker"):
        run = await roll(
            task(),
            fake(),
            queue=queue,
            stop_when=lambda worker: worker.counters.failures["refused:logprobs_nan"] == 3,
        )
    assert sum("log-probs are not finite" in record.message for record in caplog.records) == 1
    assert idle(run.worker)


async def test_a_stopped_worker_gives_its_tickets_back():
    server = fake(faults=[Fault("hang", times=None)])
    queue = StandInQueue(tickets_for(3, 2), keep_open=True)
    run = await roll(task(), server, queue=queue, stop_when=lambda worker: len(server.calls) == 3)
    assert {ticket: failure.reason for ticket, failure in queue.failures.items()} == dict.fromkeys(
        ["t0", "t1", "t2"], "worker_stopped"
    )
    assert all(failure.retryable for failure in queue.failures.values())
    assert queue.signed_off == ["w0"]
    assert idle(run.worker)


async def test_a_queue_that_does_not_answer_does_not_hold_up_a_worker_that_signs_off(monkeypatch, caplog):
    caplog.set_level("INFO", "slipstream.rollout_worker.heartbeat")
    monkeypatch.setattr("slipstream.rollout_worker.heartbeat._SIGN_OFF_S", 0.05)
    queue = StandInQueue(tickets_for(0), keep_open=True)

    async def hangs(worker_id):
        await asyncio.Event().wait()

    queue.sign_off = hangs
    async with asyncio.timeout(10):
        await roll(task(), fake(), queue=queue, stop_when=lambda worker: bool(queue.reports))
    assert "the queue did not confirm that the worker signed off: no answer within 0.05 s" in caplog.messages


async def test_a_lost_tickets_episodes_are_cancelled(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 0.02)
    server = fake(faults=[Fault("hang")])
    queue = StandInQueue(tickets_for(2, 2), keep_open=True)
    original = queue.heartbeat

    async def heartbeat(report):
        if report.ticket_ids in (["t0"], ["t1"]) and len(queue.groups) == 1:
            queue.lost = report.ticket_ids
        return await original(report)

    queue.heartbeat = heartbeat
    run = await roll(task(), server, queue=queue, stop_when=lambda worker: worker.counters.failures["lost"] == 1)
    assert len(queue.groups) == len(queue.lost) == 1
    assert queue.failures == {}
    assert idle(run.worker)


async def test_an_unreachable_queue_ends_the_worker_with_the_queues_message():
    queue = StandInQueue(tickets_for(1, 2))

    async def tickets(request):
        raise Unreachable("the queue at http://q did not answer for 300 s")

    queue.tickets = tickets
    with pytest.raises(Unreachable, match="did not answer"):
        await roll(task(), fake(), queue=queue)


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [raising]},
        {"dataset": [row(), {**row(), "prompt": [{"role": "user"}]}]},
        {"dataset": [row(), {**row(), "prompt": []}]},
    ],
    ids=["reward", "prompt", "row"],
)
async def test_rows_are_not_run_through_while_nothing_succeeds(changes):
    """Whether another try of the same row could help or not. Of two rows, tickets take the second one only."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    tickets = tickets_for(40, 2)
    the_task = task(**changes)
    queue = StandInQueue(
        [t for t in tickets if the_task.place_of(t.index, t.seed)[1] == len(the_task.dataset) - 1][:14]
    )
    once = config(WORKER, worker={"episodes": 2, "reward_attempts": 1})
    run = await roll(the_task, fake(), queue=queue, config=once, sleep=sleep)
    assert len(run.queue.failures) == 14
    assert slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]


async def test_a_success_ends_the_pauses():
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    calls = iter([*"fffffffff", "s", *"fffffffff", "s"])

    def moody(completions, **columns):
        if next(calls) == "f":
            raise ValueError("not now")
        return [1.0] * len(completions)

    once = config(WORKER, worker={"episodes": 2, "reward_attempts": 1})
    await roll(task(rewards=[moody]), fake(), tickets=20, config=once, sleep=sleep)
    assert slept == [0.25, 0.5, 0.25, 0.5]


async def test_a_model_without_a_chat_template_does_not_drop_row_after_row():
    """12,302 rows went in 16 s."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        if sum(slept) > 16.0:
            stopping.append(None)
            await asyncio.Event().wait()

    stopping = []
    queue = StandInQueue(tickets_for(10_000, 2), keep_open=True)
    run = await roll(
        task(tools=[]),
        fake(),
        queue=queue,
        config=config(WORKER, worker={"episodes": 32}),
        tokenizer=build_tokenizer(None),
        sleep=sleep,
        stop_when=lambda worker: bool(stopping),
    )
    assert 0 < len(queue.failures) <= 16 * 9
    (notice,) = run.worker.report().notices
    assert "the tokenizer has no chat template" in notice.text


async def test_work_reads_model_and_task_and_ends_with_the_run(tmp_path):
    run_config = config(WORKER, model={"path": str(save_model_folder(tmp_path))})
    queue = StandInQueue(tickets_for(3, 2))
    async with serving(fake()) as url:
        queue.servers = serving_at(url, version=7)
        counters = await work(run_config, task(), queue, "w1", asyncio.Event())
    assert counters.episodes_done == 6
    assert len(queue.groups) == 3


def fetch(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    raise KeyError(key)


async def test_calls_and_failures_are_counted_by_tool_and_what_the_policy_invents_together():
    """2 of 5 calls fail in the tools' own code, and 2 name no tool."""
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    said = [
        call.format("multiply", '{"a": 2, "b": 3}') + call.format("fetch", '{"key": "x"}') * 2,
        call.format("no\\ud800such" * 30, "{}") + "<tool_call>oops</tool_call>",
        "done",
    ]
    run = await roll(task(tools=[multiply, fetch]), fake(scripted(TOKENIZER, in_turn(said))), config=LONG)
    for rollout in run.rollouts:
        assert (rollout.tool_calls, rollout.tool_failures) == (5, 4)
        timed = {name for name in rollout.metrics if name.endswith("/seconds")}
        assert timed == {"tools/multiply/seconds", "tools/fetch/seconds"}, "the others reach no tool"
        assert {name: value for name, value in rollout.metrics.items() if name not in timed} == {
            "tools/offered": 2.0,
            "tools/multiply/calls": 1.0,
            "tools/multiply/failures": 0.0,
            "tools/fetch/calls": 2.0,
            "tools/fetch/failures": 2.0,
            "tools/fetch/failures/raised": 2.0,
            "tools/unknown/calls": 2.0,
            "tools/unknown/failures": 2.0,
            "tools/unknown/failures/malformed_call": 1.0,
            "tools/unknown/failures/unknown_tool": 1.0,
        }
    assert len(run.rollouts) == 2


async def test_a_rollout_without_calls_tells_only_how_many_tools_it_had():
    run = await roll(task(), fake(scripted(TOKENIZER, in_turn(["408"]))))
    assert [rollout.metrics for rollout in run.rollouts] == [{"tools/offered": 1.0}] * 2


async def test_several_calls_in_one_turn():
    calls = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>' * 2
    run = await roll(task(), fake(scripted(TOKENIZER, in_turn([calls, "408"]))))
    assert {rollout.tool_calls for rollout in run.rollouts} == {2}
    assert {rollout.reward for rollout in run.rollouts} == {1.0}
