"""What becomes of an episode by what its agent does: returns, raises, hangs, asks nothing, meets a limit."""

import asyncio
import json
import threading

import pytest

from slipstream.protocol.config import ConfigError
from tests import kit
from tests.kit.agent import MULTIPLY, USER, agent_task, client_of, results_of
from tests.kit.fake_vllm import Fault
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.traces import traced
from tests.kit.worker import TOKENIZER, accuracy, fake, roll, row, task, until

TALKATIVE = scripted(TOKENIZER, lambda text, index: "words and words")


def idle(worker):
    return worker.capacity.free == worker.capacity.total


async def ask_once(endpoint):
    async with client_of(endpoint) as client:
        reply = await client.ask()
        assert reply.status == 200, reply.body


def one_of(run):
    return run.rollouts[0]


@pytest.mark.parametrize(
    ("result", "component", "metrics", "extra"),
    [
        (0.25, 0.25, {}, {}),
        (True, 1.0, {}, {}),
        ({"reward": 0.5, "hits": 3, "why": "so"}, 0.5, {"hits": 3.0}, {"why": "so"}),
    ],
)
async def test_what_an_agent_returns(result, component, metrics, extra):
    async def agent(endpoint):
        await ask_once(endpoint)
        return result

    run = await roll(agent_task(agent), fake())
    rollout = one_of(run)
    assert (rollout.reward, rollout.reward_components) == (component, {"agent": component})
    assert {name: value for name, value in rollout.metrics.items() if "/" not in name} == metrics
    assert rollout.extra == extra
    assert run.queue.groups[0].reward_weights == {"agent": 1.0}


async def test_what_is_sampled_for_an_agent_is_in_the_trace_of_its_episode():
    async def agent(endpoint):
        await ask_once(endpoint)
        return 1.0

    with traced() as found:
        await roll(agent_task(agent), fake())
    names = {span.context.span_id: span.name for span in found()}
    sampled = [span for span in found() if span.name == "generate"]
    assert [names[span.parent.span_id] for span in sampled] == ["episode", "episode"]
    assert len({span.parent.span_id for span in sampled}) == 2
    assert {span.attributes["slipstream.server"] for span in sampled} == {"vllm-0"}


async def test_its_own_reward_adds_to_those_of_functions():
    async def agent(endpoint, answer):
        await ask_once(endpoint)
        return 0.5

    def half(completions, agent_results, **columns):
        return [result / 2 for result in agent_results]

    run = await roll(agent_task(agent, rewards=[accuracy, half], reward_weights=[1.0, 2.0]), fake())
    rollout = one_of(run)
    assert rollout.reward_components == {"accuracy": 0.0, "half": 0.25, "agent": 0.5}
    assert rollout.reward == 1.0


async def test_where_no_agent_gives_a_reward_functions_alone_judge():
    run = await roll(agent_task(ask_once, rewards=[accuracy]), fake())
    assert one_of(run).reward_components == {"accuracy": 0.0}


async def test_without_any_reward_the_ticket_fails_with_the_remedy():
    run = await roll(agent_task(ask_once), fake())
    failure = run.queue.failures["t0"]
    assert failure.reason == "no_reward"
    assert "for 2 of 2 episodes the agent returned no reward: return a number" in failure.detail


async def test_an_agent_that_is_cut_off_before_it_returns_its_reward_is_told_as_such():
    async def slow(endpoint):
        await ask_once(endpoint)
        await asyncio.Event().wait()

    brief = kit.config(kit.WORKER, worker={"episode_timeout_s": 1.0})
    run = await roll(agent_task(slow), fake(), config=brief)
    failure = run.queue.failures["t0"]
    assert (failure.reason, failure.retryable) == ("timeout", True)
    assert (
        "for 2 of 2 episodes the agent had not returned within worker.episode_timeout_s = 1: raise it" in failure.detail
    )
    assert "returned no reward" not in failure.detail
    assert run.worker.counters.failures["timeout"] == 2
    assert run.worker.counters.failures["no_reward"] == 0
    # Each is told by itself, too: where it is one of many, its group continues.
    assert any(
        notice.text.startswith("an episode leaves its group without a reward: the agent had not returned within")
        for notice in run.worker.report().notices
    )


async def test_an_agent_that_a_limit_stops_before_it_returns_its_reward_is_told_as_such():
    async def agent(endpoint):
        for _ in range(3):
            await ask_once(endpoint)

    run = await roll(agent_task(agent), fake(), config=kit.config(kit.WORKER, rollout={"max_turns": 2}))
    failure = run.queue.failures["t0"]
    assert failure.reason == "no_reward"
    assert (
        "for 2 of 2 episodes the agent raised at the limit turn_limit: catch that, and return what there is"
        in failure.detail
    )


async def test_it_gets_the_columns_that_it_names():
    seen = []

    async def agent(endpoint, answer, *, missing="default"):
        seen.append((answer, missing, endpoint.model, endpoint.base_url.endswith("/v1"), endpoint.temperature))
        await ask_once(endpoint)
        return 1.0

    async def greedy(endpoint, **columns):
        seen.append(sorted(columns))
        await ask_once(endpoint)
        return 1.0

    await roll(agent_task(agent, dataset=[row(other=1)]), fake())
    await roll(agent_task(greedy, dataset=[row(other=1)]), fake())
    assert seen == [(408, "default", "policy", True, 1.0)] * 2 + [["answer", "other", "prompt"]] * 2


async def test_one_that_never_asks_is_a_failed_episode_with_the_reason():
    async def agent(endpoint):
        return 1.0

    run = await roll(agent_task(agent), fake())
    failure = run.queue.failures["t0"]
    assert (failure.reason, failure.retryable) == ("no_turn", True)
    assert "agent returned without an answer of the policy" in failure.detail
    assert "give endpoint.base_url" in failure.detail


async def test_one_that_goes_over_its_refusals_is_told_the_last_one():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            await client.ask(model="gpt")
            await client.ask(temperature="warm")
        return 1.0

    run = await roll(agent_task(agent), fake())
    failure = run.queue.failures["t0"]
    assert failure.reason == "no_turn"
    assert "so there is nothing to train on; its last request was answered 400: temperature: warm is not 1" in (
        failure.detail
    )
    assert idle(run.worker)


async def test_i9_one_that_raises_fails_its_episode_and_one_notice_names_its_line():
    async def agent(endpoint):
        await ask_once(endpoint)
        raise SystemExit("no more")

    run = await roll(agent_task(agent), fake(), tickets=2)
    assert {failure.reason for failure in run.queue.failures.values()} == {"agent"}
    assert all(failure.retryable for failure in run.queue.failures.values())
    (notice,) = run.worker.report().notices
    assert notice.kind == "agent"
    assert "SystemExit(no more)" in notice.text
    assert "test_episodes.py:" in notice.text
    assert run.worker.report().failures["agent"] == 4


async def test_i9_one_of_two_that_raises_takes_no_sibling_with_it():
    count = iter(range(3))

    async def agent(endpoint):
        await ask_once(endpoint)
        if next(count) == 0:
            raise ValueError("once")
        return 1.0

    run = await roll(agent_task(agent), fake(), config=kit.config(kit.WORKER, rollout={"group_size": 3}))
    assert len(run.rollouts) == 2
    assert run.queue.failures == {}


class BadAnswerError(ValueError):
    """What a framework raises where the policy answered badly."""


async def test_errors_that_the_policys_answers_cause_keep_exactly_the_bad_samples_in_the_group():
    count = iter(range(4))

    async def agent(endpoint):
        await ask_once(endpoint)
        number = next(count)
        if number == 0:
            raise BadAnswerError("no JSON")
        if number == 1:
            raise OSError("the disk is full")
        return 1.0

    group_of_four = kit.config(kit.WORKER, rollout={"group_size": 4})
    the_task = agent_task(agent, agent_errors={BadAnswerError: -0.5, LookupError: 0.0})
    run = await roll(the_task, fake(), config=group_of_four)
    assert sorted(rollout.reward for rollout in run.rollouts) == [-0.5, 1.0, 1.0]
    (bad,) = [rollout for rollout in run.rollouts if rollout.reward < 0]
    assert bad.sampled_tokens > 0
    assert bad.finish_reason == "stop"
    assert "BadAnswerError: no JSON" in bad.extra["agent_error"]
    (notice,) = run.worker.report().notices
    assert "OSError: the disk is full" in notice.text
    assert "Task(agent_errors={OSError: 0.0}) keeps it" in notice.text


async def test_an_error_before_the_first_answer_fails_the_episode_whatever_its_class():
    async def agent(endpoint):
        raise ValueError("no answer of the policy is to blame")

    run = await roll(agent_task(agent, agent_errors={Exception: 0.0}), fake())
    assert run.rollouts == []
    assert {failure.reason for failure in run.queue.failures.values()} == {"agent"}


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ("keep", 'give "fail", or a reward for each class'),
        ({}, "or a reward for each class"),
        ({"ValueError": 0.0}, "such as {ValueError: 0.0}"),
        ({ValueError: float("nan")}, "ValueError: nan}.: the reward must be a finite number"),
        ({ValueError: "0"}, "must be a finite number"),
        ({int: 0.0}, "or a reward for each class"),
    ],
    ids=str,
)
def test_wrong_agent_errors_are_refused_at_once(errors, says):
    async def agent(endpoint):
        return 1.0

    with pytest.raises(ConfigError, match=says):
        agent_task(agent, agent_errors=errors)


def test_agent_errors_without_an_agent_are_refused():
    with pytest.raises(ConfigError, match="without an agent"):
        task(agent_errors={ValueError: 0.0})


async def test_one_that_takes_too_long_is_cancelled_and_what_it_sampled_is_kept():
    ends = []

    async def agent(endpoint):
        await ask_once(endpoint)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(endpoint)

    brief = kit.config(kit.WORKER, worker={"episode_timeout_s": 3.0})
    run = await roll(agent_task(agent, rewards=[accuracy]), fake(), config=brief)
    assert [rollout.finish_reason for rollout in run.rollouts] == ["timeout"] * 2
    assert len(ends) == 2


async def test_a_plain_function_that_hangs_counts_as_hung_and_its_key_is_good_no_more(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.user_code.boundary._AGENT_ENDS_S", 0.05)
    go_on, told = threading.Event(), []

    def agent(endpoint):
        asyncio.run(ask_once(endpoint))
        go_on.wait(30)
        told.append(asyncio.run(status_of(endpoint)))

    async def status_of(endpoint):
        async with client_of(endpoint) as client:
            return (await client.ask()).status

    brief = kit.config(kit.WORKER, worker={"episode_timeout_s": 1.5})
    reports = []

    def hung(worker):
        if worker.report().hung_calls == 2 and not go_on.is_set():
            reports.append(worker.report().hung_calls)
            go_on.set()
        return len(told) == 2

    queue = StandInQueue(tickets_for(1, 2, 7), keep_open=True)
    run = await roll(agent_task(agent, rewards=[accuracy]), fake(), config=brief, queue=queue, stop_when=hung)
    assert [rollout.finish_reason for rollout in run.rollouts] == ["timeout"] * 2
    assert (reports, told) == ([2], [410, 410])


async def test_a_time_out_before_the_first_answer_fails_the_episode():
    async def agent(endpoint):
        await asyncio.Event().wait()

    run = await roll(agent_task(agent), fake(), config=kit.config(kit.WORKER, worker={"episode_timeout_s": 0.2}))
    assert run.queue.failures["t0"].reason == "timeout"


async def test_waiting_for_a_slot_is_no_part_of_the_time():
    """Six answers of a second each, for two slots: an episode takes three seconds, of which it waits for two."""
    config = kit.config(kit.WORKER, worker={"episodes": 2, "episode_timeout_s": 2.5})

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            replies = await asyncio.gather(*(client.ask() for _ in range(3)))
            assert [reply.status for reply in replies] == [200] * 3
        return 1.0

    run = await roll(agent_task(agent), fake(TALKATIVE, latency_s=1.0), config=config)
    assert [rollout.finish_reason for rollout in run.rollouts] == ["stop", "stop"]
    assert max(rollout.timings["slots"] for rollout in run.rollouts) > 1.0


async def test_the_agents_own_time_counts_as_in_tools_and_the_policys_does_not():
    entered, go_on, seen = [], threading.Event(), {}

    async def agent(endpoint):
        await ask_once(endpoint)
        entered.append(1)
        await asyncio.to_thread(go_on.wait, 30)
        return 1.0

    def look(worker):
        report = worker.report()
        if report.episodes_generating == 2 and server.engine.paused:
            seen["asking"] = (report.episodes_generating, report.episodes_in_tools)
            server.engine.resume()
        if len(entered) == 2 and not report.episodes_generating and not go_on.is_set():
            seen["working"] = (report.episodes_generating, report.episodes_in_tools)
            go_on.set()
        return report.episodes_done == 2

    server = fake()
    server.engine.pause()
    run = await roll(agent_task(agent), server, stop_when=look)
    assert seen == {"asking": (2, 0), "working": (0, 2)}
    assert run.worker.report().episodes_in_tools == 0


async def test_what_it_leaves_running_is_aborted():
    both, left = asyncio.Barrier(2), []

    async def agent(endpoint):
        async def more():
            async with client_of(endpoint) as client:
                return (await client.ask()).status

        await ask_once(endpoint)
        await both.wait()
        server.engine.pause()
        left.append(asyncio.create_task(more()))
        await until(lambda: server.engine.running == 2)
        await both.wait()
        return 1.0

    server = fake(TALKATIVE)
    queue = StandInQueue(tickets_for(1, 2, 7), keep_open=True)
    run = await roll(
        agent_task(agent), server, queue=queue, stop_when=lambda worker: queue.groups and not server.engine.running
    )
    assert [rollout.turns for rollout in run.rollouts] == [1, 1]
    assert idle(run.worker)


async def test_a_client_that_goes_away_aborts_what_is_sampled_for_it():
    both = asyncio.Barrier(2)

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            await both.wait()
            server.engine.pause()
            hanging = asyncio.create_task(client.ask())
            await until(lambda: server.engine.running == 2)
            await both.wait()
            hanging.cancel()
            await until(lambda: server.engine.running == 0)
            await both.wait()
            server.engine.resume()
            reply = await client.ask()
            assert reply.status == 200
        return 1.0

    server = fake(TALKATIVE)
    run = await roll(agent_task(agent), server)
    assert run.queue.failures == {}
    assert [rollout.turns for rollout in run.rollouts] == [1, 1]
    assert idle(run.worker)


async def test_a_server_that_fails_is_told_once_and_fails_an_episode_that_gives_up():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            reply = await client.ask()
            assert (reply.status, reply.error["code"]) == (503, "server")
            raise RuntimeError("the model is gone")

    server = fake(faults=[Fault("status", status=500, times=None)])
    config = kit.config(kit.WORKER, worker={"request_attempts": 1})
    run = await roll(agent_task(agent), server, config=config)
    assert run.queue.failures["t0"].reason == "server"


async def test_an_agent_that_gets_over_a_failure_goes_on():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            while (await client.ask()).status == 503:
                pass
        return 1.0

    server = fake(faults=[Fault("status", status=500, times=2)])
    run = await roll(agent_task(agent), server, config=kit.config(kit.WORKER, worker={"request_attempts": 1}))
    assert [rollout.turns for rollout in run.rollouts] == [1, 1]


@pytest.mark.parametrize(
    ("rollout", "code", "finish"),
    [
        ({"max_turns": 2}, "turn_limit", "turn_limit"),
        ({"max_turns": 0, "max_episode_tokens": 20}, "context_length_exceeded", "length"),
    ],
)
async def test_limits_are_of_the_whole_episode(rollout, code, finish):
    codes = []

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            for number in range(100):
                reply = await client.ask([{"role": "user", "content": f"question {number}"}])
                if reply.status != 200:
                    codes.append(reply.error["code"])
                    break
        return 1.0

    run = await roll(agent_task(agent), fake(TALKATIVE), config=kit.config(kit.WORKER, rollout=rollout))
    assert codes == [code] * 2
    assert [each.finish_reason for each in run.rollouts] == [finish] * 2
    if "max_episode_tokens" in rollout:
        assert [each.sampled_tokens for each in run.rollouts] == [20, 20]
    else:
        assert [each.turns for each in run.rollouts] == [2, 2]


async def test_requests_side_by_side_share_what_is_left_of_the_episodes_tokens():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            asked = [client.ask([{"role": "user", "content": f"question {number}"}]) for number in range(6)]
            replies = await asyncio.gather(*asked)
            assert sorted(reply.status for reply in replies)[0] == 200
        return 1.0

    config = kit.config(kit.WORKER, rollout={"max_turns": 0, "max_episode_tokens": 40, "max_turn_tokens": 30})
    run = await roll(agent_task(agent), fake(TALKATIVE, latency_s=0.01), config=config)
    assert [rollout.sampled_tokens for rollout in run.rollouts] == [40, 40]


async def test_calls_are_counted_as_the_policy_wrote_them():
    calls = (
        '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
        '<tool_call>{"name": "divide", "arguments": {}}</tool_call>'
        "<tool_call>broken</tool_call>"
    )

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            reply = await client.ask(tools=[MULTIPLY])
            assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["multiply", "divide"]
            assert "broken" in reply.message["content"]
            await client.ask([USER, reply.message, *results_of({"tool_calls": reply.message["tool_calls"][:1]})])
        return 1.0

    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, in_turn([calls, "6"]))))
    rollout = one_of(run)
    assert (rollout.tool_calls, rollout.tool_failures) == (3, 2)
    assert rollout.metrics["tools/multiply/calls"] == 1.0
    assert rollout.metrics["tools/unknown/failures/unknown_tool"] == 1.0
    assert rollout.metrics["tools/unknown/failures/malformed_call"] == 1.0


async def test_arguments_come_in_the_types_of_the_schema_and_what_was_sampled_stays():
    """As notations give them that write every value as text."""
    call = '<tool_call>{"name": "multiply", "arguments": {"a": "12", "b": "34"}}</tool_call>'

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            reply = await client.ask(tools=[MULTIPLY])
            (given,) = reply.message["tool_calls"]
            assert json.loads(given["function"]["arguments"]) == {"a": 12, "b": 34}
            await client.ask([USER, reply.message, *results_of(reply.message)], tools=[MULTIPLY])
        return 1.0

    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, in_turn([call, "408"]))))
    rollout = one_of(run)
    assert rollout.metrics["tools/multiply/coerced"] == 1.0
    (segment,) = rollout.segments
    assert TOKENIZER.decode(segment.token_ids[segment.loss_mask]).startswith(call)


async def test_rewards_see_the_conversation_of_the_last_answer_from_the_policys_first_word_on():
    seen = []

    async def agent(endpoint, prompt):
        async with client_of(endpoint) as client:
            first = await client.ask([{"role": "system", "content": "Be brief."}, *prompt])
            await client.ask([{"role": "user", "content": "aside"}])
            last = [{"role": "system", "content": "Be brief."}, *prompt, first.message, USER]
            await client.ask(last)
        return 1.0

    def looking(completions, prompts, completion_ids, **columns):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    run = await roll(agent_task(agent, rewards=[looking]), fake(TALKATIVE))
    for prompt, completion, ids in seen:
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert [message["role"] for message in completion] == ["assistant", "user", "assistant"]
        assert TOKENIZER.decode(ids).count("words and words") == 3
    assert [len(rollout.segments) for rollout in run.rollouts] == [2, 2]


async def test_prompts_that_are_text_have_completions_that_are_text():
    async def agent(endpoint, prompt):
        async with client_of(endpoint) as client:
            await client.ask([{"role": "user", "content": prompt}])

    def looking(completions, prompts, **columns):
        return [
            float(text == "words and words" and prompt == "hi")
            for text, prompt in zip(completions, prompts, strict=True)
        ]

    run = await roll(agent_task(agent, dataset=[{"prompt": "hi"}], rewards=[looking]), fake(TALKATIVE))
    assert [rollout.reward for rollout in run.rollouts] == [1.0, 1.0]


async def test_a_ticket_that_is_lost_ends_its_agents():
    waiting, ends = [], []

    async def agent(endpoint):
        await ask_once(endpoint)
        try:
            waiting.append(1)
            await asyncio.Event().wait()
        finally:
            ends.append(1)

    queue = StandInQueue(tickets_for(1, 2, 7))

    def lose(worker):
        if len(waiting) == 2 and not queue.lost:
            queue.lost.append("t0")
            worker.heartbeat.now()
        return False

    server = fake(TALKATIVE)
    run = await roll(agent_task(agent), server, queue=queue, stop_when=lose)
    await until(lambda: len(ends) == 2)
    assert idle(run.worker)


async def test_a_thousand_episodes_at_once():
    at_work = []

    async def agent(endpoint):
        at_work.append(endpoint.api_key)
        while len(at_work) < 1000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await ask_once(endpoint)
        return 1.0

    config = kit.config(
        kit.WORKER,
        rollout={"group_size": 100},
        worker={"episodes": 1000, "request_timeout_s": 60.0},
        vllm={"max_num_seqs": 1024},
    )
    run = await roll(agent_task(agent), fake(TALKATIVE), tickets=10, config=config)
    assert run.queue.failures == {}
    assert (len(run.rollouts), len(set(at_work))) == (1000, 1000)


async def test_told_to_stop_it_ends_agents_that_will_not_go():
    async def agent(endpoint):
        await ask_once(endpoint)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    server = fake(TALKATIVE)
    run = await roll(agent_task(agent), server, stop_when=lambda worker: len(server.requests) == 2)
    assert run.queue.failures["t0"].reason == "worker_stopped"
    assert idle(run.worker)
