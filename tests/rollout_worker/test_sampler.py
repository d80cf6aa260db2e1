import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from protocol.messages import ServerState
from rollout_worker.inference.client import InferenceClient
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.pool import Affinity, ServerPool
from rollout_worker.inference.sampler import Sampler
from rollout_worker.inference.wire import SampledSpan
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault, serving
from tests.kit.stand_in_queue import serving_at
from tests.kit.worker import END_OF_TURN, fake

PROMPT = [40, 41, 42]
TURN = [50, 51, 52, 53, END_OF_TURN]


def counting(token_ids, index):
    """Goes on from where the prompt leaves off, so that a turn in two parts is the same as in one."""
    done = len(token_ids) - len(PROMPT)
    return TURN[done:]


class Setup:
    def __init__(self, client, fakes, urls, stream_first_turn=True, **sections):
        self.fakes = fakes
        self.urls = urls
        self.stale = []
        self.told = asyncio.Event()
        self.slept = []
        self.pool = ServerPool(self._report)
        self.pool.update(serving_at(*urls, version=7))
        self.sampler = Sampler(
            client,
            self.pool,
            config(WORKER, rollout={"temperature": 0.9}, **sections),
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
    async with InferenceClient(timeout_s) as client, serving(fakes[0]) as first:
        if servers == 1:
            yield Setup(client, fakes, [first], **options)
            return
        async with serving(fakes[1]) as second:
            yield Setup(client, fakes, [first, second], **options)


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


async def test_a_lone_server_is_given_time_that_grows():
    async with setup(Fault("status", times=3)) as s:
        assert (await s.turn()).token_ids == TURN
    assert s.sampler.retries == 3
    assert len(s.slept) == 3
    assert all(base / 2 <= slept <= base for base, slept in zip([0.5, 1.0, 2.0], s.slept, strict=True))


async def test_a_connection_that_broke_in_the_pool_is_asked_again_at_once():
    async with setup(Fault("drop")) as s:
        assert (await s.turn()).token_ids == TURN
    assert s.slept == []


@pytest.mark.parametrize("status", [400, 403, 404, 422])
async def test_a_4xx_is_never_tried_again(status):
    async with setup(Fault("status", status=status, times=None), servers=2) as s:
        with pytest.raises(EpisodeFailed, match=f"HTTP {status}") as caught:
            await s.turn()
    assert (caught.value.reason, caught.value.retryable) == ("rejected", False)
    assert s.fakes[0].calls == ["/inference/v1/generate"]
    assert s.fakes[1].calls == []


async def test_f5_attempts_are_bounded():
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
async def test_f17_a_sample_that_cannot_be_trained_on_fails_the_episode(fault, reason):
    async with setup(Fault(fault)) as s:
        with pytest.raises(EpisodeFailed) as caught:
            await s.turn()
    assert caught.value.reason == reason
    assert len(s.fakes[0].requests) == 1


async def test_f16_i5_a_restarted_server_is_reported_and_left_alone():
    async with setup(servers=2) as s:
        s.fakes[0].engine.restart()
        turn = await s.turn()
        later = [await s.turn() for _ in range(3)]
    assert [t.spans[0].version for t in [turn, *later]] == [7] * 4
    assert len(s.fakes[0].requests) == 1
    (stale,) = s.stale
    assert (stale.name, stale.state) == ("vllm-0", ServerState.JOINING)
    assert "'default'" in stale.reason


async def test_f16_with_no_server_left_the_episode_waits_for_the_registry():
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


async def test_f22_a_finished_continuation_does_not_wait_for_its_siblings():
    async with setup() as s:
        s.fakes[0].engine.latency_s = lambda index: 0.0 if index == 0 else 30.0
        first = s.sampler.first_turn([Affinity(), Affinity()], PROMPT, 16)
        fill = asyncio.create_task(first.fills[0])
        choice = await asyncio.wait_for(first.pending[0], 20)
        assert (choice.server, choice.choice.token_ids) == ("vllm-0", TURN)
        assert not first.pending[1].done()
        fill.cancel()
