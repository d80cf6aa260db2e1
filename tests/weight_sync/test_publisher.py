"""The learner's face, against two fake servers and a real queue; transports send nothing, the threads are real."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import uvicorn

from protocol.client import QueueClient, QueueError
from protocol.config import ModelSection, RunConfig, WeightSyncSection
from protocol.messages import BeginSession, Server, ServerState
from rollout_queue.api.app import create_app
from rollout_queue.store.sqlite import MEMORY, SqliteStore
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.sync import FakeTransports, Held, probe
from weight_sync import cancellation, publisher, server_control
from weight_sync.publisher import Publisher, PublishError
from weight_sync.snapshot import Snapshot

T = TypeVar("T")


@dataclass
class World:
    """A queue and two servers on an event loop of their own, as they are to a learner."""

    loop: asyncio.AbstractEventLoop
    queue_url: str = ""
    queue: QueueClient | None = None
    session: int | None = None
    fakes: list[FakeVllm] = field(default_factory=lambda: [FakeVllm(), FakeVllm()])
    urls: list[str] = field(default_factory=list)
    transports: FakeTransports = field(default_factory=FakeTransports)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def start(self) -> None:
        for fake in self.fakes:
            self.urls.append(await self.stack.enter_async_context(serving(fake)))
        listener = socket.create_server(("127.0.0.1", 0))
        self.queue_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.config(), SqliteStore(MEMORY))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        running = asyncio.create_task(server._serve([listener]))

        async def stop() -> None:
            server.should_exit = True
            await running

        self.stack.push_async_callback(stop)
        self.queue = await self.stack.enter_async_context(QueueClient(self.queue_url))
        for index, url in enumerate(self.urls):
            await self.queue.put_server(Server(f"vllm-{index}", url))
        self.session = (await self.queue.begin_session(BeginSession(0, 0, 9, resume=False))).session

    def config(self, timeout_s: float = 20.0, start_timeout_s: float = 5.0) -> RunConfig:
        return config(
            weight_sync={"timeout_s": timeout_s},
            vllm={"servers": self.urls or ["http://unused"], "start_timeout_s": start_timeout_s},
        )

    def publisher(self, **timeouts: float) -> Publisher:
        publisher = Publisher(self.config(**timeouts), self.queue_url, self.transports)
        publisher.session = self.session
        return publisher

    def servers(self) -> dict[str, Server]:
        assert self.queue is not None
        return {server.name: server for server in self.do(self.queue.servers())}

    def states(self) -> list[tuple[ServerState, int | None]]:
        return [(server.state, server.version) for server in self.servers().values()]

    def hold_transfers(self) -> Held:
        self.transports.send = held = Held()
        return held


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(publisher, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(publisher, "WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(publisher, "QueueClient", functools.partial(QueueClient, patience_s=0.5))
    monkeypatch.setattr(server_control, "RESUME_PAUSE_S", 0.01)
    monkeypatch.setattr(cancellation, "GRACE_S", 0.05)
    world = World(asyncio.new_event_loop())
    thread = threading.Thread(target=world.loop.run_forever, daemon=True)
    thread.start()
    try:
        world.do(world.start())
        yield world
    finally:
        world.do(world.stack.aclose())
        world.loop.call_soon_threadsafe(world.loop.stop)
        thread.join(5)
        world.loop.close()


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((4,), value))]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_versions_go_out_in_order_to_all_servers_and_are_recorded_as_they_end(world: World) -> None:
    with world.publisher() as publishing:
        for version in (1, 2, 3):
            publishing.publish(version, weights(), probe())
        until(lambda: publishing.in_flight is None)
        assert [record.version for record in publishing.records] == [1, 2, 3]
        publishing.wait()
    assert [record.version for record in publishing.records] == [1, 2, 3]
    record = publishing.records[-1]
    assert (record.servers_ok, record.servers_failed) == (["vllm-0", "vllm-1"], {})
    assert record.probe_max_abs_diff < 1e-6
    assert 0 <= record.snapshot_s <= record.blocked_s
    assert record.pause_s > 0
    assert world.states() == [(ServerState.SERVING, 3)] * 2
    assert [transport.sent for transport in world.transports.made] == [[1, 2, 3]] * 2
    assert all(transport.closed for transport in world.transports.made)


def test_the_learner_waits_for_the_snapshot_and_an_unfinished_predecessor_only(world: World) -> None:
    held = world.hold_transfers()
    with world.publisher(timeout_s=5) as publishing:
        assert publishing.in_flight is None
        mutable = weights(1.0)
        assert publishing.publish(1, mutable, probe()) < 1
        assert publishing.in_flight == 1
        assert held.began.wait(5)
        threading.Timer(0.2, held.release).start()
        assert publishing.publish(2, weights(2.0), probe()) >= 0.15
        assert publishing.in_flight in (2, None)
        publishing.wait()
        assert publishing.in_flight is None
    assert [record.version for record in publishing.records] == [1, 2]


def test_what_is_published_is_what_the_weights_were_when_they_were_handed_over(world: World) -> None:
    seen: list[float] = []
    held = Held()

    async def send(snapshot: Snapshot) -> None:
        await held(snapshot)
        seen.append(float(snapshot.manifest.views(snapshot.flat)["w"][0]))

    world.transports.send = send
    tensor = torch.full((4,), 1.0)
    with world.publisher(timeout_s=5) as publishing:
        publishing.publish(1, [("w", tensor)], probe())
        tensor.fill_(9.0)
        held.release()
        publishing.wait()
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize(("dtype", "state"), [("float32", ServerState.QUARANTINED), ("bfloat16", ServerState.SERVING)])
def test_a_difference_of_rounding_is_one_that_the_model_s_type_allows(
    world: World, monkeypatch: pytest.MonkeyPatch, dtype: str, state: ServerState
) -> None:
    settings = world.config().model_copy(update={"model": ModelSection.model_validate({"path": "m", "dtype": dtype})})
    monkeypatch.setattr(world, "config", lambda: settings)
    fails = pytest.raises(PublishError) if state == ServerState.QUARANTINED else contextlib.nullcontext()
    with fails, world.publisher() as publisher:
        publisher.publish(1, [], probe(shift=0.2))
        publisher.wait()
    assert {server.state for server in world.servers().values()} == {state}


def test_i5_a_server_that_fails_is_quarantined_with_the_reason_and_the_others_go_on(world: World) -> None:
    world.fakes[1].faults.append(Fault("status", route="/slipstream/swap"))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        assert world.states() == [(ServerState.SERVING, 1), (ServerState.QUARANTINED, 1)]
        reason = world.servers()["vllm-1"].reason
        assert reason is not None
        assert f"{world.urls[1]}/slipstream/swap: HTTP 500" in reason
        assert publishing.records[0].servers_ok == ["vllm-0"]
        assert publishing.records[0].servers_failed == {"vllm-1": reason}
        assert not world.fakes[1].engine.paused

        publishing.publish(2, weights(), probe())
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 2)] * 2
    assert publishing.records[1].servers_ok == ["vllm-0", "vllm-1"]


def test_i5_a_server_that_hangs_is_quarantined_in_time(world: World) -> None:
    world.fakes[0].faults.append(Fault("hang", times=None, route="/update_weights"))
    with world.publisher(timeout_s=3) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        assert world.states() == [(ServerState.QUARANTINED, 1), (ServerState.SERVING, 1)]


def test_when_every_server_fails_the_version_is_tried_again(world: World) -> None:
    for fake in world.fakes:
        fake.faults.append(Fault("status", times=2, route="/start_weight_update"))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 1)] * 2
    assert len(publishing.records) == 1


@pytest.mark.parametrize("through", ["wait", "publish"])
def test_when_no_server_can_be_reached_the_error_holds_all_reasons(world: World, through: str) -> None:
    for fake, route in zip(world.fakes, ("/slipstream/staged", "/slipstream/swap"), strict=True):
        fake.faults.append(Fault("status", times=None, route=route))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        with pytest.raises(PublishError, match=r"version 1 reached no vLLM server in 3 attempts: .*") as caught:
            publishing.wait() if through == "wait" else publishing.publish(2, weights(), probe())
        assert f"{world.urls[0]}/slipstream/staged" in str(caught.value)
        assert f"{world.urls[1]}/slipstream/swap" in str(caught.value)
        assert publishing.in_flight is None
        assert publishing.records == []
        for fake in world.fakes:
            assert not fake.engine.paused
            fake.faults.clear()
        publishing.publish(3, weights(), probe())
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 3)] * 2


def test_f26_a_transport_that_fails_ends_the_publication_with_its_error(world: World) -> None:
    unusable = world.config().model_copy(update={"weight_sync": WeightSyncSection(host="192.0.2.1", timeout_s=0.5)})
    with Publisher(unusable, world.queue_url) as publishing:
        publishing.session = world.session
        publishing.publish(1, weights(), probe())
        with pytest.raises(PublishError, match=r"weight_sync\.host = 192\.0\.2\.1: cannot listen there"):
            publishing.wait()


def test_a_server_that_comes_up_late_is_waited_for(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    assert world.queue is not None
    world.do(world.queue.put_server(Server("vllm-1", f"http://127.0.0.1:{port}")))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states()[0] == (ServerState.SERVING, 1))
        assert publishing.in_flight == 1
        world.do(world.stack.enter_async_context(serving(FakeVllm(), port=port)))
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 1)] * 2


def test_a_server_that_never_comes_up_is_given_up_and_the_others_go_on(world: World) -> None:
    assert world.queue is not None
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    world.do(world.queue.put_server(Server("vllm-1", f"http://127.0.0.1:{port}")))
    with world.publisher(start_timeout_s=0.2) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
    assert "not up after vllm.start_timeout_s = 0.2 s" in publishing.records[0].servers_failed["vllm-1"]
    assert world.states()[0] == (ServerState.SERVING, 1)


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.STALE])
def test_f16_a_server_that_restarted_is_caught_up_without_a_new_version(world: World, state: ServerState) -> None:
    with world.publisher() as publishing:
        publishing.publish(3, weights(), probe())
        publishing.wait()
        assert world.queue is not None
        restarted = world.servers()["vllm-1"]
        restarted.state = state
        world.do(world.queue.put_server(restarted, world.session))
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
        publishing.publish(4, weights(), probe())
        publishing.wait()
    assert len(publishing.records) == 2
    assert world.states() == [(ServerState.SERVING, 4)] * 2


def broken_for(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look whether a server is up fails in a way that nobody foresaw."""
    left, look = [RuntimeError("a bug")] * times, server_control.ServerControl.is_up

    async def is_up(self: server_control.ServerControl) -> bool:
        if left:
            raise left.pop()
        return await look(self)

    monkeypatch.setattr(server_control.ServerControl, "is_up", is_up)


def test_hole_8_the_watch_survives_errors_of_any_kind_and_logs_them(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with world.publisher() as publishing:
        publishing.publish(3, weights(), probe())
        publishing.wait()
        broken_for(2, monkeypatch)
        assert world.queue is not None
        world.do(world.queue.put_server(Server("vllm-1", world.urls[1])))
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
    traces = [record for record in caplog.records if record.exc_info]
    assert [record.message.partition("(")[2] for record in traces] == ["failure 1)", "failure 2)"]


def test_hole_8_a_watch_that_only_fails_ends_the_learner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "WATCH_FAILURES", 3)
    ended: list[BaseException] = []
    with world.publisher() as publishing:
        publishing.on_failure = ended.append
        publishing.publish(3, weights(), probe())
        publishing.wait()
        broken_for(100, monkeypatch)
        assert world.queue is not None
        world.do(world.queue.put_server(Server("vllm-1", world.urls[1])))
        until(lambda: bool(ended))
        with pytest.raises(PublishError, match="3 times in a row; the last time: RuntimeError: a bug"):
            publishing.publish(4, weights(), probe())
    assert isinstance(ended[0], PublishError)


def test_a_server_that_is_still_starting_does_not_hold_up_later_versions(world: World) -> None:
    assert world.queue is not None
    with world.publisher(start_timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        world.do(world.queue.put_server(Server("vllm-1", f"http://127.0.0.1:{port}"), world.session))
        publishing.publish(2, weights(), probe())
        publishing.wait()
        assert world.states() == [(ServerState.SERVING, 2), (ServerState.JOINING, None)]
        world.do(world.stack.enter_async_context(serving(FakeVllm(), port=port)))
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)


def test_i6_leaving_in_the_middle_of_a_swap_leaves_no_server_paused(world: World) -> None:
    swapping = threading.Event()

    async def hang(_: Any) -> None:
        swapping.set()
        await asyncio.Event().wait()

    for fake in world.fakes:
        fake.engine.hooks["swap"] = hang
    with world.publisher(timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        assert swapping.wait(5)
        until(lambda: all(fake.engine.paused for fake in world.fakes))
        began = time.monotonic()
    assert time.monotonic() - began < 5
    until(lambda: not any(fake.engine.paused for fake in world.fakes))
    assert publishing.in_flight is None


def test_i6_a_server_that_fails_half_way_in_place_is_quarantined_and_paused_until_it_is_whole(world: World) -> None:
    world.transports = FakeTransports(stages=False)
    world.fakes[1].faults.append(Fault("status", route="/finish_weight_update"))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        assert world.states() == [(ServerState.SERVING, 1), (ServerState.QUARANTINED, 1)]
        assert [fake.engine.paused for fake in world.fakes] == [False, True]
        publishing.publish(2, weights(), probe())
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 2)] * 2
    assert not any(fake.engine.paused for fake in world.fakes)


def test_i6_leaving_in_the_middle_of_a_load_in_place_takes_the_server_out_of_service(world: World) -> None:
    world.transports = FakeTransports(stages=False)
    with world.publisher(timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        held = world.hold_transfers()
        publishing.publish(2, weights(), probe())
        assert held.began.wait(5)
        until(lambda: all(fake.engine.paused for fake in world.fakes))
        assert world.states() == [(ServerState.SERVING, 1)] * 2
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert all(fake.engine.paused for fake in world.fakes)
    assert world.states() == [(ServerState.QUARANTINED, 2)] * 2
    reason = world.servers()["vllm-0"].reason
    assert reason == f"{world.urls[0]}: left paused: the learner ended before it had loaded version 2"


def test_leaving_in_the_middle_of_a_transfer_does_not_wait_for_it(world: World) -> None:
    sending, release = threading.Event(), threading.Event()

    def hang() -> None:
        sending.set()
        release.wait(10)

    async def on_a_thread(_: Snapshot) -> None:
        await cancellation.on_thread(hang)

    world.transports.send = on_a_thread
    with world.publisher(timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        assert sending.wait(5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    release.set()


def test_a_queue_that_does_not_answer_is_an_error_not_a_hang(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    with Publisher(world.config(), url, world.transports) as publishing:
        publishing.publish(1, weights(), probe())
        with pytest.raises(QueueError, match="did not answer"):
            publishing.wait()
        assert publishing.in_flight is None


def test_a_server_that_registers_anew_on_the_way_fails_alone_and_comes_with_the_next_version(world: World) -> None:
    held = world.hold_transfers()
    with world.publisher(timeout_s=5) as publishing:
        publishing.publish(1, weights(), probe())
        assert held.began.wait(5)
        assert world.queue is not None
        world.do(world.queue.put_server(Server("vllm-1", world.urls[1])))
        held.release()
        publishing.wait()
        assert "transition_forbidden" in publishing.records[0].servers_failed["vllm-1"]
        assert world.states() == [(ServerState.SERVING, 1), (ServerState.JOINING, None)]
        publishing.publish(2, weights(), probe())
        publishing.wait()
    assert world.states() == [(ServerState.SERVING, 2)] * 2
