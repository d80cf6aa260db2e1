"""Transports that the gloo one is no example of: loading in place, as vLLM's NCCL engine does, and a swap in one call
inside the server. Against a fake vLLM that knows whether its model is whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web

from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError, Engine
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.sync import FakeTransport, Rig, against, control_calls, nothing, snapshot

pytestmark = pytest.mark.usefixtures("quick")

LOAD = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Model:
    """Whether the model behind `fake` is whole, and whether it ever computed when it was not."""

    def __init__(self, fake: FakeVllm) -> None:
        self.whole = True
        self.misused = False
        self._engine = fake.engine
        fake.engine.hooks |= {"start_weight_update": self._start, "finish_weight_update": self._finish}
        fake.engine.hooks["resume"] = self._resume

    def _start(self, _: Any) -> None:
        self.misused |= not self._engine.paused
        self.whole = False

    def _finish(self, _: Any) -> None:
        self.whole = True

    def _resume(self, _: Any) -> None:
        self.misused |= not self.whole


@asynccontextmanager
async def in_place(fake: FakeVllm, timeout_s: float = 1.0) -> AsyncIterator[tuple[Rig, Model]]:
    model = Model(fake)
    async with against(fake, timeout_s, stages=False) as rig:
        yield rig, model
    assert not model.misused


def receiving(fake: FakeVllm) -> Callable[[Snapshot], Any]:
    """Lets `/update_weights` answer only once the data is there, as vLLM's NCCL engine does; gives the `send`."""
    there = asyncio.Event()

    async def receive(_: Any) -> None:
        await there.wait()
        there.clear()

    async def send(_: Snapshot) -> None:
        there.set()

    fake.engine.hooks["update_weights"] = receive
    return send


async def test_a_server_that_receives_in_its_update_call_is_loaded_under_the_pause() -> None:
    async with in_place(FakeVllm()) as (r, _):
        r.transports.send = receiving(r.fake)
        for version in (1, 2):
            outcome = await r.server.publish(snapshot(version))
            assert outcome.proof.max_abs_diff < 1e-6
            assert outcome.pause_s > 0
            assert outcome.transfer_s >= 0
            assert r.fake.engine.weight_version == str(version)
            assert not r.fake.engine.paused
            assert not r.server.left_paused
        assert control_calls(r.fake) == [
            *("/slipstream/drop_update", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"),
            *(*LOAD, *LOAD),
        ]
        assert [transport.versions for transport in r.transports.made] == [[1, 2]]


async def test_update_before_send_would_wait_for_good_there() -> None:
    """Why a transport owns the order of its calls: that of a transport that stages never ends on such a server."""
    async with against(FakeVllm()) as r:
        r.transports.send = receiving(r.fake)
        with pytest.raises(ControlError, match=r"/update_weights: no answer within 1 s"):
            await r.server.publish(snapshot(1))
        assert r.transports.made[0].versions == []


async def raising(_: Snapshot) -> None:
    raise TransferError("the wire was cut")


async def hanging(_: Snapshot) -> None:
    await asyncio.Event().wait()


def fault(kind: Literal["status", "drop", "hang"], route: str) -> Callable[[Rig], None]:
    def strike(r: Rig) -> None:
        r.fake.faults.append(Fault(kind, route=route))

    return strike


def cut(r: Rig) -> None:
    r.transports.send = raising


HALF_WAY = {
    "pause hangs": fault("hang", "/pause"),
    "start fails": fault("status", "/start_weight_update"),
    "update fails": fault("status", "/update_weights"),
    "update hangs": fault("hang", "/update_weights"),
    "update dropped": fault("drop", "/update_weights"),
    "finish fails": fault("status", "/finish_weight_update"),
    "finish hangs": fault("hang", "/finish_weight_update"),
    "send fails": cut,
}


@pytest.mark.parametrize("break_it", HALF_WAY.values(), ids=HALF_WAY.keys())
@pytest.mark.parametrize("earlier", [[], [1]], ids=["first", "second"])
async def test_i6_after_an_error_half_way_the_server_stays_paused_until_a_publication_succeeds(
    earlier: list[int], break_it: Callable[[Rig], None]
) -> None:
    async with in_place(FakeVllm()) as (r, model):
        for version in earlier:
            await r.server.publish(snapshot(version))
        r.fake.calls.clear()
        break_it(r)
        began = time.monotonic()
        with pytest.raises((ControlError, TransferError)):
            await r.server.publish(snapshot(5))
        assert time.monotonic() - began < 3
        assert r.server.left_paused
        assert "/resume" not in r.fake.calls
        assert r.fake.engine.weight_version == (str(earlier[-1]) if earlier else "default")
        assert r.transports.made[-1].closed

        r.transports.send = nothing
        await r.server.publish(snapshot(6))
        assert model.whole
        assert not r.server.left_paused
        assert not r.fake.engine.paused
        assert r.fake.engine.weight_version == "6"


def fail_to_connect(r: Rig) -> None:
    fault("status", "/init_weight_transfer_engine")(r)


def fail_before_the_pause(r: Rig) -> None:
    r.fake.engine.hooks["init_weight_transfer_engine"] = lambda _: setattr(r.transports.made[-1], "closed", True)


@pytest.mark.parametrize("break_it", [fail_to_connect, fail_before_the_pause])
async def test_a_server_that_was_left_paused_stays_so_when_the_next_attempt_fails_earlier(
    break_it: Callable[[Rig], None],
) -> None:
    async with in_place(FakeVllm()) as (r, _):
        cut(r)
        with pytest.raises(TransferError):
            await r.server.publish(snapshot(1))
        break_it(r)
        with pytest.raises((ControlError, TransferError)):
            await r.server.publish(snapshot(1))
        assert r.fake.calls.count("/pause") == 1
        assert r.fake.engine.paused
        assert r.server.left_paused


async def test_i6_a_cancellation_half_way_leaves_the_server_paused_for_the_next_learner() -> None:
    async with in_place(FakeVllm(), timeout_s=5) as (r, model):
        await r.server.publish(snapshot(1))
        updating = asyncio.Event()
        r.fake.engine.hooks["update_weights"] = lambda _: updating.set()
        r.transports.send = hanging
        publishing = asyncio.create_task(r.server.publish(snapshot(2)))
        await updating.wait()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert r.server.left_paused
        assert r.fake.engine.paused
        assert not model.whole

        r.transports.send = nothing
        successor = ServerSync(r.control, r.transports, tolerance=1e-3)
        await successor.publish(snapshot(3))
        assert model.whole
        assert not r.fake.engine.paused
        assert r.fake.engine.weight_version == "3"


async def test_i6_a_cancellation_once_the_model_is_whole_resumes_the_server_first() -> None:
    async with in_place(FakeVllm(), timeout_s=5) as (r, _):
        await r.server.publish(snapshot(1))
        resuming, go_on = asyncio.Event(), asyncio.Event()

        async def slow_resume(_: Any) -> None:
            resuming.set()
            await go_on.wait()

        r.fake.engine.hooks["resume"] = slow_resume
        publishing = asyncio.create_task(r.server.publish(snapshot(2)))
        await resuming.wait()
        publishing.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not r.fake.engine.paused
        assert not r.server.left_paused


class OneCall(FakeTransport):
    """Stages during generation, then has the server itself pause, exchange, label and resume in one call."""

    async def publish(self, server: Engine, snapshot: Snapshot, pause: Pause) -> None:
        await server.start_update()
        await server.update(snapshot.manifest.as_dict())
        body = {"label": snapshot.label, "clear_cache": pause.clear_cache}
        async with aiohttp.ClientSession() as session, session.post(f"{server.url}/_swap", json=body) as reply:
            pause.seconds += (await reply.json())["pause_s"]


async def test_a_swap_in_one_call_inside_the_server_fits_the_face() -> None:
    fake = FakeVllm()
    swaps: list[dict[str, Any]] = []

    async def swap(request: web.Request) -> web.Response:
        swaps.append(await request.json())
        fake.engine.pause()
        fake.engine.finish_update(swaps[-1]["label"])
        fake.engine.resume()
        return web.json_response({"pause_s": 0.125})

    fake.app.add_routes([web.post("/_swap", swap)])
    async with serving(fake) as url, ServerControl(url, 1) as control:
        server = ServerSync(control, lambda: OneCall(nothing), tolerance=1e-3)
        for version in (1, 2):
            outcome = await server.publish(snapshot(version))
            assert outcome.pause_s == 0.125
            assert fake.engine.weight_version == str(version)
        assert "/pause" not in fake.calls
        assert swaps == [{"label": "1", "clear_cache": True}, {"label": "2", "clear_cache": False}]
