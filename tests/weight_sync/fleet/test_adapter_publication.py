"""One version onto one server as an adapter, against the fake: proven before it serves, sent whole, never paused."""

from __future__ import annotations

import pytest
import torch

from slipstream.learner.model.adapter import AdapterAlone
from slipstream.protocol.versions import version_of
from slipstream.weight_sync.fleet import adapter_publication
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofFailed
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeEngine, FakeVllm, Fault
from tests.kit.fake_vllm.adapters import FakeAdapters
from tests.kit.fake_vllm.engine import logprob_of
from tests.kit.sync import against, probe

pytestmark = pytest.mark.usefixtures("quick")


def snapshot(version: int, shift: float = 0.0, seed: int | None = None) -> Snapshot:
    """An adapter whose weights tell its version, or `seed`; its probe is `shift` off."""
    torch.manual_seed(version if seed is None else seed)
    names = [f"base_model.model.layers.{i}.q_proj.lora_{part}.weight" for i in range(2) for part in "AB"]
    weights = AdapterAlone({name: torch.randn(8, 64) for name in names}, {"r": 8, "peft_type": "LORA"})
    return Snapshot(version, weights, probe(shift), torch.float32)


def fake() -> FakeVllm:
    """Moves its log-probs with each adapter that it scores, by less than the tolerance."""
    server = FakeVllm(FakeEngine(), adapters=FakeAdapters())
    held = server.adapters
    assert held is not None
    server.engine.probe_logprob = lambda token, place: logprob_of(token, place) + 1e-7 * len(held.events)
    return server


def adapters(server: FakeVllm) -> FakeAdapters:
    assert server.adapters is not None
    return server.adapters


async def test_i5_an_adapter_is_proven_before_it_serves_and_nothing_is_paused() -> None:
    async with against(fake()) as s:
        outcome = await s.server.publish(snapshot(1))
        await s.server.publish(snapshot(2))
        first, second = adapters(s.fake).loaded
        assert [version_of(first), version_of(second)] == [1, 2]
        assert adapters(s.fake).events == [
            *(("load", first), ("score", first), ("serve", first)),
            *(("score", first), ("load", second), ("score", second), ("serve", second)),
        ]
        assert outcome.pause_s == 0.0
        assert outcome.proof.max_abs_diff < 1e-4
        assert not {"/pause", "/start_weight_update", "/slipstream/swap"} & set(s.fake.calls)
        assert s.transports.made == []


async def test_i5_an_adapter_that_fails_its_proof_does_not_serve_and_the_one_before_goes_on() -> None:
    async with against(fake()) as s:
        await s.server.publish(snapshot(1))
        served = adapters(s.fake).served
        with pytest.raises(ProofFailed, match=r"version 2 its log-probs of the probe differ by 0\.01"):
            await s.server.publish(snapshot(2, shift=0.01))
        assert adapters(s.fake).served == served
        await s.server.publish(snapshot(3))
        assert version_of(adapters(s.fake).served or "") == 3


async def test_a_server_that_computes_nothing_new_is_found_by_the_proof() -> None:
    async with against(fake()) as s:
        s.fake.engine.probe_logprob = logprob_of
        await s.server.publish(snapshot(1))
        with pytest.raises(ProofFailed, match="exactly those from before"):
            await s.server.publish(snapshot(2))


async def test_a_chunk_that_was_damaged_ends_the_publication_and_the_next_one_sends_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_publication, "CHUNK_BYTES", 1000)
    async with against(fake()) as s:
        adapters(s.fake).damaged = 1
        with pytest.raises(ControlError, match="damaged on its way"):
            await s.server.publish(snapshot(1))
        assert adapters(s.fake).events == []
        await s.server.publish(snapshot(1))
        assert adapters(s.fake).chunks[-1] <= 1000 == adapters(s.fake).chunks[0]
        assert len(adapters(s.fake).chunks) > 8


async def test_a_server_that_restarted_is_sent_the_adapter_again() -> None:
    async with against(fake()) as s:
        await s.server.publish(snapshot(1))
        adapters(s.fake).restart()
        await s.server.publish(snapshot(1))
        assert [kind for kind, _ in adapters(s.fake).events] == ["load", "score", "serve"] * 2


async def test_what_is_loaded_is_not_sent_again() -> None:
    async with against(fake()) as s:
        await s.server.publish(snapshot(1))
        sent = len(adapters(s.fake).chunks)
        await s.server.publish(snapshot(1))
        assert len(adapters(s.fake).chunks) == sent


async def test_another_learner_with_the_same_number_has_another_name() -> None:
    async with against(fake()) as s:
        await s.server.publish(snapshot(5, seed=1))
        await s.server.publish(snapshot(5, seed=2))
        first, second = adapters(s.fake).loaded
        assert version_of(first) == version_of(second) == 5
        assert first != second


async def test_a_server_without_adapters_is_told_apart_and_says_what_to_set() -> None:
    for server in (FakeVllm(), fake()):
        if server.adapters is not None:
            server.adapters.enabled = False
        async with against(server) as s:
            with pytest.raises(TransferError, match=r"takes no adapters.*--enable-lora.*adapter_only = false"):
                await s.server.publish(snapshot(1))


async def test_an_adapter_that_vllm_refuses_names_the_reason_and_the_setting() -> None:
    async with against(fake()) as s:
        adapters(s.fake).refusal = "LoRA rank 16 is greater than max_lora_rank 8."
        with pytest.raises(TransferError, match=r"LoRA rank 16 is greater.*adapter_only = false"):
            await s.server.publish(snapshot(1))


async def test_a_server_that_hangs_while_it_loads_costs_one_time_out() -> None:
    async with against(fake()) as s:
        adapter = snapshot(1).adapter
        assert adapter is not None
        s.fake.faults.append(Fault("hang", route=f"/slipstream/adapters/{adapter.name}/load"))
        with pytest.raises(ControlError, match="no answer within"):
            await s.server.publish(snapshot(1))
        await s.server.publish(snapshot(1))


def test_the_bytes_are_those_of_the_wire_type() -> None:
    torch.manual_seed(0)
    weights = AdapterAlone({"a": torch.randn(64, 64)}, {"r": 8})
    wide, narrow = (Snapshot(1, weights, probe(), dtype).adapter for dtype in (torch.float32, torch.bfloat16))
    assert wide is not None
    assert narrow is not None
    assert len(wide.file) - len(narrow.file) == pytest.approx(64 * 64 * 2, abs=64)
    assert Snapshot(1, [("a", torch.ones(2))], probe()).adapter is None
