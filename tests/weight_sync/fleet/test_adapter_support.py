"""Before the first publication of an adapter: a server is asked whether vLLM takes it, and what it says decides."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from slipstream.learner import loop
from slipstream.weight_sync.fleet import adapter_publication
from slipstream.weight_sync.server.cancellation import on_thread
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.sync import probe
from tests.weight_sync.fleet.test_adapter_publication import adapters, fake, snapshot

GONE = "http://127.0.0.1:1"


async def asked(*fakes: FakeVllm, dead: int = 0) -> str | None:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in fakes]
        run = config(vllm={"servers": [GONE] * dead + urls, "start_timeout_s": 1.0})
        return await on_thread(adapter_publication.adapter_refusal, run, snapshot(1))


async def test_an_adapter_that_vllm_takes_is_loaded_and_serves_nobody_yet() -> None:
    server = fake()
    assert await asked(server) is None
    assert [kind for kind, _ in adapters(server).events] == ["load"]
    assert adapters(server).served is None


async def test_what_vllm_refuses_is_said_with_its_reason() -> None:
    server = fake()
    adapters(server).refusal = "expected target modules in ['q_proj'] but received ['gate']"
    assert "received ['gate']" in (await asked(server) or "")
    assert "takes no adapters" in (await asked(FakeVllm()) or "")


async def test_a_server_that_does_not_come_up_is_left_to_the_publication() -> None:
    assert await asked(dead=1) is None
    server = fake()
    assert await asked(server, dead=1) is None
    assert len(adapters(server).loaded) == 1


class Adapter:
    def alone(self) -> Any:
        return snapshot_weights()


def snapshot_weights() -> Any:
    import torch

    from slipstream.learner.model.adapter import AdapterAlone

    return AdapterAlone({"a": torch.ones(4)}, {"r": 8})


@pytest.mark.parametrize(
    ("adapter_only", "on_gpu", "reason", "alone", "says"),
    [
        ("auto", True, None, True, ""),
        ("auto", True, "no such layer", False, "no such layer"),
        ("auto", False, "is not asked", False, ""),
        (True, False, "is not asked", True, ""),
        (False, True, "is not asked", False, ""),
    ],
)
def test_auto_falls_back_to_merged_weights_and_says_why_once(
    adapter_only: Any, on_gpu: bool, reason: str | None, alone: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run = config(lora={"r": 8}, weight_sync={"adapter_only": adapter_only})
    monkeypatch.setattr(adapter_publication, "adapter_refusal", lambda config, snapshot: reason)
    adapter: Any = Adapter()
    assert loop.adapter_published_alone(run, adapter, probe(), on_gpu, said.append, "run") is alone
    assert says in "".join(said)
    assert len(said) == bool(says)


def test_a_kind_that_vllm_never_serves_is_said_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(adapter_publication, "adapter_refusal", lambda config, snapshot: pytest.fail("asked"))
    adapter: Any = Adapter()
    assert not loop.adapter_published_alone(
        config(lora={"r": 8, "use_dora": True}), adapter, probe(), True, said.append, "run"
    )
    assert said == ["lora.use_dora = true: vLLM serves no such adapter, so the merged weights are published"]
