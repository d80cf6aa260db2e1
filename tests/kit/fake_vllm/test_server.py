"""The fake behaves as vLLM 0.32 does where others rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.kit.fake_vllm import FakeEngine, FakeVllm, Fault, serving

GENERATE = "/inference/v1/generate"


def body(**params: Any) -> dict[str, Any]:
    return {
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 4, "logprobs": 0, **params},
        "model": "policy",
    }


def server(**options: Any) -> FakeVllm:
    return FakeVllm(FakeEngine(policy=lambda ids, index: [5, 6, 7], max_model_len=16, max_num_seqs=4), **options)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_the_life_of_a_weight_update(http: aiohttp.ClientSession) -> None:
    seen: list[Any] = []
    fake = server()
    fake.engine.hooks["update_weights"] = seen.append
    async with serving(fake) as url:

        async def post(route: str, **json: Any) -> tuple[int, Any]:
            async with http.post(url + route, json=json or None) as response:
                return response.status, await response.json()

        assert (await post("/start_weight_update"))[0] == 500
        assert (await post("/init_weight_transfer_engine", init_info={"port": 1}))[0] == 200
        assert (await post("/start_weight_update"))[0] == 200
        assert (await post("/start_weight_update"))[0] == 500
        assert (await post("/update_weights", wrong={}))[0] == 400
        assert (await post("/update_weights", update_info={"names": ["w"]}))[0] == 200
        assert (await post("/shutdown_weight_transfer_engine"))[0] == 500
        assert (await post("/finish_weight_update", weight_version="3"))[0] == 200
        assert (await post("/update_weight_version", new_version="4"))[1]["new_version"] == "4"
        async with http.get(url + "/weight_info") as response:
            assert await response.json() == {"weight_version": "4"}
    assert seen == [{"names": ["w"]}]


async def test_requests_wait_while_paused_and_take_the_version_of_the_resume(http: aiohttp.ClientSession) -> None:
    fake = server()
    async with serving(fake) as url:
        await http.post(url + "/pause?mode=keep&clear_cache=false")
        async with http.get(url + "/is_paused") as response:
            assert await response.json() == {"is_paused": True}
        asking = asyncio.ensure_future(http.post(url + GENERATE, json=body()))
        await asyncio.sleep(0.05)
        assert not asking.done()
        fake.engine.weight_version = "2"
        await http.post(url + "/resume")
        reply = await (await asking).json()
    assert reply["choices"][0]["weight_versions"] == [{"version": "2", "start": 0, "end": 3}]


@pytest.mark.parametrize(
    ("options", "request_body", "status", "message"),
    [
        ({"scale_out": False}, body(), 403, "--enable-scale-out"),
        ({}, {**body(), "model": "other"}, 404, "`other` does not exist"),
        ({}, body(max_tokens=14), 400, "maximum context length is 16"),
        ({}, body(n=5), 400, "max_num_seqs"),
    ],
)
async def test_refusals_have_vllms_shape(
    http: aiohttp.ClientSession, options: dict[str, Any], request_body: dict[str, Any], status: int, message: str
) -> None:
    async with serving(server(**options)) as url, http.post(url + GENERATE, json=request_body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert error["code"] == status
    assert message in error["message"]


async def test_control_routes_exist_in_dev_mode_only(http: aiohttp.ClientSession) -> None:
    async with serving(server(dev_mode=False)) as url, http.post(url + "/pause") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == 404


async def test_the_probe_scores_a_prompt(http: aiohttp.ClientSession) -> None:
    async with serving(server()) as url:
        request = {"prompt": [1, 2, 3], "prompt_logprobs": 0, "max_tokens": 1}
        async with http.post(url + "/v1/completions", json=request) as response:
            (choice,) = (await response.json())["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [["2"], ["3"]]
    assert choice["prompt_logprobs"][1]["2"]["logprob"] < 0


async def test_faults_are_set_over_http_and_pass(http: aiohttp.ClientSession) -> None:
    async with serving(server()) as url:
        await http.post(url + "/_fault", json={"kind": "status", "status": 503, "route": "/health"})
        statuses = [(await http.get(url + "/health")).status for _ in range(2)]
        await http.post(url + "/_fault", json={"kind": "slow", "seconds": 0.0})
        await http.delete(url + "/_fault")
    assert statuses == [503, 200]


def test_a_fault_without_count_stays() -> None:
    fake = server()
    fake.faults.append(Fault("status", times=None))
    assert [fault.kind for _ in range(3) if (fault := fake.faults.take(GENERATE))] == ["status"] * 3
    assert fake.faults.take("/health") is None
