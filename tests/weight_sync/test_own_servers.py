"""`slipstream.servers`: a trainer without a queue publishes to two fake servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.own_servers import LocalRegistry, Servers
from slipstream.weight_sync.publisher import PublishError
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.fake_vllm.engine import logprob_of
from tests.kit.sync import FakeTransports

WEIGHTS = {"w": torch.ones(4)}


def score(token_ids: list[int]) -> list[float]:
    """As the fakes compute."""
    return [logprob_of(token, place) for place, token in enumerate(token_ids[1:], start=1)]


@contextlib.contextmanager
def fakes(*servers: FakeVllm) -> Iterator[list[str]]:
    """Serve them on their own loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = contextlib.AsyncExitStack()

    async def start() -> list[str]:
        return [await stack.enter_async_context(serving(server)) for server in servers]

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def own(urls: list[str], start_timeout_s: float = 5.0, quorum: int = 2) -> Servers:
    settings = config(
        weight_sync={"quorum": quorum, "timeout_s": 20.0},
        vllm={"servers": urls, "start_timeout_s": start_timeout_s},
    )
    return Servers(settings, urls, vocabulary=100, make_transport=FakeTransports())


def test_versions_reach_all_servers_and_are_proven() -> None:
    with fakes(FakeVllm(), FakeVllm()) as urls, own(urls) as fleet:
        for version in (1, 2, 7):
            fleet.publish(version, WEIGHTS, score)
            record = fleet.wait()
            assert record is not None
            assert (record.version, sorted(record.servers_ok)) == (version, ["vllm-0", "vllm-1"])
            assert record.probe_max_abs_diff < 1e-3


def test_i5_weights_that_a_server_does_not_compute_with_are_not_served() -> None:
    with fakes(FakeVllm()) as urls, own(urls, quorum=1) as fleet:
        fleet.publish(1, WEIGHTS, lambda ids: [value + 3.0 for value in score(ids)])
        with pytest.raises(PublishError, match="differ by 3"):
            fleet.wait()


def test_a_server_that_does_not_answer_is_named_in_time() -> None:
    with own(["http://127.0.0.1:9"], start_timeout_s=1.0, quorum=1) as fleet:
        fleet.publish(1, WEIGHTS, score)
        with pytest.raises(PublishError, match=r"127\.0\.0\.1:9"):
            fleet.wait()


def test_scores_of_another_length_are_refused_before_anything_is_sent() -> None:
    with own(["http://127.0.0.1:9"]) as fleet:
        with pytest.raises(ValueError, match="score"):
            fleet.publish(1, WEIGHTS, lambda ids: [0.0] * len(ids))
        assert fleet.wait() is None


def test_a_version_that_is_not_above_the_one_before_is_refused() -> None:
    with fakes(FakeVllm()) as urls, own(urls, quorum=1) as fleet:
        fleet.publish(5, WEIGHTS, score)
        for version in (5, 3):
            with pytest.raises(ValueError, match=f"version {version} is not above 5"):
                fleet.publish(version, WEIGHTS, score)
        record = fleet.wait()
        assert record is not None
        assert record.version == 5


def test_outside_of_the_with_block_nothing_is_published_or_waited_for() -> None:
    fleet = own(["http://127.0.0.1:9"])
    with pytest.raises(RuntimeError, match="with"):
        fleet.publish(1, WEIGHTS, score)
    with fleet:
        pass
    with pytest.raises(RuntimeError, match="with"):
        fleet.publish(1, WEIGHTS, score)
    with pytest.raises(RuntimeError, match="with"):
        fleet.wait()


async def test_the_registry_keeps_what_a_change_does_not_name() -> None:
    registry = LocalRegistry(["http://a/"])
    (server,) = await registry.servers()
    assert (server.name, server.url, server.state) == ("vllm-0", "http://a", ServerState.JOINING)
    await registry.put_server(Server("vllm-0", "http://a", ServerState.SERVING, 3))
    kept = await registry.put_server(Server("vllm-0", "http://a", ServerState.STALE))
    assert kept.version == 3
    assert (await registry.put_server(Server("vllm-0", "http://a"))).version is None


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        slipstream.servers("http://a:1", model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="weight_sync"):
        slipstream.servers("http://a:1", model=str(tmp_path), speed="high")
