"""The http transport and its deltas against a real vLLM server, which passes on what it has staged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.deploy.servers import vllm_server
from slipstream.protocol.config import RunConfig, load
from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.transports.base import StagedTransport, build_transport
from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.pull import Pull
from slipstream.weight_sync.transports.http.sender import BLOB_SERVERS, HttpSender
from tests.e2e.conftest import EXAMPLE, MODULES, wait_until_healthy
from tests.e2e.test_weight_sync import TOLERANCE, perturb, snapshot
from tests.kit.ports import free_port
from tests.kit.supervised import processes

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def config(model_folder: Path) -> RunConfig:
    flags = {
        "--model.path": str(model_folder),
        "--vllm.port": str(free_port()),
        "--weight_sync.transport": "http",
        "--weight_sync.delta": "true",
        "--weight_sync.timeout_s": "30",
    }
    return load(EXAMPLE / "run.toml", [part for flag in flags.items() for part in flag])


@pytest.fixture(scope="module")
def url(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes(tmp_path_factory.mktemp("vllm-http"), MODULES) as started:
        env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1"}
        started.start("vllm", *vllm_server.command(vllm_server.with_cpu_settings(config), 0), env=env)
        wait_until_healthy(config.vllm.urls[0], started)
        yield config.vllm.urls[0]


async def test_versions_and_deltas_are_pulled_proven_and_passed_on(
    config: RunConfig, url: str, model_folder: Path
) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    transports: list[StagedTransport] = []

    def make() -> StagedTransport:
        transports.append(build_transport(config.weight_sync))  # type: ignore[arg-type]
        return transports[-1]

    async with ServerControl(url, timeout_s=30, token=config.token) as control:
        sync = ServerSync(control, make, TOLERANCE)
        for version in range(1, 5):
            if version != 3:
                perturb(model)
            else:  # few values: a delta
                with torch.no_grad():
                    model.model.layers[0].mlp.up_proj.weight[3] += 0.05
            sent = snapshot(model, version)
            outcome = await sync.publish(sent)
            assert outcome.proof.max_abs_diff < TOLERANCE
            assert await control.weight_label() == str(version)
            if version == 3:
                took = transports[0].sent
                assert took is not None
                assert took.share_changed is not None
                assert took.sent_bytes < 0.01 * took.whole_bytes
        assert len(transports) == 1

        # Another server pulls from this one, with the transfer's secret, and nobody without.
        depot = BLOB_SERVERS.take(
            config.weight_sync.host, config.weight_sync.http_port, config.weight_sync.http_mbytes_per_s
        )
        (sender,) = transports[0].senders
        assert isinstance(sender, HttpSender)
        into = memoryview(bytearray(len(sent.flat)))
        peer = url + chunks.CHUNKS_PREFIX + sender.key
        report = await on_thread(Pull(ChunkList.of(sent.flat), depot.secret, [peer], into, 20).run)
        assert bytes(into) == sent.flat.numpy().tobytes()
        assert report.by_source == {peer: len(into)}
        async with aiohttp.ClientSession() as session, session.get(peer) as answer:
            assert answer.status == 401
        BLOB_SERVERS.leave(depot)
        await sync.disconnect()
