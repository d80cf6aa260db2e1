import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from slipstream.protocol.config.sections.sampling import StructuredOutputs
from slipstream.protocol.messages import ServerState
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import OwnParams, SampledSpan
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import Sampler
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault, serving
from tests.kit.stand_in_queue import serving_at
from tests.kit.worker import END_OF_TURN, fake, until

PROMPT = [40, 41, 42]
TURN = [50, 51, 52, 53, END_OF_TURN]


def counting(token_ids, index):
    """Continues from where the prompt leaves off, so that a turn in two parts is the same as in one."""
    done = len(token_ids) - len(PROMPT)
    return TURN[done:]


class Setup:
    def __init__(self, client, fakes, urls, stream_first_turn=True, abort_grace_s=30.0, rollout=None, **sections):
        self.fakes = fakes
        self.urls = urls
        self.stale = []
        self.told = asyncio.Event()
        self.slept = []
        self.notices = []
        self.asked = 0
        self.pauses = []
        self.pool = ServerPool(
            self._report,
            client.abort,
            lambda name, text: self.notices.append((name, text)),
            self._ask,
            lambda seconds, over: self.pauses.append((seconds, over)),
            abort_grace_s=abort_grace_s,
        )
        self.pool.update(serving_at(*urls, version=7))
        self.sampler = Sampler(
            client,
            self.pool,
            config(WORKER, rollout={"temperature": 0.9, **(rollout or {})}, **sections),
            [END_OF_TURN],
            stream_first_turn,
            random.Random(0),
            self._sleep,
        )

    async def _report(self, server):
        self.stale.append(server)
        self.told.set()

    async def _sleep(self, seconds):
        self.slept.append(seconds)

    def _ask(self):
        self.asked += 1

    def pause_over(self):
        """The pause of a server that failed ends."""
        self.pauses.pop()[1]()

    def registry(self, *states, version=7, changed_at=2.0):
        """Another state of each server, the others as they were."""
        servers = serving_at(*self.urls, version=7)
        for server, state in zip(servers, states, strict=False):
            if state is not ServerState.SERVING:
                server.state, server.version, server.changed_at = state, version, changed_at
        self.pool.update(servers)

    async def on_the_way(self, count, fake=0):
        """Wait until so many requests have reached a server."""
        await until(lambda: len(self.fakes[fake].requests) >= count and self.fakes[fake].engine.running > 0)

    async def turn(self, affinity=None, max_tokens=16):
        return await self.sampler.sample(affinity or Affinity(), PROMPT, max_tokens)

    async def first_turns(self, affinities, max_tokens=16):
        first = self.sampler.first_turn(affinities, PROMPT, max_tokens)
        async with asyncio.TaskGroup() as tasks:
            for fill in first.fills:
                tasks.create_task(fill)
            turns = [
                tasks.create_task(self.sampler.sample(affinity, PROMPT, max_tokens, pending))
                for affinity, pending in zip(affinities, first.pending, strict=True)
            ]
        return [turn.result() for turn in turns]


@asynccontextmanager
async def setup(*faults, servers=1, timeout_s=5.0, policy=counting, **options):
    """Servers of which the first has the faults."""
    fakes = [fake(policy) for _ in range(servers)]
    fakes[0].faults.extend(faults)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(InferenceClient(timeout_s))
        s = Setup(client, fakes, [await stack.enter_async_context(serving(one)) for one in fakes], **options)
        aborting = asyncio.create_task(s.pool.run())
        yield s
        aborting.cancel()


async def test_a_turn_is_asked_for_in_tokens_and_comes_back_as_sampled():
    async with setup() as s:
        turn = await s.turn()
    assert turn.token_ids == TURN
    assert turn.spans == [SampledSpan(7, 0, 5, "vllm-0")]
    assert turn.finish_reason == "stop"
    (request,) = s.fakes[0].requests
    assert request["model"] == "policy"
    assert request["cache_salt"] == "run:7"
    assert request["sampling_params"] == {
        "max_tokens": 16,
        "temperature": 0.9,
        "stop_token_ids": [END_OF_TURN],
        "n": 1,
        "logprobs": 0,
        "detokenize": False,
    }


async def test_the_salt_follows_the_version_that_samples_show():
    async with setup() as s:
        s.fakes[0].engine.weight_version = "9"
        await s.turn()
        await s.turn()
    assert [request["cache_salt"] for request in s.fakes[0].requests] == ["run:7", "run:9"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=500),
        Fault("status", status=503),
        Fault("die", times=2),
        Fault("drop", times=2),
        Fault("hang"),
        Fault("abort", after=0),
    ],
    ids=lambda fault: fault.kind,
)
async def test_a_failure_of_the_server_is_tried_again_on_another(fault):
    async with setup(fault, servers=2, timeout_s=1.0) as s:
        affinity = Affinity()
        turn = await s.turn(affinity)
    assert turn.token_ids == TURN
    assert (len(s.fakes[0].calls) > 0, affinity.server) == (True, "vllm-1")
    assert turn.spans == [SampledSpan(7, 0, 5, "vllm-1")]
    assert s.sampler.retries == 1
    assert s.slept == []


async def test_a_lone_server_is_given_time_that_grows_then_a_pause():
    async with setup(Fault("status", times=3)) as s:
        turn = asyncio.create_task(s.turn())
        await until(lambda: s.pauses)
        assert not s.pool.serving
        s.pause_over()
        assert (await turn).token_ids == TURN
    assert s.sampler.retries == 3
    assert len(s.slept) == 2, "the pause is time enough"
    assert all(base / 2 <= slept <= base for base, slept in zip([0.5, 1.0], s.slept, strict=True))
    assert [text.partition(";")[0] for _, text in s.notices] == [
        f"server vllm-0 at {s.urls[0]} was left alone for 1 s and longer, after 3 failures in a row"
    ]


async def test_a_connection_that_broke_in_the_pool_is_asked_again_at_once():
    async with setup(Fault("drop")) as s:
        assert (await s.turn()).token_ids == TURN
    assert s.slept == []


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_a_busy_server_is_no_wrong_request(status):
    async with setup(Fault("status", status=status), servers=2) as s:
        assert (await s.turn()).spans == [SampledSpan(7, 0, 5, "vllm-1")]
    assert (s.notices, s.pauses) == ([], [])


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_a_server_that_refuses_whatever_is_asked_is_left_alone_and_told(status):
    """The wrong token, the wrong model, a route that is off: the server's fault, and no reason to fail an episode."""
    async with setup(Fault("status", status=status, times=None), servers=2) as s:
        turns = [await s.turn() for _ in range(3)]
    assert [turn.token_ids for turn in turns] == [TURN] * 3
    assert len(s.fakes[0].calls) == 1
    ((name, text),) = s.notices
    assert name == "vllm-0"
    assert f"{s.urls[0]} was left alone" in text
    assert f"HTTP {status}" in text
    assert s.asked == 1


async def test_a_lone_server_that_refuses_whatever_is_asked_is_tried_after_growing_pauses():
    async with setup(Fault("status", status=404, times=None)) as s:
        turn = asyncio.create_task(s.turn())
        for seconds in [1.0, 2.0, 4.0, 8.0]:
            await until(lambda: s.pauses or turn.done())
            assert s.pauses[-1][0] == seconds
            assert not s.pool.serving
            s.pause_over()
        with pytest.raises(EpisodeFailed, match=r"4 attempts, the last: HTTP 404.*slipstream vllm") as caught:
            await turn
    assert (caught.value.reason, caught.value.retryable) == ("server", True)
    assert len(s.fakes[0].calls) == 4


async def test_a_server_that_fails_in_a_row_is_tried_by_one_request_while_the_others_wait():
    async with setup(Fault("status", status=404, times=4), worker={"request_attempts": 2}) as s:
        turns = [asyncio.create_task(s.turn()) for _ in range(4)]
        await until(lambda: s.sampler.retries == 4)
        assert len(s.pauses) == 1
        s.fakes[0].engine.pause()
        s.pause_over()
        await s.on_the_way(1)
        assert [len(s.fakes[0].requests), s.pool.serving] == [1, False]
        s.fakes[0].engine.resume()
        assert [(await turn).token_ids for turn in turns] == [TURN] * 4
    assert s.sampler.retries == 4
    assert s.pool.serving


async def test_a_trial_that_is_cancelled_leaves_the_server_to_the_next_request():
    async with setup(Fault("status", times=3)) as s:
        first = asyncio.create_task(s.turn())
        await until(lambda: s.pauses)
        s.fakes[0].engine.pause()
        s.pause_over()
        await s.on_the_way(1)
        second = asyncio.create_task(s.turn())
        first.cancel()
        s.fakes[0].engine.resume()
        assert (await second).token_ids == TURN


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("servers", [1, 3])
async def test_d2_a_4xx_is_the_requests_fault_where_two_servers_or_a_lone_one_say_so(status, servers):
    async with setup(servers=servers) as s:
        for one in s.fakes:
            one.faults.append(Fault("status", status=status, times=None))
        for _ in range(4):
            with pytest.raises(EpisodeFailed, match=rf"server vllm-0 at .*: HTTP {status}") as caught:
                await s.turn()
    assert (caught.value.reason, caught.value.retryable) == ("rejected", False)
    assert sum(len(one.calls) for one in s.fakes) == 4 * min(servers, 2)
    assert str(caught.value).count("server vllm-") == min(servers, 2)
    assert (s.notices, s.pauses) == ([], []), "the servers are well"


async def test_d2_a_refusal_that_another_server_does_not_share_is_the_servers_failure():
    """One that refuses whatever it is asked looks least loaded: it would take the run over, and end its rows for
    good."""
    async with setup(Fault("status", status=400, times=None), servers=3) as s:
        turns = [await s.turn() for _ in range(6)]
    assert [turn.token_ids for turn in turns] == [TURN] * 6
    assert len(s.fakes[0].calls) == 3
    ((name, text),) = s.notices
    assert (name, s.slept) == ("vllm-0", [])
    assert "was left alone for 1 s and longer, after 3 failures in a row; the last: HTTP 400" in text


async def test_d2_a_refusal_on_trial_is_a_failure():
    async with setup(Fault("status", status=400, times=None), servers=2) as s:
        for _ in range(3):
            await s.turn()
        s.pause_over()
        assert (await s.turn()).token_ids == TURN
    assert [seconds for seconds, _ in s.pauses] == [2.0]


async def test_d2_a_refusal_while_no_other_server_may_be_asked_does_not_end_the_row():
    async with setup(servers=2) as s:
        s.fakes[1].faults.append(Fault("status", status=404, times=None))
        s.fakes[0].faults.append(Fault("hang"))
        hanging = asyncio.create_task(s.turn())
        await until(lambda: s.fakes[0].calls)
        await s.turn()
        hanging.cancel()
        assert not s.pool.others("vllm-0")
        s.fakes[0].faults.append(Fault("status", status=400))
        with pytest.raises(EpisodeFailed, match="HTTP 400") as caught:
            await s.turn()
    assert (caught.value.reason, caught.value.retryable) == ("rejected", True)


@pytest.mark.parametrize("stream", [True, False])
async def test_d2_a_first_turn_that_one_server_refuses_is_counted_once_and_sampled_elsewhere(stream):
    async with setup(Fault("status", status=400), servers=2, stream_first_turn=stream) as s:
        turns = await s.first_turns([Affinity() for _ in range(4)])
    assert [turn.spans for turn in turns] == [[SampledSpan(7, 0, 5, "vllm-1")]] * 4
    assert s.notices == []


async def test_attempts_are_bounded():
    async with setup(Fault("hang", times=None), timeout_s=0.05, worker={"request_attempts": 3}) as s:
        with pytest.raises(EpisodeFailed, match=r"3 attempts, the last: .*no answer within 0.05 s") as caught:
            await s.turn()
    assert (caught.value.reason, caught.value.retryable) == ("server", True)
    assert len(s.fakes[0].calls) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no_logprobs", "missing_logprobs"),
        ("nan_logprobs", "bad_logprobs"),
        ("null_logprobs", "bad_logprobs"),
        ("no_versions", "missing_versions"),
    ],
)
async def test_a_sample_that_cannot_be_trained_on_fails_the_episode(fault, reason):
    async with setup(Fault(fault)) as s:
        with pytest.raises(EpisodeFailed) as caught:
            await s.turn()
    assert caught.value.reason == reason
    assert len(s.fakes[0].requests) == 1


async def test_a_sample_that_cannot_be_trained_on_is_sampled_again_on_another_server():
    async with setup(Fault("nan_logprobs", times=None), servers=3) as s:
        turns = [await s.turn() for _ in range(6)]
    assert [turn.token_ids for turn in turns] == [TURN] * 6
    assert len(s.fakes[0].requests) == 3
    ((_, text),) = s.notices
    assert "after 3 failures in a row; the last: a log-prob is -9999.0" in text


async def test_a_turn_that_two_servers_spoil_fails_its_episode_and_names_both():
    async with setup(servers=3) as s:
        for one in s.fakes:
            one.faults.append(Fault("nan_logprobs"))
        with pytest.raises(EpisodeFailed, match=r"server vllm-0 .* -9999.0; server vllm-1 .* -9999.0") as caught:
            await s.turn()
    assert (caught.value.reason, caught.value.retryable) == ("bad_logprobs", True)
    assert [len(one.requests) for one in s.fakes] == [1, 1, 0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_group_whose_first_turn_is_spoiled_is_one_failure_and_goes_on_elsewhere(stream):
    async with setup(Fault("nan_logprobs"), servers=2, stream_first_turn=stream) as s:
        turns = await s.first_turns([Affinity() for _ in range(4)])
    assert [turn.spans for turn in turns] == [[SampledSpan(7, 0, 5, "vllm-1")]] * 4
    assert (s.notices, s.sampler.retries) == ([], 4)


async def test_i5_a_restarted_server_is_reported_and_left_alone():
    async with setup(servers=2) as s:
        s.fakes[0].engine.restart()
        turn = await s.turn()
        later = [await s.turn() for _ in range(3)]
    assert [t.spans[0].version for t in [turn, *later]] == [7] * 4
    assert len(s.fakes[0].requests) == 1
    (stale,) = s.stale
    assert (stale.name, stale.state) == ("vllm-0", ServerState.JOINING)
    assert "'default'" in stale.reason


async def test_with_no_server_left_the_episode_waits_for_the_registry():
    async with setup() as s:
        s.fakes[0].engine.restart()
        turn = asyncio.create_task(s.turn())
        await s.told.wait()
        assert not s.pool.serving
        s.pool.update(serving_at(*s.urls, version=7))
        assert not s.pool.serving, "the registry's record is still the one that was found wrong"
        s.fakes[0].engine.weight_version = "8"
        (proven,) = serving_at(*s.urls, version=8)
        proven.changed_at = 2.0
        s.pool.update([proven])
        assert (await turn).spans == [SampledSpan(8, 0, 5, "vllm-0")]


async def test_an_aborted_turn_goes_on_after_its_tokens():
    async with setup(Fault("abort", after=2)) as s:
        turn = await s.turn()
    first, second = s.fakes[0].requests
    assert second["token_ids"] == first["token_ids"] + TURN[:2]
    assert second["sampling_params"]["max_tokens"] == 14
    assert turn.token_ids == TURN
    assert turn.spans == [SampledSpan(7, 0, 5, "vllm-0")]
    assert s.slept == []


@pytest.mark.parametrize(
    "given",
    [
        {"generation_kwargs": {"structured_outputs": {"regex": "[0-9]{200}"}}},
        {"generation_kwargs": {"bad_words": ["no way"]}},
        {"generation_kwargs": {"thinking_token_budget": 8}},
        {"generation_kwargs": {"extra_args": {"no_repeat": 3}}},
        {"stop": ["</answer>"]},
    ],
    ids=str,
)
async def test_an_aborted_turn_whose_sampling_looks_back_begins_anew(given):
    """A grammar, a budget or a stop text over the seam would know nothing of the tokens so far."""
    async with setup(Fault("abort", after=2), rollout={"accept_sampler_mismatch": True, **given}) as s:
        turn = await s.turn()
    first, second = s.fakes[0].requests
    assert second["token_ids"] == first["token_ids"]
    assert second["sampling_params"]["max_tokens"] == first["sampling_params"]["max_tokens"]
    assert (turn.token_ids, turn.spans) == (TURN, [SampledSpan(7, 0, 5, "vllm-0")])


async def test_an_aborted_turn_held_to_a_form_of_its_own_begins_anew():
    own = OwnParams(form=StructuredOutputs(regex="[a-z]{9}"))
    async with setup(Fault("abort", after=2)) as s:
        turn = await s.sampler.sample(Affinity(), PROMPT, 16, own=own)
    assert [request["token_ids"] for request in s.fakes[0].requests] == [PROMPT, PROMPT]
    assert turn.token_ids == TURN


async def test_the_rest_of_an_aborted_turn_needs_as_many_tokens_less():
    kwargs = {"generation_kwargs": {"min_tokens": 5}, "accept_sampler_mismatch": True}
    async with setup(Fault("abort", after=2), rollout=kwargs) as s:
        await s.turn()
    assert [request["sampling_params"].get("min_tokens", 0) for request in s.fakes[0].requests] == [5, 3]


async def test_a_turn_that_is_aborted_at_its_end_is_not_continued():
    async with setup(Fault("abort", after=5)) as s:
        turn = await s.turn()
    assert (turn.token_ids, turn.finish_reason) == (TURN, "stop")
    assert len(s.fakes[0].requests) == 1


async def test_versions_far_ahead_of_the_registry_are_the_servers_failure():
    async with setup(servers=2) as s:
        s.fakes[0].engine.weight_version = str(2**40)
        turns = [await s.turn() for _ in range(5)]
    assert [turn.spans for turn in turns] == [[SampledSpan(7, 0, 5, "vllm-1")]] * 5
    ((_, text),) = s.notices
    assert "tokens of version 1099511627776, while the registry knows of none above 7" in text


@pytest.mark.parametrize("version", [7, 8])
async def test_i5_a_turn_that_goes_on_on_another_server_names_both(version):
    """The first server dies after two tokens; the second one has the same version, or the next."""
    async with setup(Fault("abort", after=2), servers=2) as s:
        s.fakes[0].faults.append(Fault("die", times=None))
        s.fakes[1].engine.weight_version = str(version)
        turn = await s.turn()
    assert turn.token_ids == TURN
    assert turn.spans == [SampledSpan(7, 0, 2, "vllm-0"), SampledSpan(version, 2, 5, "vllm-1")]


async def test_an_update_in_mid_turn_gives_two_spans():
    async with setup(Fault("version_change", after=2, label="8")) as s:
        assert (await s.turn()).spans == [SampledSpan(7, 0, 2, "vllm-0"), SampledSpan(8, 2, 5, "vllm-0")]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_groups_first_turn_is_one_request(stream):
    async with setup(servers=2, stream_first_turn=stream) as s:
        affinities = [Affinity() for _ in range(4)]
        turns = await s.first_turns(affinities)
    assert [turn.token_ids for turn in turns] == [TURN] * 4
    (request,) = s.fakes[0].requests
    assert request["sampling_params"]["n"] == 4
    assert request["stream"] == stream
    assert {affinity.server for affinity in affinities} == {"vllm-0"}


async def test_a_group_beyond_the_servers_limit_is_asked_for_in_parts():
    async with setup(vllm={"max_num_seqs": 3}) as s:
        s.fakes[0].engine.max_num_seqs = 3
        turns = await s.first_turns([Affinity() for _ in range(7)])
    assert [turn.token_ids for turn in turns] == [TURN] * 7
    assert sorted(request["sampling_params"]["n"] for request in s.fakes[0].requests) == [1, 3, 3]


@pytest.mark.parametrize("kind", ["die", "stream_error"])
async def test_a_stream_that_breaks_costs_only_what_was_unfinished(kind):
    async with setup(Fault(kind, after=2)) as s:
        turns = await s.first_turns([Affinity() for _ in range(4)])
    assert [turn.token_ids for turn in turns] == [TURN] * 4
    assert [request["sampling_params"]["n"] for request in s.fakes[0].requests] == [4, 1, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_first_turn_that_is_rejected_fails_every_episode(stream):
    async with setup(Fault("status", status=400), stream_first_turn=stream) as s:
        affinities = [Affinity(), Affinity()]
        first = s.sampler.first_turn(affinities, PROMPT, 16)
        await first.fills[0]
        for affinity, pending in zip(affinities, first.pending, strict=True):
            with pytest.raises(EpisodeFailed, match="HTTP 400"):
                await s.sampler.sample(affinity, PROMPT, 16, pending)
    assert len(s.fakes[0].calls) == 1


async def test_a_finished_continuation_does_not_wait_for_its_siblings():
    async with setup() as s:
        s.fakes[0].engine.latency_s = lambda index: 0.0 if index == 0 else 30.0
        first = s.sampler.first_turn([Affinity(), Affinity()], PROMPT, 16)
        fill = asyncio.create_task(first.fills[0])
        choice = await asyncio.wait_for(first.pending[0], 20)
        assert (choice.spans[0].server, choice.token_ids) == ("vllm-0", TURN)
        assert not first.pending[1].done()
        fill.cancel()


@pytest.mark.parametrize("state", [ServerState.DOWN, ServerState.QUARANTINED, ServerState.JOINING])
async def test_requests_move_at_once_when_their_server_leaves(state):
    """It never answers: its time-out would come in an hour."""
    async with setup(Fault("hang"), servers=2, timeout_s=3600.0) as s:
        affinity = Affinity()
        turn = asyncio.create_task(s.turn(affinity))
        await until(lambda: s.fakes[0].calls)
        s.registry(state, version=None if state is ServerState.JOINING else 8)
        assert (await turn).spans == [SampledSpan(7, 0, 5, "vllm-1")]
    assert (affinity.moves, s.sampler.retries) == (1, 1)
    assert (s.slept, s.notices) == ([], []), "it did not fail"
    assert "/inference/v1/abort_requests" not in s.fakes[0].calls


async def test_a_server_that_was_restarted_between_two_heartbeats_has_left():
    async with setup(Fault("hang"), timeout_s=3600.0) as s:
        turn = asyncio.create_task(s.turn())
        await until(lambda: s.fakes[0].calls)
        (again,) = serving_at(*s.urls, version=7)
        again.changed_at = 9.0
        s.pool.update([again])
        assert (await turn).token_ids == TURN


async def test_a_stale_server_gives_back_what_it_has_sampled():
    async with setup(servers=2, timeout_s=3600.0) as s:
        s.fakes[0].engine.aborted_after = 2
        s.fakes[0].engine.pause()
        s.fakes[1].engine.weight_version = "9"
        turn = asyncio.create_task(s.turn())
        await s.on_the_way(1)
        s.registry(ServerState.STALE)
        done = await turn
    assert done.token_ids == TURN
    assert done.spans == [SampledSpan(7, 0, 2, "vllm-0"), SampledSpan(9, 2, 5, "vllm-1")]
    assert s.slept == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_group_goes_on_from_a_stale_server_each_after_its_tokens(stream):
    """One continuation was finished; the three others are aborted after two tokens, and stay together."""
    async with setup(servers=3, timeout_s=3600.0, stream_first_turn=stream) as s:
        s.fakes[0].engine.aborted_after = 2
        s.fakes[0].engine.latency_s = lambda index: 0.0 if index == 0 and stream else 3600.0
        affinities = [Affinity() for _ in range(4)]
        turns = asyncio.create_task(s.first_turns(affinities))
        await s.on_the_way(1)
        if stream:
            await until(lambda: affinities[0].sampled)
        s.registry(ServerState.STALE)
        done = await turns
    assert [turn.token_ids for turn in done] == [TURN] * 4
    cut = [SampledSpan(7, 0, 2, "vllm-0"), SampledSpan(7, 2, 5, "vllm-1")]
    assert [turn.spans for turn in done] == [[SampledSpan(7, 0, 5, "vllm-0")] if stream else cut, cut, cut, cut]
    assert s.fakes[2].requests == []


async def test_a_stale_server_that_does_not_answer_costs_the_turn_and_no_more():
    faults = [Fault("hang"), Fault("hang", route="/inference/v1/abort_requests")]
    async with setup(*faults, servers=2, timeout_s=3600.0, abort_grace_s=0.01) as s:
        turn = asyncio.create_task(s.turn())
        await until(lambda: s.fakes[0].calls)
        s.registry(ServerState.STALE)
        assert (await turn).spans == [SampledSpan(7, 0, 5, "vllm-1")]


async def test_a_groups_finished_continuations_stay_when_its_server_dies():
    async with setup(servers=2, timeout_s=3600.0) as s:
        s.fakes[0].engine.latency_s = lambda index: 0.0 if index < 2 else 3600.0
        affinities = [Affinity() for _ in range(4)]
        turns = asyncio.create_task(s.first_turns(affinities))
        await until(lambda: affinities[0].sampled and affinities[1].sampled)
        s.registry(ServerState.DOWN)
        done = await turns
    assert [turn.spans[0].server for turn in done] == ["vllm-0", "vllm-0", "vllm-1", "vllm-1"]
    assert [request["sampling_params"]["n"] for request in s.fakes[1].requests] == [1, 1]


async def test_what_else_runs_on_a_server_of_unknown_weights_moves_at_once():
    async with setup(servers=2, timeout_s=3600.0) as s:
        s.fakes[0].engine.pause()
        waiting = asyncio.create_task(s.turn())
        await s.on_the_way(1)
        await s.pool.distrust("vllm-0", "default")
        assert (await waiting).spans == [SampledSpan(7, 0, 5, "vllm-1")]


async def test_i5_an_episode_with_tokens_of_a_failed_proof_ends_and_one_with_older_tokens_goes_on():
    async with setup(servers=2) as s:
        older, newer = Affinity(), Affinity()
        await s.turn(older)
        s.pool.release([older])
        s.fakes[0].engine.weight_version = "8"
        await s.turn(newer)
        assert (older.sampled, newer.sampled) == ({("vllm-0", 7)}, {("vllm-0", 8)})
        s.registry(ServerState.QUARANTINED, version=8)
        assert (await s.turn(older)).spans == [SampledSpan(7, 0, 5, "vllm-1")]
        with pytest.raises(EpisodeFailed, match=r"server vllm-0 .* failed their proof") as caught:
            await s.turn(newer)
    assert (caught.value.reason, caught.value.retryable) == ("unverified_server", True)


async def test_i5_an_old_episode_does_not_wait_for_a_server_that_only_new_tickets_may_use():
    """The lone server fails at version 8 and is then proven at 8: what it samples now could not be told apart."""
    async with setup() as s:
        affinity = Affinity(born=s.pool.tick)
        s.registry(ServerState.QUARANTINED, version=8)
        (proven,) = serving_at(*s.urls, version=8)
        proven.changed_at = 3.0
        s.pool.update([proven])
        with pytest.raises(EpisodeFailed, match="only new tickets") as caught:
            await s.turn(affinity)
        s.fakes[0].engine.weight_version = "8"
        assert (await s.turn(Affinity(born=s.pool.tick))).spans == [SampledSpan(8, 0, 5, "vllm-0")]
    assert caught.value.retryable


async def test_the_salt_of_what_goes_on_elsewhere_is_that_of_the_server_it_goes_to():
    async with setup(servers=2, timeout_s=3600.0) as s:
        s.fakes[1].engine.weight_version = "9"
        s.pool.saw_version("vllm-1", 9)
        s.fakes[0].engine.pause()
        turn = asyncio.create_task(s.turn())
        await s.on_the_way(1)
        s.registry(ServerState.STALE)
        await turn
    assert [fake.requests[0]["cache_salt"] for fake in s.fakes] == ["run:7", "run:9"]


async def test_i7_the_wait_for_a_server_is_kept_with_the_episode():
    async with setup() as s:
        s.registry(ServerState.DOWN)
        affinity = Affinity()
        turn = asyncio.create_task(s.turn(affinity))
        await asyncio.sleep(0)
        assert affinity.waited_s == 0.0
        s.registry()
        await turn
    assert affinity.waited_s > 0.0
    assert s.fakes[0].requests


async def test_i7_episodes_that_wait_for_a_server_are_counted_while_the_registry_calls_it_serving():
    async with setup(Fault("drop", times=None), servers=1, worker={"request_attempts": 99}) as s:
        affinities = [Affinity() for _ in range(4)]
        turns = asyncio.create_task(s.first_turns(affinities))
        await until(lambda: s.pool.waiting == 4)
        assert s.pauses
        s.fakes[0].faults.clear()
        s.pause_over()
        assert len(await turns) == 4
        assert s.pool.waiting == 0


async def test_i7_an_episode_that_is_cancelled_waits_no_more():
    async with setup() as s:
        s.registry(ServerState.DOWN)
        turn = asyncio.create_task(s.turn())
        await until(lambda: s.pool.waiting == 1)
        turn.cancel()
        await asyncio.wait([turn])
        assert s.pool.waiting == 0


async def test_a_groups_finished_continuations_are_no_load():
    """Three of four are done on the first server, two run on the second: the next turn goes to the first."""
    async with setup(servers=2, timeout_s=3600.0) as s:
        s.fakes[0].engine.latency_s = lambda index: 0.0 if index < 3 else 3600.0
        s.fakes[1].engine.pause()
        group, pair = [Affinity() for _ in range(4)], [Affinity() for _ in range(2)]
        running = [asyncio.create_task(s.first_turns(group))]
        await until(lambda: all(affinity.sampled for affinity in group[:3]))
        running.append(asyncio.create_task(s.first_turns(pair)))
        await s.on_the_way(1, fake=1)
        s.fakes[0].engine.latency_s = 0.0
        assert (await s.turn()).spans[0].server == "vllm-0"
        for task in running:
            task.cancel()
