"""The preflight asks running servers what weight sync will ask them, with the token that it will send."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy import preflight
from protocol.config import ConfigError, load
from tests.kit.fake_vllm import FakeVllm, serving


@pytest.mark.parametrize(
    ("lack", "says"),
    [
        ({"token": "secret"}, "/weight_info answers HTTP 401; set SLIPSTREAM_TOKEN to the server's"),
        ({"dev_mode": False}, "/weight_info answers HTTP 404; it needs VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_a_server_that_weight_sync_could_not_use(run_file: Path, lack: dict[str, Any], says: str) -> None:
    async with serving(FakeVllm(**lack)) as url:
        config = load(run_file, ["--vllm.servers", f'["{url}"]'])
        with pytest.raises(ConfigError, match=f"{url}{says}; start it with: slipstream vllm run.toml"):
            await asyncio.to_thread(preflight.check, config, resume=False)


async def test_i8_the_token_is_sent(run_file: Path) -> None:
    async with serving(FakeVllm(token="secret")) as url:
        config = load(run_file, ["--vllm.servers", f'["{url}"]', "--queue.token", "secret"])
        await asyncio.to_thread(preflight.check, config, resume=False)
