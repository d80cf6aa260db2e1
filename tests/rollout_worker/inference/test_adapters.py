"""Sampling from a server that serves versions as adapters: which one is asked for, and whose tokens they are."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from slipstream.protocol.messages import ServerState
from slipstream.protocol.versions import name_of, version_of
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import SampledSpan
from tests.kit.fake_vllm import serving
from tests.kit.fake_vllm.adapters import FakeAdapters
from tests.kit.stand_in_queue import serving_at
from tests.kit.worker import fake
from tests.rollout_worker.inference.test_sampler import TURN, Setup, counting

SEVEN, EIGHT, NINE = (name_of(version, str(version) * 64) for version in (7, 8, 9))


def served(*names, loaded=()):
    """A server of adapters that serves the last of `names`, at the base's label."""
    server = fake(counting, version=7)
    server.engine.weight_version = "default"
    server.adapters = FakeAdapters()
    serve(server, *names)
    return server


def serve(server, *names):
    server.adapters.loaded = dict.fromkeys(names, b"")
    server.adapters.served = names[-1]


@asynccontextmanager
async def against(*fakes):
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in fakes]
        client = await stack.enter_async_context(InferenceClient(60.0))
        setup = Setup(client, fakes, urls)
        running = asyncio.create_task(setup.pool.run())
        try:
            yield setup
        finally:
            running.cancel()


def models(server):
    return [body["model"] for body in server.requests]


async def test_the_span_has_the_version_of_the_adapter_not_the_engines_label():
    async with against(served(SEVEN)) as s:
        turn = await s.turn()
        assert turn.token_ids == TURN
        assert turn.spans == [SampledSpan(7, 0, 5, s.pool.known[0])]


async def test_a_worker_is_told_the_adapter_once_and_asks_for_it_from_then_on():
    async with against(served(SEVEN)) as s:
        for _ in range(3):
            await s.turn()
        # The base was asked for and refused, which is no failure of the server.
        assert models(s.fakes[0]) == ["policy", SEVEN, SEVEN, SEVEN]
        assert s.sampler.retries == 0
        assert s.notices == []


async def test_the_newest_adapter_is_learnt_from_an_answer_without_the_registry():
    async with against(served(SEVEN)) as s:
        await s.turn()
        serve(s.fakes[0], SEVEN, EIGHT)
        assert (await s.turn()).spans[0].version == 7
        assert (await s.turn()).spans[0].version == 8


async def test_requests_in_flight_keep_their_adapter():
    async with against(served(SEVEN)) as s:
        await s.turn()
        s.fakes[0].engine.pause()
        running = asyncio.create_task(s.turn())
        await s.on_the_way(3)
        serve(s.fakes[0], EIGHT)
        s.fakes[0].engine.resume()
        assert (await running).spans == [SampledSpan(7, 0, 5, s.pool.known[0])]


async def test_an_adapter_that_is_gone_leads_to_the_newest_at_once():
    async with against(served(SEVEN)) as s:
        await s.turn()
        serve(s.fakes[0], NINE)
        assert (await s.turn()).spans[0].version == 9
        assert s.sampler.retries == 0
        assert s.notices == []


async def test_a_first_turn_is_one_request_under_one_adapter():
    async with against(served(SEVEN, EIGHT)) as s:
        turns = await s.first_turns([*make(4)])
        assert [turn.spans[0].version for turn in turns] == [8] * 4
        assert [body["sampling_params"]["n"] for body in s.fakes[0].requests] == [4, 4]


async def test_prefix_caches_are_apart_by_adapter():
    async with against(served(SEVEN)) as s:
        await s.turn()
        await s.turn()
        serve(s.fakes[0], SEVEN, EIGHT)
        await s.turn()
        await s.turn()
        salts = {(body["model"], body["cache_salt"]) for body in s.fakes[0].requests[2:]}
        assert len({salt for _, salt in salts}) == 2
        assert all(salt.endswith(model) for model, salt in salts)


async def test_a_server_that_lost_its_adapters_is_used_no_more_until_it_is_proven_again():
    async with against(served(SEVEN), served(SEVEN)) as s:
        first, second = s.fakes
        names = s.pool.known
        await asyncio.gather(*(s.turn() for _ in range(6)))
        assert first.requests
        assert second.requests
        first.adapters.restart()
        turns = await asyncio.gather(*(s.turn() for _ in range(6)))
        # No token of base weights: all are of the other one, whichever was asked first.
        assert {span.server for turn in turns for span in turn.spans} == {names[1]}
        assert {span.version for turn in turns for span in turn.spans} == {7}
        [report] = s.stale
        assert (report.name, report.state, report.version) == (names[0], ServerState.JOINING, None)
        assert s.pool.known == [names[1]]


async def test_a_worker_that_never_knew_of_adapters_trains_no_token_of_the_base():
    async with against(served(SEVEN), served(SEVEN)) as s:
        s.fakes[0].adapters.restart()  # it answers a request for the base, with the base's label
        await asyncio.gather(*(s.turn() for _ in range(6)))
        [report] = s.stale
        assert report.name == "vllm-0" or report.url == s.urls[0]


async def test_a_version_that_the_registry_cannot_know_yet_is_still_refused():
    far = name_of(7 + 33, "f" * 64)
    async with against(served(far), served(SEVEN)) as s:
        turns = await asyncio.gather(*(s.turn() for _ in range(4)))
        assert {turn.spans[0].version for turn in turns} == {7}


async def test_i5_another_runs_adapter_does_not_pass_as_ours():
    """The server of another run names that run's version 7; once it names ours, it is asked for that one."""
    theirs, ours = (name_of(7, "7" * 64, run) for run in ("other-2", "ours-1"))
    async with against(served(theirs), served(ours)) as s:
        names = s.pool.known
        s.pool.update(serving_at(*s.urls, version=7), "ours-1")
        turns = await asyncio.gather(*(s.turn() for _ in range(4)))
        assert {span.server for turn in turns for span in turn.spans} == {names[1]}
        [report] = s.stale
        assert (report.name, report.reason) == (names[0], "sampled from version 7 of run other-2")
        serve(s.fakes[0], theirs, ours)
        proven = serving_at(*s.urls, version=7)
        proven[0].changed_at = proven[1].changed_at = 2.0
        s.pool.update(proven, "ours-1")
        await asyncio.gather(*(s.turn() for _ in range(4)))
        assert (len(s.stale), models(s.fakes[0])[-1]) == (1, ours)


@pytest.mark.parametrize("name", ["policy", "policy-v7", "policy-v.0123456789abcdef", "policy-v7.0123456789abcdeg", ""])
def test_only_our_own_names_have_a_version(name):
    assert version_of(name) is None


def make(count):
    from slipstream.rollout_worker.inference.router import Affinity

    return (Affinity() for _ in range(count))
