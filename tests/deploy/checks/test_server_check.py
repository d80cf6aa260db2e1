"""Servers that somebody else started: the preflight asks them what weight sync will ask them, with the token that it
will send, and reads their settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slipstream.deploy.checks import preflight
from slipstream.protocol.config import ConfigError, load
from slipstream.protocol.engine import ServerFacts
from slipstream.weight_sync.fleet.eligibility import Wanted, judge
from slipstream.weight_sync.server.answers import facts_of_description
from tests.deploy.conftest import TASK
from tests.kit.config import config
from tests.kit.fake_vllm import FakeEngine, FakeVllm, serving
from tests.kit.ports import free_port

GOOD = ServerFacts(
    version="0.32.0",
    served_name="policy",
    logprobs_mode="processed_logprobs",
    dtype="float32",
    max_model_len=4096,
    transport="gloo",
    scale_out=True,
)


def test_auto_takes_whatever_transport_the_server_was_started_with() -> None:
    for backend in ("gloo", "nccl_staged", "slipstream_ipc"):
        assert judge(msgspec.structs.replace(GOOD, transport=backend), Wanted.of(config())) == []


def test_a_quantised_server_needs_a_tolerance_that_allows_for_it() -> None:
    (fault,) = judge(msgspec.structs.replace(GOOD, quantization="fp8"), Wanted.of(config()))
    assert "probe_tolerance = auto" in fault.what


@pytest.mark.parametrize(
    ("wrong", "what", "flag"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "wrong at any temperature but 1", "--logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, and model.dtype = float32", "--dtype float32"),
        ({"max_model_len": 2048}, "2048 tokens, less than vllm.max_model_len = 4096", "--max-model-len 4096"),
        ({"transport": None}, "its weight transfer is off", '--weight-transfer-config \'{"backend": "gloo"}\''),
        ({"transport": "nccl"}, "is nccl, and weight_sync.transport = gloo", "--weight-transfer-config"),
        ({"scale_out": False}, "it generates no tokens from tokens", "--enable-scale-out"),
        ({"max_logprobs": 20}, "at most 20 log-probs of a token, and rollout.top_k needs 33", "--max-logprobs 33"),
        ({"served_name": "Qwen/Qwen3"}, "serves the model as 'Qwen/Qwen3'", "--served-model-name policy"),
    ],
)
def test_each_fault_is_told_with_the_flag_that_mends_it(wrong: dict[str, Any], what: str, flag: str) -> None:
    wanted = Wanted.of(config(weight_sync={"transport": "gloo"}, rollout={"top_k": 20}))
    (fault,) = judge(msgspec.structs.replace(GOOD, **wrong), wanted)
    assert what in fault.what
    assert flag in fault.flag


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        msgspec.structs.replace(GOOD, max_model_len=8192),
        msgspec.structs.replace(GOOD, served_name=None, logprobs_mode=None, dtype=None, max_model_len=None),
    ],
    ids=["as ours", "a longer context", "says nothing of its model"],
)
def test_a_server_that_suits_has_no_fault(facts: ServerFacts) -> None:
    assert judge(facts, Wanted.of(config())) == []
    assert judge(msgspec.structs.replace(facts, max_logprobs=20), Wanted.of(config())) == []
    for most in (-1, 33):
        assert judge(msgspec.structs.replace(facts, max_logprobs=most), Wanted.of(config(rollout={"top_k": 20}))) == []


def test_what_vllm_032_says_of_itself_is_read() -> None:
    """The parts of its answer that count, as a server of `slipstream vllm` gave them."""
    model = {"dtype": "torch.float32", "max_model_len": 512, "logprobs_mode": "processed_logprobs"}
    model["served_model_name"] = "policy"
    info = {"vllm_config": {"model_config": model, "weight_transfer_config": {"backend": "gloo"}}}
    assert facts_of_description("0.32.0", info, True) == msgspec.structs.replace(GOOD, max_model_len=512)
    assert facts_of_description(None, {"vllm_config": "a text"}, False).transport is None


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
            await asyncio.to_thread(preflight.check_run, config, resume=False)


async def test_a_web_server_that_is_no_vllm_is_called_that(run_file: Path) -> None:
    """It lacks more than VLLM_SERVER_DEV_MODE, which would not help."""
    async with web_server() as url:
        config = load(run_file, ["--vllm.servers", f'["{url}"]'])
        with pytest.raises(ConfigError, match=f"{url} is not a vLLM server: it answers HTTP 404") as error:
            await asyncio.to_thread(preflight.check_servers, config)
    assert "VLLM_SERVER_DEV_MODE" not in str(error.value)


@asynccontextmanager
async def web_server() -> AsyncIterator[str]:
    async with TestServer(web.Application()) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_all_faults_of_a_server_stand_in_one_message(run_file: Path) -> None:
    async with serving(FakeVllm(scale_out=False, says={"logprobs_mode": "raw_logprobs"})) as url:
        config = load(run_file, ["--vllm.servers", f'["{url}"]', "--vllm.max_model_len", "1024"])
        with pytest.raises(ConfigError, match=rf"{url}: .*; start it with: .*--enable-scale-out --logprobs-mode"):
            await asyncio.to_thread(preflight.check_servers, config)


async def test_a_version_that_was_not_tried_is_a_warning(run_file: Path) -> None:
    async with serving(FakeVllm(engine=FakeEngine(max_model_len=4096), version="0.99.0")) as url:
        servers = await asyncio.to_thread(preflight.check_servers, load(run_file, ["--vllm.servers", f'["{url}"]']))
    (finding,) = preflight.find_untried_versions(servers)
    assert f"{url} runs vLLM 0.99.0; weight sync was tried with 0.32.0 only" in finding.text


async def test_i8_the_token_is_sent(run_file: Path) -> None:
    async with serving(FakeVllm(engine=FakeEngine(max_model_len=4096), token="secret")) as url:
        config = load(run_file, ["--vllm.servers", f'["{url}"]', "--queue.token", "secret"])
        checked = await asyncio.to_thread(preflight.check_run, config, resume=False)
    assert checked.findings == [], "a version that was tried is no warning"


def test_a_mistake_in_the_task_is_told_before_servers_are_looked_for(run_file: Path) -> None:
    """Both are wrong here, and the task costs no second round."""
    (run_file.parent / "task.py").write_text(TASK.replace('{"prompt"', '{"promt"'), encoding="utf-8")
    nowhere = ["--vllm.servers", f'["http://127.0.0.1:{free_port()}"]']
    with pytest.raises(ConfigError, match="promt"):
        preflight.check_run(load(run_file, nowhere), resume=False)
    (run_file.parent / "task.py").write_text(TASK, encoding="utf-8")
    with pytest.raises(ConfigError, match="no vLLM server answers"):
        preflight.check_run(load(run_file, nowhere), resume=False)
