"""The proof against the real vLLM server: what the workers compute and hold, and faults that are put into them."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import numpy as np
import pytest

from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.weights.snapshot import probe_token_ids

pytestmark = pytest.mark.e2e

IDS = probe_token_ids(512)


async def generate(url: str, tokens: int) -> None:
    """All of the server's slots, and as many that wait."""
    params = {"n": 64, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": IDS[:8], "sampling_params": params, "output_mode": "tokens"}
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(_one(session, url, body))


async def _one(session: aiohttp.ClientSession, url: str, body: object) -> None:
    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
        assert response.status == 200
        await response.read()


async def test_the_workers_score_as_the_served_path_does_and_wait_for_no_episode(vllm_url: str) -> None:
    async with ServerControl(vllm_url, timeout_s=60) as control:
        served = await control.score_by_request(IDS)
        alone, again = await control.score([IDS, IDS])
        assert np.abs(alone - served).max() < 2e-5, "a few times the last bit of a log-prob of -18"
        assert np.array_equal(alone, again)
        busy = asyncio.create_task(generate(vllm_url, 400))
        await asyncio.sleep(1.0)
        took = []
        for _ in range(3):
            began = time.monotonic()
            (loaded,) = await control.score([IDS])
            took.append(time.monotonic() - began)
            assert np.array_equal(loaded, alone), "the same to the bit, whatever else runs"
        assert not busy.done()
        assert min(took) < 1.0
        await busy


@pytest.mark.parametrize("ids", [[1], [1, 512], [1, -1], [1, True], "12"])
async def test_ids_that_would_end_the_engine_are_refused(vllm_url: str, ids: list[int]) -> None:
    async with ServerControl(vllm_url, timeout_s=30) as control:
        with pytest.raises(ControlError, match="token_ids") as error:
            await control.score([ids])
        assert error.value.status == 400
        await control.wait_until_up(30)
