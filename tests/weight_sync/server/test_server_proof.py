"""One server's proofs, version after version, against a fake vLLM: what is asked, what is found, what is said."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofFailed, ServerProof
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot, probe_token_ids
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.fake_vllm.engine import logprob_of

pytestmark = pytest.mark.usefixtures("quick")

Weights = Callable[[int, int], float]


def of(version: int, step: float = 1e-4) -> Weights:
    """The log-probs that `version` gives: each step moves them by `step`, this way or that."""
    return lambda token, place: logprob_of(token, place) + version * step * (1 if (token + place) % 2 else -1)


def snapshot(version: int, step: float = 1e-4, changes: bool = True) -> Snapshot:
    ids = probe_token_ids(100, version)
    weights = of(version, step)
    logprobs = np.array([weights(token, place) for place, token in enumerate(ids[1:], start=1)], dtype=np.float32)
    values = torch.full((256,), float(version if changes else 0))
    return Snapshot(version, [("w", values)], Probe(ids, logprobs))


@asynccontextmanager
async def server(fake: FakeVllm) -> AsyncIterator[ServerControl]:
    async with serving(fake) as url, ServerControl(url, timeout_s=1.0) as control:
        yield control


async def through(
    proof: ServerProof, fake: FakeVllm, control: ServerControl, version: int, swaps: bool = True, step: float = 1e-4
) -> None:
    """A publication of `version`."""
    sent = snapshot(version, step)
    await proof.look(control, sent, known=version > 1)
    if swaps:
        fake.engine.probe_logprob, fake.engine.weight_version = of(version, step), str(version)
    await proof.prove(control, sent)


@pytest.mark.parametrize("step", [1e-4, 1e-7])
async def test_a_swap_that_is_left_out_fails_the_proof_once_and_again(step: float) -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    async with server(fake) as control:
        for version in range(1, 6):
            await through(proof, fake, control, version, step=step)
        for _ in range(2):
            with pytest.raises(ProofFailed, match="after version 6 its log-probs are exactly those from before"):
                await through(proof, fake, control, 6, swaps=False, step=step)
        await through(proof, fake, control, 6, step=step)  # once in full again, and this time it is there


async def test_a_publication_that_nothing_changed_in_is_proven() -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    async with server(fake) as control:
        for version in (1, 2):
            sent = snapshot(version, step=0.0, changes=False)
            await proof.look(control, sent, known=version > 1)
            figures = await proof.prove(control, sent)
            assert (figures.max_abs_diff, figures.told_apart, figures.layers) == (0.0, False, 8)


async def test_layers_that_do_not_hold_what_arrived_are_named() -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    async with server(fake) as control:
        fake.engine.wrong_layers = [f"model.layers.{i}.weight" for i in range(6)]
        with pytest.raises(ProofFailed, match=r"layers do not hold .*layers\.0\.weight.* and 2 more"):
            await through(proof, fake, control, 1)


async def test_layers_that_cannot_be_read_are_named_once_a_server(caplog: pytest.LogCaptureFixture) -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    fake.engine.unread_layers = [f"layers.{i}.packed0" for i in range(6)]
    with caplog.at_level("INFO"):
        async with server(fake) as control:
            for version in (1, 2):
                await through(proof, fake, control, version)
            url = control.url
    (said,) = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert said.startswith(f"{url}: ")
    assert "products and log-probs alone prove them: layers.0.packed0" in said
    assert said.endswith(" and 2 more")


async def test_the_proof_waits_for_no_episode() -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    async with server(fake) as control:
        fake.faults.append(Fault("hang", None))
        fake.engine.pause()
        await through(proof, fake, control, 1)
        assert "/inference/v1/generate" not in fake.calls


async def test_a_server_that_cannot_score_beside_generation_is_asked_as_any_client_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    fake.faults.append(Fault("status", None, "/slipstream/score", 501))
    fake.faults.append(Fault("status", None, "/slipstream/layers", 501))
    caplog.set_level(logging.INFO)
    async with server(fake) as control:
        for version in (1, 2, 3):
            await through(proof, fake, control, version)
        with pytest.raises(ProofFailed):
            await through(proof, fake, control, 4, swaps=False)
    assert fake.calls.count("/slipstream/score") == fake.calls.count("/slipstream/layers") == 1
    assert sum("wait behind episodes" in text for text in caplog.messages) == 1
    assert sum("log-probs alone prove them" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("by_request", [False, True], ids=["in the workers", "by request"])
async def test_wrong_weights_in_one_engine_alone_fail_the_proof_and_it_is_named(by_request: bool) -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    if by_request:
        fake.faults.append(Fault("status", None, "/slipstream/score", 501))
    async with server(fake) as control:
        for version in range(1, 5):
            fake.engine.other_engines = [of(version - 1)]
            sent = snapshot(version)
            await proof.look(control, sent, known=version > 1)
            fake.engine.probe_logprob, fake.engine.weight_version = of(version), str(version)
            if version < 4:
                fake.engine.other_engines = [of(version)]
                await proof.prove(control, sent)
            else:
                with pytest.raises(ProofFailed, match=r"after version 4 \(engine 1\) its log-probs are exactly those"):
                    await proof.prove(control, sent)


async def test_a_score_that_fails_for_another_reason_is_an_error_and_no_other_transport_is_tried() -> None:
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    fake.faults.append(Fault("status", None, "/slipstream/score", 500))
    async with server(fake) as control:
        with pytest.raises(ControlError, match="/slipstream/score: HTTP 500"):
            await through(proof, fake, control, 1)
        assert "/inference/v1/generate" not in fake.calls


async def test_a_quantised_server_may_round_a_step_away() -> None:
    fake, proof = FakeVllm(), ServerProof(1.0, "bfloat16", rounds_more=True)
    async with server(fake) as control:
        await through(proof, fake, control, 1)
        for version in (2, 3, 4, 5):
            await through(proof, fake, control, version, swaps=False, step=1e-6)


async def test_what_a_server_held_before_a_restart_is_not_what_was_proven() -> None:
    """It restarted with the weights that are sent: nothing has to move."""
    fake, proof = FakeVllm(), ServerProof(1e-3, "float32")
    async with server(fake) as control:
        await through(proof, fake, control, 1)
        fake.engine.probe_logprob = of(2)
        sent = snapshot(2)
        await proof.look(control, sent, known=False)
        assert not (await proof.prove(control, sent)).told_apart
