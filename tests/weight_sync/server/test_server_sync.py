"""One version onto one server: what each failure leaves behind, against a fake vLLM and transports that stage."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server import cancellation
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofFailed
from slipstream.weight_sync.transports.base import TransferError, build_transport
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.sync import Rig, against, control_calls, nothing, snapshot

FIRST_SWAP = ["/start_weight_update", "/update_weights", "/slipstream/staged", "/slipstream/swap"]


pytestmark = pytest.mark.usefixtures("quick")


async def test_the_server_is_prepared_before_the_pause_and_proven_after_it() -> None:
    async with against(FakeVllm()) as s:
        finished: list[Any] = []
        s.fake.engine.hooks["swap"] = finished.append
        outcome = await s.server.publish(snapshot(1))
        assert control_calls(s.fake) == [
            *("/slipstream/drop_update", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"),
            *FIRST_SWAP,
        ]
        assert finished == [{"label": "1", "clear_cache": True}]
        assert s.transports.made[0].workers == 1
        assert s.transports.made[0].versions == [1]
        assert outcome.proof.max_abs_diff < 1e-6
        assert outcome.pause_s > 0
        assert not s.fake.engine.paused


async def test_a_second_version_uses_the_same_connection() -> None:
    async with against(FakeVllm()) as s:
        await s.server.publish(snapshot(1))
        s.fake.calls.clear()
        await s.server.publish(snapshot(2))
        assert control_calls(s.fake) == FIRST_SWAP
        assert [transport.versions for transport in s.transports.made] == [[1, 2]]


async def test_what_serves_is_scored_beside_the_transfer_and_before_the_swap() -> None:
    async with against(FakeVllm()) as s:
        at_swap: list[list[str]] = []
        fault = Fault("stop", times=None, route="/slipstream/score")
        s.fake.faults.append(fault)

        async def sent(_: Snapshot) -> None:
            s.fake.faults.remove(fault)

        s.transports.send = sent
        s.fake.engine.hooks["swap"] = lambda _: at_swap.append(list(s.fake.calls))
        await s.server.publish(snapshot(1))
        assert at_swap[0].count("/slipstream/score") == 1


async def test_a_server_that_cannot_be_scored_before_the_swap_is_not_swapped() -> None:
    async with against(FakeVllm()) as s:
        s.fake.faults.append(Fault("status", route="/slipstream/score"))
        with pytest.raises(ControlError, match="a fault was asked for"):
            await s.server.publish(snapshot(1))
        assert "/slipstream/swap" not in s.fake.calls


async def test_nothing_is_paused_during_the_transfer_but_all_is_during_the_swap() -> None:
    async with against(FakeVllm()) as s:
        paused: dict[str, bool] = {}

        async def look(_: Snapshot) -> None:
            paused.update(send=s.fake.engine.paused)

        s.transports.send = look
        s.fake.engine.hooks["swap"] = lambda _: paused.update(swap=s.fake.engine.paused)
        await s.server.publish(snapshot(1))
        assert paused == {"send": False, "swap": True}


async def test_nothing_outside_the_server_pauses_or_aborts() -> None:
    async with against(FakeVllm()) as s:
        for version in (1, 2):
            await s.server.publish(snapshot(version))
        assert not any(word in path for path in s.fake.calls for word in ("abort", "pause", "resume"))


async def test_prefixes_are_cleared_at_a_learners_first_publication_and_after_a_failure_only() -> None:
    async with against(FakeVllm()) as s:
        clears: list[bool] = []
        s.fake.engine.hooks["swap"] = lambda body: clears.append(body["clear_cache"])
        await s.server.publish(snapshot(1))
        await s.server.publish(snapshot(2))
        with pytest.raises(ProofFailed):
            await s.server.publish(snapshot(3, shift=0.5))
        # What was cached as version 3 are the keys and values of other weights.
        await s.server.publish(snapshot(3))
        assert clears == [True, False, False, True]


async def raising(snapshot: Snapshot) -> None:
    raise TransferError("the wire was cut")


def drop_swap(s: Rig) -> None:
    s.fake.faults.append(Fault("drop", route="/slipstream/swap"))


def fail_swap(s: Rig) -> None:
    s.fake.faults.append(Fault("status", route="/slipstream/swap"))


def hang_swap(s: Rig) -> None:
    s.fake.faults.append(Fault("hang", route="/slipstream/swap"))


def hang_update(s: Rig) -> None:
    s.fake.faults.append(Fault("hang", route="/update_weights"))


def hang_staged(s: Rig) -> None:
    s.fake.faults.append(Fault("hang", route="/slipstream/staged"))


def fail_send(s: Rig) -> None:
    s.transports.send = raising


def fail_start(s: Rig) -> None:
    s.fake.faults.append(Fault("status", route="/start_weight_update"))


@pytest.mark.parametrize(
    ("break_it", "error", "match"),
    [
        (fail_swap, ControlError, "/slipstream/swap: HTTP 500"),
        (drop_swap, ControlError, "/slipstream/swap: "),
        (hang_swap, ControlError, r"/slipstream/swap: no answer within 1 s"),
        (hang_update, ControlError, r"/update_weights: no answer within 1 s"),
        (hang_staged, ControlError, "/slipstream/staged: no answer within"),
        (fail_start, ControlError, "/start_weight_update: HTTP 500"),
        (fail_send, TransferError, "the wire was cut"),
    ],
)
@pytest.mark.parametrize("earlier", [[], [1]], ids=["first", "second"])
async def test_i6_a_failure_ends_in_time_pauses_nothing_and_the_next_publication_works(
    earlier: list[int], break_it: Callable[[Rig], None], error: type[Exception], match: str
) -> None:
    async with against(FakeVllm()) as s:
        for version in earlier:
            await s.server.publish(snapshot(version))
        break_it(s)
        began = time.monotonic()
        with pytest.raises(error, match=match):
            await s.server.publish(snapshot(5))
        assert time.monotonic() - began < 8
        assert not s.fake.engine.paused
        assert s.fake.engine.weight_version == (str(earlier[-1]) if earlier else "default")
        assert not s.server.left_paused
        assert s.transports.made[-1].closed
        connections = len(s.transports.made)

        s.transports.send = nothing
        assert (await s.server.publish(snapshot(5))).proof.max_abs_diff < 1e-6
        assert len(s.transports.made) == connections + 1
        assert s.fake.engine.weight_version == "5"


async def test_a_transfer_that_fails_is_an_error_and_no_other_transport_is_tried() -> None:
    async with against(FakeVllm()) as s:
        s.transports.send = raising
        with pytest.raises(TransferError, match="the wire was cut"):
            await s.server.publish(snapshot(1))
        assert len(s.transports.made) == 1
        assert "/pause" not in s.fake.calls
        assert "/slipstream/swap" not in s.fake.calls


async def test_a_connection_that_cannot_be_made_is_an_error() -> None:
    section = WeightSyncSection(host="192.0.2.1")
    async with serving(FakeVllm()) as url, ServerControl(url, 1) as control:
        with pytest.raises(TransferError, match=r"weight_sync\.host"):
            await ServerSync(control, lambda: build_transport(section), 1e-3).publish(snapshot(1))


async def test_other_weights_than_were_sent_are_an_error_of_the_probe() -> None:
    async with against(FakeVllm()) as s:
        with pytest.raises(
            ProofFailed,
            match=r"version 1 its log-probs of the probe differ by 0\.5 .*weight_sync\.probe_tolerance allows 0\.001",
        ):
            await s.server.publish(snapshot(1, shift=0.5))
        assert not s.fake.engine.paused
        assert (await s.server.publish(snapshot(1))).proof.max_abs_diff < 1e-6


async def test_a_probe_that_is_not_a_number_is_a_mismatch() -> None:
    async with against(FakeVllm()) as s:
        s.fake.engine.probe_logprob = lambda token, place: float("nan")
        with pytest.raises(ProofFailed, match="differ by inf"):
            await s.server.publish(snapshot(1))


async def test_a_probe_without_log_probs_is_an_error() -> None:
    async with against(FakeVllm()) as s:
        s.fake.scored = lambda prompt, engine: []  # type: ignore[method-assign]
        s.fake.faults.append(Fault("status", None, "/slipstream/score", 501))
        with pytest.raises(ControlError, match="holds no prompt log-probs"):
            await s.server.publish(snapshot(1))
        assert not s.fake.engine.paused


async def test_i6_a_cancellation_in_the_middle_of_a_transfer_that_hangs_does_not_wait_for_it() -> None:
    async with against(FakeVllm(), timeout_s=5) as s:
        sending, release = threading.Event(), threading.Event()

        def hang() -> None:
            sending.set()
            release.wait(10)

        async def on_a_thread(_: Snapshot) -> None:
            await cancellation.on_thread(hang)

        s.transports.send = on_a_thread
        publishing = asyncio.create_task(s.server.publish(snapshot(1)))
        await asyncio.to_thread(sending.wait, 5)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(publishing, 2)
        s.transports.send = nothing
        await s.server.publish(snapshot(1))
        release.set()


async def test_a_server_that_hangs_at_every_call_is_an_error_in_time() -> None:
    fake = FakeVllm()
    async with against(fake) as s:
        await s.server.publish(snapshot(1))
        for route in {*fake.calls, "/shutdown_weight_transfer_engine"}:
            fake.faults.append(Fault("hang", times=None, route=route))
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(ControlError, match="no answer within"):
                await s.server.publish(snapshot(2))
        assert time.monotonic() - began < 8


async def test_a_server_that_restarted_is_met_and_synced_anew() -> None:
    async with against(FakeVllm()) as s:
        await s.server.publish(snapshot(1))
        s.fake.engine.restart()
        s.fake.calls.clear()
        await s.server.publish(snapshot(2))
        assert "/init_weight_transfer_engine" in s.fake.calls
        assert [transport.versions for transport in s.transports.made] == [[1], [2]]
        assert s.transports.made[0].closed
        assert s.fake.engine.weight_version == "2"


@pytest.mark.parametrize("label", ["default", "7"])
async def test_i6_what_a_learner_that_died_left_is_cleared_by_its_successor(label: str) -> None:
    """This holds even if it died in its first publication, when the server still has the label of its start."""
    fake = FakeVllm()
    engine = fake.engine
    engine.weight_version = label
    engine.init_transfer()
    engine.start_update()
    async with against(fake) as s:
        await s.server.publish(snapshot(8))
        assert engine.weight_version == "8"
        assert not engine.updating


async def test_leaving_closes_the_connection() -> None:
    async with against(FakeVllm()) as s:
        await s.server.publish(snapshot(1))
        await s.server.disconnect()
        assert s.transports.made[0].closed
