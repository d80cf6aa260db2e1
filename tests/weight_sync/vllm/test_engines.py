"""A data-parallel server: every engine and every worker counts, in the swap, in the state and in the proof."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.protocol.engine import LayerFindings, Scores, Swap
from slipstream.weight_sync.vllm import engines, routes
from slipstream.weight_sync.vllm.engine import engine_core
from slipstream.weight_sync.vllm.engine_state import RouteError, status_of
from tests.weight_sync.vllm.engine.test_engine_swap import READY, Core

BUILDING = {"stage": "building", "error": None, "seconds": {}}


class EngineOfServer(Core):
    """One engine of a server, with two workers. `answers`: what each worker's methods return, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "r:1"
        self.answers: dict[str, Any] = {
            "slipstream_staging": [READY, READY],
            "slipstream_exchange": [0.001, 0.002],
            "slipstream_drop_update": [False, False],
            "slipstream_score": [{"logprobs": None}, {"logprobs": [[-1.0]]}],
            "slipstream_read_layers": [{}, {}],
            "slipstream_layers": [{"checked": 4, "wrong": [], "unread": []}] * 2,
        }

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        self.done.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def set_weight_version(self, label: str) -> None:
        self.label = label

    def get_weight_version(self) -> str:
        return self.label

    def is_scheduler_paused(self) -> bool:
        return self.pause_state.name != "UNPAUSED"


class Client:
    """vLLM's client of two engines."""

    def __init__(self, is_moe: bool = False) -> None:
        self.cores = [EngineOfServer(), EngineOfServer()]
        self.engine_core = self
        self.order: list[str] = []
        self.asked = asyncio.Event()
        parallel = SimpleNamespace(data_parallel_size=2, world_size_across_dp=4, _api_process_count=1)
        parallel.local_engines_only = False
        model = SimpleNamespace(is_moe=is_moe)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model, weight_transfer_config=None)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=64)

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        self.order.append(method)
        function = getattr(engine_core, method.removeprefix("slipstream_"))
        answers = [function(core, *args) for core in self.cores]
        self.asked.set()
        await asyncio.sleep(0)
        return answers

    async def is_scheduler_paused_async(self) -> bool:
        return self.cores[0].is_scheduler_paused()

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.order.append("pause")

    async def resume_scheduler_async(self) -> None:
        self.order.append("resume")


async def swap(client: Client) -> Swap:
    return await routes.swap(client, {"label": "r:2"})


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "mixture"])
async def test_all_engines_swap_and_those_of_a_mixture_stand_still_before_the_first_does(is_moe: bool) -> None:
    client = Client(is_moe)
    assert (await swap(client)).exchange_s == 0.002
    assert [core.label for core in client.cores] == ["r:2", "r:2"]
    assert all("slipstream_exchange" in core.done for core in client.cores)
    mixture = ["slipstream_workers", "pause", "slipstream_exchange", "resume"]
    assert client.order == (mixture if is_moe else ["slipstream_workers", "slipstream_swap"])


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "mixture"])
async def test_an_engine_that_still_builds_keeps_all_from_swapping_and_its_server_goes_on(is_moe: bool) -> None:
    client = Client(is_moe)
    client.cores[1].answers["slipstream_staging"] = [READY, BUILDING]
    with pytest.raises(RouteError, match=r"^engine 1, worker 1 is not ready to swap: building$") as refused:
        await swap(client)
    assert refused.value.status == 409
    assert [core.label for core in client.cores] == ["r:1", "r:1"]
    assert not any("slipstream_exchange" in core.done for core in client.cores)
    status = status_of(client)
    assert (status.whole, status.broken) == (True, None)


@pytest.mark.parametrize(
    ("method", "answers", "named"),
    [
        ("slipstream_exchange", [0.001, "OSError: no room"], "half-way: engine 1: worker 1: OSError: no room"),
        # Dropped after all had been found ready: one engine has the new weights, the other the old ones.
        ("slipstream_staging", [READY, {"stage": "failed", "error": "dropped"}], "engine 1: worker 1 is not ready"),
    ],
)
async def test_engines_that_end_with_different_weights_end_their_server(
    monkeypatch: pytest.MonkeyPatch, method: str, answers: list[Any], named: str
) -> None:
    client = Client()
    status = status_of(client)
    status.end = lambda: None
    ready = engines.ask_workers

    async def then_changes(*asked: Any) -> Any:
        found = await ready(*asked)
        client.cores[1].answers[method] = answers
        return found

    monkeypatch.setattr(engines, "ask_workers", then_changes)
    with pytest.raises(RouteError, match=named):
        await swap(client)
    assert not status.whole


async def test_a_worker_that_raises_is_told_with_its_engine() -> None:
    client = Client()
    client.cores[1].answers["slipstream_drop_update"] = RuntimeError("boom")
    with pytest.raises(RouteError, match=r"^engine 1: RuntimeError: boom$"):
        await routes.drop_update(client, {})


async def test_a_label_that_engines_do_not_share_is_no_label_of_a_run() -> None:
    client = Client()
    assert (await routes.state(client, {})).label == "r:1"
    client.cores[1].label = "default"
    state = await routes.state(client, {})
    assert state.label == "engine 0: r:1, engine 1: default"
    with pytest.raises(RouteError, match=r"weights 'engine 0: r:1, engine 1: default' serve, not 'r:1'"):
        await routes.layers(client, {"label": "r:1"})


async def test_engines_in_the_middle_of_a_swap_do_not_differ() -> None:
    client = Client()
    status = status_of(client)
    status.swapped = asyncio.Event()
    client.cores[1].label = "r:2"
    asking = asyncio.create_task(routes.state(client, {}))
    await client.asked.wait()
    client.cores[0].label = "r:2"
    status.swapped.set()
    assert (await asking).label == "r:2"


async def test_one_engine_that_is_paused_or_started_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.interface import PauseState

    client = Client()
    before = await routes.state(client, {})
    assert not before.paused
    client.cores[1].pause_state = PauseState.PAUSED_NEW
    assert (await routes.state(client, {})).paused
    answers = iter([{"boot": "e0"}, {"boot": "e1"}])
    other = engine_core.state(client.cores[0])
    monkeypatch.setattr(engine_core, "state", lambda core: {**other, **next(answers)})
    assert (await routes.state(client, {})).boot.endswith("-e0-e1")


async def test_every_engine_is_scored_and_every_workers_layers_count() -> None:
    client = Client()
    client.cores[1].answers["slipstream_score"] = [{"logprobs": [[-2.0]]}, {"logprobs": [[-2.0]]}]
    scored = await routes.score(client, {"token_ids": [[1, 2]]})
    assert scored == Scores([[[-1.0]], [[-2.0]]])
    wrong = {"checked": 4, "wrong": ["mlp.weight"], "unread": []}
    client.cores[1].answers["slipstream_layers"] = [{"checked": 4, "wrong": [], "unread": []}, wrong]
    found = await routes.layers(client, {"label": "r:1"})
    assert found == LayerFindings(16, ["engine 1, worker 1: mlp.weight"], [])
    client.cores[1].answers["slipstream_score"] = [{"cannot": "its engines step together"}] * 2
    with pytest.raises(RouteError, match="its engines step together") as refused:
        await routes.score(client, {"token_ids": [[1, 2]]})
    assert refused.value.status == 501


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"_api_process_count": 2}, "2 API processes.*--api-server-count 1"),
        ({"local_engines_only": True}, "without --data-parallel-external-lb"),
    ],
)
async def test_a_server_that_cannot_be_controlled_says_how_to_start_it(flags: dict[str, Any], remedy: str) -> None:
    client = Client()
    vars(client.vllm_config.parallel_config).update(flags)
    state = await routes.state(client, {})
    assert re.search(remedy, state.reason)
