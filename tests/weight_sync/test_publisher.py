"""The learner's face, against two fake servers and a real queue; transports send nothing, the threads are real."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import uvicorn

from slipstream.protocol import tracing
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import ModelSection, RunConfig, WeightSyncSection
from slipstream.protocol.engine import EngineState
from slipstream.protocol.messages import BeginSession, Server, ServerState
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.ledger.records import ServerRecord
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.weight_sync import publisher
from slipstream.weight_sync.fleet import decisions, fleet, member, member_state, server_publication, snapshots
from slipstream.weight_sync.publisher import Publisher, PublishError
from slipstream.weight_sync.server import cancellation, control
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.fake_vllm.engine import logprob_of
from tests.kit.sync import FakeTransports, Held, probe
from tests.kit.traces import traced

T = TypeVar("T")


@dataclass
class World:
    """A queue and two servers on their own event loop, as they are to a learner."""

    loop: asyncio.AbstractEventLoop
    queue_url: str = ""
    queue: QueueClient | None = None
    session: int | None = None
    run_id: str = ""
    fakes: list[FakeVllm] = field(default_factory=lambda: [FakeVllm(), FakeVllm()])
    urls: list[str] = field(default_factory=list)
    transports: FakeTransports = field(default_factory=FakeTransports)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    max_staleness: int = 4
    quorum: int = 1
    changes: list[tuple[str, ServerState, int | None]] = field(default_factory=list)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def start(self) -> None:
        for fake in self.fakes:
            self.urls.append(await self.stack.enter_async_context(serving(fake)))
        listener = socket.create_server(("127.0.0.1", 0))
        self.queue_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.config(), MemoryStore())
        apply = ServerRegistry.apply

        def noted(fleet: ServerRegistry, record: ServerRecord) -> None:
            self.changes.append((record.server.name, record.server.state, record.server.version))
            apply(fleet, record)

        self.stack.enter_context(mock.patch.object(ServerRegistry, "apply", noted))
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
            weight_sync={"timeout_s": timeout_s, "quorum": self.quorum},
            queue={"max_staleness": self.max_staleness},
            vllm={"servers": self.urls or ["http://unused"], "start_timeout_s": start_timeout_s},
        )

    def publisher(self, **timeouts: float) -> Publisher:
        publisher = Publisher(self.config(**timeouts), self.queue_url, self.transports)
        publisher.session, publisher.run_id = self.session, self.run_id
        return publisher

    def servers(self) -> dict[str, Server]:
        assert self.queue is not None
        return {server.name: server for server in self.do(self.queue.servers())}

    def states(self) -> list[tuple[ServerState, int | None]]:
        return [(server.state, server.version) for server in self.servers().values()]

    def stop(self, index: int) -> None:
        """As SIGSTOP does: it answers nothing, whatever is asked."""
        for route in (
            "/slipstream/state",
            "/start_weight_update",
            "/weight_info",
            "/get_world_size",
            "/update_weights",
        ):
            self.fakes[index].faults.append(Fault("stop", times=None, route=route))

    def go_on(self, index: int) -> None:
        self.fakes[index].faults.clear()

    def hold_transfers(self) -> Held:
        self.transports.send = held = Held()
        return held


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(decisions, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet, "READ_EVERY_S", 0.05)
    monkeypatch.setattr(fleet, "FAILURE_PAUSE_S", 0.01)
    for module in (member, member_state):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(fleet, "QUEUE_PAUSE_S", 0.05)
    monkeypatch.setattr(publisher, "QueueClient", functools.partial(QueueClient, patience_s=0.5))
    monkeypatch.setattr(control, "RESUME_PAUSE_S", 0.01)
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
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def server_in(world: World, name: str, state: ServerState) -> Callable[[], bool]:
    return lambda: world.servers()[name].state is state


def mismatched(world: World, index: int) -> None:
    """The server computes with something else than was sent."""
    world.fakes[index].engine.probe_logprob = lambda token, place: -9.0


def sound(world: World, index: int) -> None:
    world.fakes[index].engine.probe_logprob = logprob_of


def test_a_publication_is_in_the_trace_of_the_step_that_made_its_version(world: World) -> None:
    with traced() as found, world.publisher() as publishing:
        for version in (1, 2):
            with tracing.span("step"):
                publishing.publish(version, weights(), probe())
            publishing.wait()
        held = world.hold_transfers()
        for version in (3, 4, 5, 6):
            publishing.publish(version, weights(), probe())
        until(held.began.is_set)
        held.release()
        publishing.wait()
    steps = [span.context for span in found() if span.name == "step"]
    publications = {span.attributes["slipstream.published"]: span for span in found() if span.name == "publication"}
    assert [publications[version].parent for version in (1, 2)] == steps
    assert publications[1].attributes["slipstream.servers"]
    assert [version for version, span in publications.items() if not span.status.is_ok] == [
        record.version - number for record in publishing.records for number in range(record.skipped, 0, -1)
    ]
    assert len(publications) == 6


def test_versions_go_out_to_all_servers_and_are_recorded_as_they_count(world: World) -> None:
    with world.publisher() as publishing:
        for version in (1, 2, 3):
            publishing.publish(version, weights(), probe())
            publishing.wait()
            until(lambda version=version: world.states() == [(ServerState.SERVING, version)] * 2)  # type: ignore[misc]
        assert publishing.in_flight is None
        assert [record.version for record in publishing.records] == [1, 2, 3]
        record = publishing.records[-1]
        until(lambda: record.servers_ok == ["vllm-0", "vllm-1"])
    assert record.servers_failed == {}
    assert set(record.servers) == {"vllm-0", "vllm-1"}
    assert record.probe_max_abs_diff < 1e-6
    assert 0 <= record.snapshot_s <= record.blocked_s
    assert record.pause_s > 0
    assert record.skipped == 0
    assert [transport.versions for transport in world.transports.made] == [[1, 2, 3]] * 2
    assert all(transport.closed for transport in world.transports.made)


def test_the_learner_waits_for_the_snapshot_alone_and_overtaken_versions_are_skipped_and_counted(world: World) -> None:
    held = world.hold_transfers()
    with world.publisher(timeout_s=20) as publishing:
        publishing.publish(1, weights(), probe())
        assert held.began.wait(5)
        blocked_s = [publishing.publish(version, weights(), probe()) for version in (2, 3, 4, 5)]
        assert max(blocked_s) < 0.4
        assert publishing.in_flight == 5
        assert publishing.snapshots.alive <= 3
        held.release()
        publishing.wait()
        assert publishing.in_flight is None
        until(lambda: world.states() == [(ServerState.SERVING, 5)] * 2)
    assert [record.version for record in publishing.records] == [1, 5]
    assert [record.skipped for record in publishing.records] == [0, 3]
    assert [transport.versions for transport in world.transports.made] == [[1, 5]] * 2


@pytest.mark.parametrize(("max_staleness", "asked"), [(0, False), (1, False), (4, False), (1, True)])
def test_i7_a_stopped_server_holds_neither_the_learner_nor_admission_and_is_fixed_when_it_goes_on(
    world: World, max_staleness: int, asked: bool
) -> None:
    world.max_staleness = max_staleness
    with world.publisher(timeout_s=20) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.stop(1)
        if asked:  # while it was up to date, so that nothing was waited for
            before = world.fakes[1].calls.count("/slipstream/state")
            until(lambda: world.fakes[1].calls.count("/slipstream/state") > before)
        for version in range(2, 4 + max_staleness):
            assert publishing.publish(version, weights(), probe()) < 0.4
            publishing.wait()  # the other one is a quorum
        newest = 3 + max_staleness
        until(server_in(world, "vllm-1", ServerState.STALE))
        assert world.servers()["vllm-1"].version == 1
        # What it waits for is added when its task is next looked at.
        until(lambda: "versions behind, unlike vllm-0; it waits for " in (world.servers()["vllm-1"].reason or ""))
        assert world.states()[0] == (ServerState.SERVING, newest)
        assert world.do(world.queue.position()).served_version == newest  # type: ignore[union-attr]
        world.go_on(1)
        until(lambda: world.states() == [(ServerState.SERVING, newest)] * 2)


def test_i7_a_server_whose_publication_took_too_long_does_not_hold_admission_until_it_has_the_newest(
    world: World,
) -> None:
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.fakes[1].faults.append(Fault("stop", times=None, route="/start_weight_update"))
        for version in range(2, 9):
            publishing.publish(version, weights(), probe())
            publishing.wait()
        until(server_in(world, "vllm-1", ServerState.STALE))
        time.sleep(decisions.MIN_GRACE_S)
        world.changes.clear()
        world.fakes[1].faults.clear()
        until(lambda: world.states() == [(ServerState.SERVING, 8)] * 2)
    assert [version for name, state, version in world.changes if state is ServerState.SERVING] == [8]
    assert any(transport.versions[-2:] == [2, 8] for transport in world.transports.made)


def test_a_publication_counts_when_a_quorum_has_it_and_a_wait_for_the_others_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "TELL_EVERY_S", 0.05)
    world.quorum = 2
    with world.publisher(timeout_s=20) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        world.stop(1)
        publishing.publish(2, weights(), probe())
        until(lambda: world.states()[0] == (ServerState.SERVING, 2))
        assert publishing.in_flight == 2
        waiting = threading.Thread(target=publishing.wait, daemon=True)
        waiting.start()
        until(lambda: any("vllm-1" in wait.what for wait in world.do(world.queue.status()).waits))  # type: ignore[union-attr]
        world.go_on(1)
        waiting.join(10)
        assert not waiting.is_alive()
    assert [record.servers_ok for record in publishing.records] == [["vllm-0", "vllm-1"]] * 2


def test_one_server_under_two_names_is_taken_out_under_the_second(world: World) -> None:
    world.do(world.queue.put_server(Server("twin", world.urls[0].replace("127.0.0.1", "localhost"))))  # type: ignore[union-attr]
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: [server.state for server in world.servers().values()].count(ServerState.SERVING) == 2)
        until(lambda: ServerState.DOWN in [server.state for server in world.servers().values()])
    down = next(server for server in world.servers().values() if server.state is ServerState.DOWN)
    assert down.name in ("twin", "vllm-0")
    assert "it is the same server process as" in str(down.reason)


def test_i5_a_server_with_log_probs_of_the_wrong_kind_never_serves_whoever_started_it(world: World) -> None:
    """The same holds for a server that restarts with other flags. It serves once it has the right ones."""
    first, second = world.fakes
    second.says = {"logprobs_mode": "raw_logprobs"}
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(server_in(world, "vllm-1", ServerState.DOWN))
        reason = str(world.servers()["vllm-1"].reason)
        assert "its log-probs are raw_logprobs" in reason
        assert "--logprobs-mode processed_logprobs" in reason
        until(server_in(world, "vllm-0", ServerState.SERVING))
        assert "/slipstream/swap" not in second.calls
        second.says = {}
        second.engine.restart()
        until(server_in(world, "vllm-1", ServerState.SERVING))
        first.says = {"max_model_len": 16}
        first.engine.restart()
        until(server_in(world, "vllm-0", ServerState.DOWN))
        assert "its context is 16 tokens" in str(world.servers()["vllm-0"].reason)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (["/slipstream/state"], r"HTTP 502.*; it answers GET /health: does a proxy"),
        (["/slipstream/state", "/health"], r"HTTP 502.*; it does not answer GET /health either: is the proxy"),
    ],
)
def test_a_server_behind_a_proxy_that_passes_some_routes_alone_is_told_from_one_that_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, routes: list[str], said: str
) -> None:
    monkeypatch.setattr(member_state, "DOWN_AFTER_S", 0.0)
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.fakes[1].faults.extend(Fault("status", times=None, route=route, status=502) for route in routes)
        until(server_in(world, "vllm-1", ServerState.DOWN))
    assert re.search(f"its engine does not answer: .*{said}", str(world.servers()["vllm-1"].reason))


def look_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions take 0.4 s where there is no answer, and the next is asked 0.3 s later."""
    monkeypatch.setattr(member, "LOOK_TIMEOUT_S", 0.4)
    monkeypatch.setattr(member_state, "LOOK_EVERY_S", 0.3)


def test_a_look_during_which_the_learner_itself_was_stopped_does_not_mark_the_server_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_slowly(monkeypatch)
    monkeypatch.setattr(member_state, "DOWN_AFTER_S", 1.0)
    stopped, ask = threading.Event(), ServerControl.state

    async def stands_still(control: ServerControl) -> EngineState:
        if not stopped.is_set():
            stopped.set()
            time.sleep(1.5)  # noqa: ASYNC251 (as if the process was stopped)
            await asyncio.sleep(60)
        return await ask(control)

    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        monkeypatch.setattr(ServerControl, "state", stands_still)
        assert stopped.wait(5)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert world.states() == [(ServerState.SERVING, 1)] * 2
            time.sleep(0.01)


def test_a_person_s_pause_stands_and_is_waited_for(world: World) -> None:
    world.fakes[1].engine.pause()
    world.fakes[1].engine.pause_owner = "person"
    with world.publisher(start_timeout_s=2) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        until(server_in(world, "vllm-1", ServerState.STALE))
        assert "paused by a person" in str(world.servers()["vllm-1"].reason)
        assert world.fakes[1].engine.paused
        world.fakes[1].engine.resume()
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)


def test_a_server_that_is_up_to_date_leaves_service_while_a_person_pauses_it_and_comes_back_by_itself(
    world: World,
) -> None:
    """Its requests stand still: while it served, no step was made, and so no version came that would have shown it."""
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.fakes[1].engine.pause()
        until(server_in(world, "vllm-1", ServerState.STALE))
        assert world.servers()["vllm-1"].reason == "paused by a person: waits for POST /resume"
        assert world.states()[0] == (ServerState.SERVING, 1)
        world.fakes[1].engine.resume()
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        assert [transport.versions for transport in world.transports.made] == [[1]] * 2, "proven once is enough"


@pytest.mark.parametrize("how", ["a pause of nobody", "an engine without steps"])
def test_i6_a_server_that_cannot_generate_leaves_service_at_once_and_comes_back_when_it_steps(
    world: World, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, fake = world.fakes[1].engine, world.fakes[1]
    caplog.set_level("INFO")
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        if how == "a pause of nobody":
            engine.pause("none")
        else:
            engine.stuck = "its engine has made no step for 10 s"
        until(server_in(world, "vllm-1", ServerState.STALE))
        cause = engine.stuck or "nobody holds its pause"
        assert world.servers()["vllm-1"].reason == cause
        publishing.publish(2, weights(2.0), probe())
        until(lambda: world.states()[0] == (ServerState.SERVING, 2))
        assert engine.weight_version == "1", "nothing is published to what cannot generate"
        # It says that it can again; that counts once it has generated a token.
        fake.faults.append(Fault("status", times=None, route="/inference/v1/generate"))
        engine.resume()
        engine.stuck = None
        fake.calls.clear()
        until(lambda: fake.calls.count("/inference/v1/generate") >= 2)
        assert world.states()[1][0] is ServerState.STALE
        fake.faults.clear()
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)
    said = [line for line in caplog.messages if line.startswith("vllm-1")]
    assert len([line for line in said if f"is stale: {cause}" in line]) == 1
    assert any(re.search(r"serves again, after \d+ s, with version 2", line) for line in said)


def test_a_restart_is_noticed_by_its_boot_and_the_server_joins_again(world: World) -> None:
    with world.publisher() as publishing:
        publishing.publish(3, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
        world.fakes[1].engine.restart()
        until(lambda: world.fakes[1].engine.weight_version == "3")
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
        assert len(publishing.records) == 1
    assert [transport.versions for transport in world.transports.made].count([3]) == 3


def test_an_engine_in_a_long_step_is_not_taken_for_a_restart_and_is_caught_up_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decisions, "RETRY_PAUSE_S", 60.0)
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.changes.clear()
        world.fakes[1].engine.alive = False
        time.sleep(0.5)
        world.fakes[1].engine.alive = True
        time.sleep(0.2)
        assert not [change for change in world.changes if change[0] == "vllm-1"]
        world.fakes[1].engine.alive = False
        monkeypatch.setattr(member_state, "DOWN_AFTER_S", 0.2)
        publishing.publish(2, weights(), probe())
        until(server_in(world, "vllm-1", ServerState.DOWN))
        assert "its engine does not answer" in str(world.servers()["vllm-1"].reason)
        world.fakes[1].engine.alive = True
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)
    assert "restarted" not in caplog.text


def test_a_server_that_leaves_and_one_that_comes_are_followed(world: World) -> None:
    assert world.queue is not None
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.do(world.queue.remove_server("vllm-1"))
        until(lambda: list(world.servers()) == ["vllm-0"])
        publishing.publish(2, weights(), probe())
        publishing.wait()
        assert world.fakes[1].engine.weight_version == "1"
        world.do(world.queue.put_server(Server("other", world.urls[1])))
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)


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
        publishing.wait()  # for one of them
        until(lambda: len(seen) == 2)
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize(("dtype", "state"), [("float32", ServerState.QUARANTINED), ("bfloat16", ServerState.SERVING)])
def test_a_difference_of_rounding_is_one_that_the_model_s_type_allows(
    world: World, monkeypatch: pytest.MonkeyPatch, dtype: str, state: ServerState
) -> None:
    settings = world.config().model_copy(update={"model": ModelSection.model_validate({"path": "m", "dtype": dtype})})
    monkeypatch.setattr(world, "config", lambda: settings)
    for fake in world.fakes:
        fake.says = {"dtype": f"torch.{dtype}"}
    fails = pytest.raises(PublishError) if state == ServerState.QUARANTINED else contextlib.nullcontext()
    with fails, world.publisher() as publisher:
        publisher.publish(1, [], probe(shift=0.2))
        publisher.wait()
        until(lambda: {server.state for server in world.servers().values()} == {state})


def test_i5_a_server_that_fails_its_proof_is_quarantined_and_mended_by_the_next_version(world: World) -> None:
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        mismatched(world, 1)
        publishing.publish(2, weights(), probe())
        publishing.wait()
        until(lambda: world.states() == [(ServerState.SERVING, 2), (ServerState.QUARANTINED, 2)])
        reason = world.servers()["vllm-1"].reason
        assert reason is not None
        assert "after version 2 its log-probs of the probe differ" in reason
        until(lambda: publishing.records[1].servers_failed == {"vllm-1": reason})
        assert publishing.records[1].servers_ok == ["vllm-0"]
        assert not world.fakes[1].engine.paused
        sound(world, 1)
        publishing.publish(3, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)


def test_a_transfer_that_fails_leaves_a_server_in_service_with_what_it_has(world: World) -> None:
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.fakes[1].faults.append(Fault("status", times=2, route="/start_weight_update"))
        publishing.publish(2, weights(), probe())
        until(lambda: world.states()[1] == (ServerState.SERVING, 2))
    assert not [record for record in world.changes if record[0] == "vllm-1" and record[1] is ServerState.QUARANTINED]


@pytest.mark.parametrize("computes", [True, False])
def test_i5_a_proof_that_could_not_be_asked_is_asked_again_and_only_its_verdict_counts(
    world: World, computes: bool
) -> None:
    with world.publisher(timeout_s=0.5) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.changes.clear()
        world.fakes[1].faults.append(Fault("stop", times=None, route="/slipstream/layers"))  # of the proof
        if not computes:
            mismatched(world, 1)
        publishing.publish(2, weights(), probe())
        until(server_in(world, "vllm-1", ServerState.SYNCING))
        assert "its proof could not be asked; it is asked again" in (world.servers()["vllm-1"].reason or "")
        world.go_on(1)
        until(server_in(world, "vllm-1", ServerState.SERVING if computes else ServerState.QUARANTINED))
    of_1 = [(state, version) for name, state, version in world.changes if name == "vllm-1"]
    assert ((ServerState.SERVING, 2) in of_1, (ServerState.QUARANTINED, 2) in of_1) == (computes, not computes)
    if computes:
        assert sum(transport.versions.count(2) for transport in world.transports.made) > 1, "it was sent again"


def test_i5_a_swap_whose_proof_is_given_up_for_a_newer_version_is_proven_before_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of the newer one would count for what it sampled meanwhile."""
    monkeypatch.setattr(snapshots, "MAX_ON_THEIR_WAY", 1)
    monkeypatch.setattr(fleet, "MAX_ROOM_WAIT_S", 0.02)
    with world.publisher(timeout_s=20.0) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.changes.clear()
        of_the_proof = "/slipstream/layers"
        world.fakes[1].faults.append(Fault("hang", times=1, route=of_the_proof))
        before = world.fakes[1].calls.count(of_the_proof)
        publishing.publish(2, weights(), probe())
        until(lambda: world.fakes[1].calls.count(of_the_proof) > before)
        publishing.publish(3, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
    of_1 = [(state, version) for name, state, version in world.changes if name == "vllm-1"]
    assert of_1 == [(ServerState.SERVING, 2), (ServerState.SERVING, 3)]


def test_when_every_server_fails_the_version_is_tried_again(world: World) -> None:
    for fake in world.fakes:
        fake.faults.append(Fault("status", times=2, route="/start_weight_update"))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
    assert len(publishing.records) == 1


def test_when_no_server_can_be_reached_the_first_publication_ends_with_all_reasons(world: World) -> None:
    for fake, route in zip(world.fakes, ("/slipstream/staged", "/slipstream/swap"), strict=True):
        fake.faults.append(Fault("status", times=None, route=route))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        with pytest.raises(PublishError, match=r"version 1 reached 0 vLLM servers of the 1 of .*quorum.*: ") as caught:
            publishing.wait()
        assert f"{world.urls[0]}/slipstream/staged" in str(caught.value)
        assert f"{world.urls[1]}/slipstream/swap" in str(caught.value)
        assert publishing.in_flight is None
        assert publishing.records == []
        for fake in world.fakes:
            assert not fake.engine.paused
            fake.faults.clear()
        publishing.publish(3, weights(), probe())
        publishing.wait()
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)


def test_later_failures_never_end_the_run(world: World) -> None:
    with world.publisher(timeout_s=0.5) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        for fake in world.fakes:
            fake.faults.append(Fault("status", times=None, route="/start_weight_update"))
        publishing.publish(2, weights(), probe())
        publishing.wait()
        assert publishing.in_flight == 2
        for fake in world.fakes:
            fake.faults.clear()
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)


def test_a_transport_that_fails_ends_the_publication_with_its_error(world: World) -> None:
    unusable = world.config().model_copy(update={"weight_sync": WeightSyncSection(host="192.0.2.1", timeout_s=0.5)})
    with Publisher(unusable, world.queue_url) as publishing:
        publishing.session = world.session
        publishing.publish(1, weights(), probe())
        with pytest.raises(PublishError, match=r"weight_sync\.host = 192\.0\.2\.1: cannot listen there"):
            publishing.wait()


def test_a_rank_that_is_gone_ends_the_wait_for_the_first_publication(world: World) -> None:
    world.transports.send = held = Held()
    with world.publisher() as publisher:
        publisher.publish(0, [("w", torch.zeros(4))], probe())
        assert held.began.wait(10)
        publisher.rank_lost(RuntimeError("rank 1 was ended"))
        with pytest.raises(RuntimeError, match="rank 1 was ended"):
            publisher.wait()
        held.release()


def test_a_server_that_never_comes_up_does_not_hold_the_first_publication_and_comes_late(world: World) -> None:
    assert world.queue is not None
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    world.do(world.queue.put_server(Server("vllm-1", f"http://127.0.0.1:{port}")))
    with world.publisher(start_timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        assert publishing.records[0].servers_ok == ["vllm-0"]
        plain = f"http://127.0.0.1:{port} does not answer yet (connection refused)"
        until(lambda: world.servers()["vllm-1"].reason == plain)
        assert publishing.fleet.describe_waits() == f"vllm-1 (joining, {plain})"
        world.do(world.stack.enter_async_context(serving(FakeVllm(), port=port)))
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)


def test_a_fleet_that_never_comes_up_ends_the_first_publication_in_time_and_is_named(world: World) -> None:
    assert world.queue is not None
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    for name, host in (("vllm-0", "127.0.0.1"), ("vllm-1", "localhost")):
        world.do(world.queue.put_server(Server(name, f"http://{host}:{port}")))
    with world.publisher(start_timeout_s=0.3) as publishing:
        publishing.publish(1, weights(), probe())
        told = r"vllm-0 is joining: http://127\.0\.0\.1:\d+ does not answer yet .*vllm-1 is joining"
        with pytest.raises(PublishError, match=told):
            publishing.wait()


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.STALE])
def test_a_server_that_restarted_is_caught_up_without_a_new_version(world: World, state: ServerState) -> None:
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
        until(lambda: world.states() == [(ServerState.SERVING, 4)] * 2)
    assert len(publishing.records) == 2


def broken_for(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look whether a server is up fails in a way that nobody foresaw."""
    left, look = [RuntimeError("a bug")] * times, control.ServerControl.state

    async def state(self: control.ServerControl) -> EngineState:
        if left:
            raise left.pop()
        return await look(self)

    monkeypatch.setattr(control.ServerControl, "state", state)


def test_a_server_s_task_survives_errors_of_any_kind_and_logs_them(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with world.publisher() as publishing:
        publishing.publish(3, weights(), probe())
        publishing.wait()
        broken_for(2, monkeypatch)
        assert world.queue is not None
        world.do(world.queue.put_server(Server("vllm-1", world.urls[1])))
        until(lambda: len([record for record in caplog.records if record.exc_info]) == 2)
        until(lambda: world.states() == [(ServerState.SERVING, 3)] * 2)
    traces = [record for record in caplog.records if record.exc_info]
    assert {record.message.partition("(")[2] for record in traces} <= {"failure 1)", "failure 2)"}
    assert len(traces) == 2


def test_a_watch_that_only_fails_ends_the_learner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_UNEXPECTED_FAILURES", 3)
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


def test_i7_an_engine_that_hangs_in_its_publication_is_down_while_that_still_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_state, "DOWN_AFTER_S", 0.2)
    with world.publisher(timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        held = world.hold_transfers()
        publishing.publish(2, weights(), probe())
        assert held.began.wait(5)
        world.fakes[1].engine.alive = False
        until(server_in(world, "vllm-1", ServerState.DOWN))
        assert "the engine does not answer" in str(world.servers()["vllm-1"].reason)
        assert world.servers()["vllm-0"].state is ServerState.SERVING
        world.fakes[1].engine.alive = True
        held.release()
        until(lambda: world.states() == [(ServerState.SERVING, 2)] * 2)


def test_i6_a_server_that_fails_half_way_in_place_is_quarantined_and_paused_until_it_is_whole(world: World) -> None:
    world.transports, world.run_id = FakeTransports(stages=False), "run-1"
    world.fakes[1].faults.append(Fault("status", route="/finish_weight_update"))
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        until(lambda: ("vllm-1", ServerState.QUARANTINED, 1) in world.changes)
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
    assert not any(fake.engine.paused for fake in world.fakes)


def test_i6_leaving_in_the_middle_of_a_load_in_place_takes_the_server_out_of_service(world: World) -> None:
    world.transports, world.run_id = FakeTransports(stages=False), "run-1"
    with world.publisher(timeout_s=60) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
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


def test_leaving_in_the_moment_in_which_a_publication_fails_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    async def publish(sync: server_publication.ServerSync, snapshot: Snapshot) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise control.ControlError("no answer within 60 s") from None

    monkeypatch.setattr(server_publication.ServerSync, "publish", publish)
    with world.publisher() as publishing:
        publishing.publish(1, weights(), probe())
        assert began.wait(5)
        leaving = time.monotonic()
    assert time.monotonic() - leaving < 5


def test_a_queue_that_does_not_answer_is_an_error_not_a_hang(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    with Publisher(world.config(), url, world.transports) as publishing:
        publishing.publish(1, weights(), probe())
        with pytest.raises(QueueError, match="did not answer"):
            publishing.wait()


def test_a_server_that_registers_anew_on_the_way_is_published_to_again(world: World) -> None:
    held = world.hold_transfers()
    with world.publisher(timeout_s=5) as publishing:
        publishing.publish(1, weights(), probe())
        assert held.began.wait(5)
        assert world.queue is not None
        world.do(world.queue.put_server(Server("vllm-1", world.urls[1])))
        held.release()
        publishing.wait()
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
