"""What workers and publications rely on of any inference server: run over the fake, and in `tests/e2e` over vLLM.

Each check asks through the two ports alone (`rollout_worker.inference.engine`, `weight_sync.server.engine`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from slipstream.protocol.engine import EngineState, ServerFacts
from slipstream.protocol.messages import Server
from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import Engine as SamplingEngine
from slipstream.rollout_worker.inference.engine import Known, Sampled, SampledSpan, TurnRequest
from slipstream.rollout_worker.inference.failures import RequestRejected, UnknownWeights
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError, Engine
from tests.kit.config import config

PROMPT = [5, 6, 7, 8]
RUN, VERSION = "run-1", 7
# Two paths of one server through the same weights: a few times the last bit of a log-prob.
CLOSE = 2e-5


def request(name: str, tokens: int = 6, n: int = 1, stream: bool = False, prompt: list[int] = PROMPT) -> TurnRequest:
    return TurnRequest(name, prompt, tokens, config().rollout, [], "salt", n, stream, exact=True)


async def sampled(engine: SamplingEngine, url: str, wanted: TurnRequest, run: str = RUN) -> dict[int, Sampled]:
    answers = [answer async for answer in engine.generate(Server("a", url, version=VERSION), wanted)]
    return {answer.index: answer.checked(Known(run, VERSION)) for answer in answers}


async def samples_with_versions(url: str) -> None:
    async with InferenceClient(60.0) as engine:
        whole = await sampled(engine, url, request("whole", n=3))
        streamed = await sampled(engine, url, request("streamed", n=3, stream=True))
    for turns in (whole, streamed):
        assert sorted(turns) == [0, 1, 2]
        for turn in turns.values():
            assert len(turn.token_ids) == len(turn.logprobs) == 6
            assert turn.spans == [SampledSpan(VERSION, 0, 6, "a")]
            assert turn.finish_reason == "length"


async def counts_what_it_samples(url: str) -> None:
    async with InferenceClient(60.0) as engine, ServerControl(url, 30) as control:
        before = (await control.state()).generated
        await sampled(engine, url, request("counted", tokens=5, n=2))
        assert (await control.state()).generated == before + 10


async def refuses_another_runs_tokens(url: str) -> None:
    async with InferenceClient(60.0) as engine:
        with pytest.raises(UnknownWeights, match=f"version {VERSION} of run {RUN}"):
            await sampled(engine, url, request("theirs"), run="other-2")


async def an_abort_returns_the_tokens_so_far(url: str) -> None:
    async with InferenceClient(60.0) as engine, ServerControl(url, 30, run_id=lambda: RUN) as control:
        await engine.abort(url, ["nobody"])
        await control.pause(clear_cache=False)
        try:
            waiting = asyncio.create_task(sampled(engine, url, request("held", 400)))
            for _ in range(100):
                await asyncio.sleep(0.1)
                await engine.abort(url, ["held"])
                if waiting.done():
                    break
        finally:
            await control.resume()
        (turn,) = (await waiting).values()
        assert turn.finish_reason == "abort"
        assert len(turn.token_ids) < 400


async def a_prompt_beyond_its_context_is_the_requests_fault(url: str) -> None:
    async with InferenceClient(60.0) as engine, ServerControl(url, 30) as control:
        longest = (await control.facts()).max_model_len
        assert longest is not None
        with pytest.raises(RequestRejected):
            await sampled(engine, url, request("long", prompt=[5] * (longest + 1)))


async def says_what_it_is(url: str) -> None:
    async with ServerControl(url, 30, run_id=lambda: RUN) as control:
        await control.wait_until_up(30)
        facts, state = await control.facts(), await control.state()
        assert isinstance(facts, ServerFacts)
        assert (facts.served_name, facts.scale_out, facts.engines) == (SERVED_MODEL_NAME, True, 1)
        assert (facts.logprobs_mode, facts.dtype, facts.transport) == ("processed_logprobs", "float32", "gloo")
        assert isinstance(state, EngineState)
        assert (state.label, state.paused, state.whole, state.alive) == (f"{RUN}:{VERSION}", False, True, True)
        assert (state.pause_owner, state.workers, state.transport) == ("none", 1, "gloo")
        assert (state.reason, state.stuck, state.owner) == (None, None, RUN)
        await control.goodbye()
        assert (await control.state()).boot == state.boot


async def scores_alike_by_both_paths(url: str) -> None:
    async with ServerControl(url, 30) as control:
        alone, again = await control.score([PROMPT, PROMPT[:3]])
        served = await control.score_by_request(PROMPT)
    assert alone.shape == served.shape == (1, len(PROMPT) - 1)
    assert again.shape == (1, 2)
    assert np.abs(alone - served).max() < CLOSE


async def a_pause_under_a_lease_is_renewed_and_ended(url: str) -> None:
    async with ServerControl(url, 30, run_id=lambda: RUN) as control:
        await control.pause(clear_cache=False)
        await control.pause(clear_cache=True)
        await control.lease(15.0)
        state = await control.state()
        assert (state.paused, state.pause_owner) == (True, "publication")
        await control.resume()
        assert not (await control.state()).paused
        await control.goodbye()


async def another_run_may_look_and_change_nothing(url: str) -> None:
    async with (
        ServerControl(url, 30, run_id=lambda: RUN) as ours,
        ServerControl(url, 30, run_id=lambda: "other-2") as theirs,
    ):
        await ours.end_transfer()
        assert (await theirs.state()).owner == RUN
        with pytest.raises(ControlError, match=f"serves run {RUN}") as refused:
            await theirs.swap("other-2:1", clear_cache=False)
        assert refused.value.status == 409
        await ours.goodbye()
        assert (await ours.state()).label == f"{RUN}:{VERSION}"


async def nothing_is_swapped_in_unless_it_was_staged(url: str) -> None:
    async with ServerControl(url, 30, run_id=lambda: RUN) as control:
        for _ in range(2):
            await control.end_transfer()
        with pytest.raises(ControlError) as refused:
            await control.swap(f"{RUN}:{VERSION + 1}", clear_cache=False)
        assert refused.value.answered
        state = await control.state()
        assert (state.label, state.whole, state.paused) == (f"{RUN}:{VERSION}", True, False)
        await control.goodbye()


async def adapters_are_off_unless_the_server_takes_them(url: str) -> None:
    control: Engine
    async with ServerControl(url, 30) as control:
        with pytest.raises(ControlError) as refused:
            await control.adapters()
    assert refused.value.status == 404


CHECKS: dict[str, Callable[[str], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        samples_with_versions,
        counts_what_it_samples,
        refuses_another_runs_tokens,
        an_abort_returns_the_tokens_so_far,
        a_prompt_beyond_its_context_is_the_requests_fault,
        says_what_it_is,
        scores_alike_by_both_paths,
        a_pause_under_a_lease_is_renewed_and_ended,
        another_run_may_look_and_change_nothing,
        nothing_is_swapped_in_unless_it_was_staged,
        adapters_are_off_unless_the_server_takes_them,
    )
}
