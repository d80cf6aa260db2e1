"""Our routes and rules inside vLLM's API process, around an app and an engine that are stand-ins."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slipstream.protocol.engine import COMPUTES, NO_ANSWER, STOPPED, ServerFacts, parse
from slipstream.weight_sync.vllm import control_rules, engine_state
from slipstream.weight_sync.vllm.engine_state import EngineStatus, Progress, status_of
from slipstream.weight_sync.vllm.middleware import Slipstream
from tests.kit.worker import until

READY = {"stage": "ready", "error": None, "seconds": {"receiving": 1.0}}
OURS = {"slipstream-owner": "publication", "slipstream-run": "a-1"}


class Engine:
    """vLLM's engine client, as far as our routes use it. A test sets what it answers."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(data_parallel_size=1, world_size_across_dp=2)
        parallel._api_process_count, parallel.local_engines_only = 1, False
        transfer = SimpleNamespace(backend="gloo")
        model = SimpleNamespace(
            served_model_name="policy", logprobs_mode="raw_logprobs", dtype=torch.float32, max_logprobs=20
        )
        model.max_model_len, model.quantization, model.is_moe = 64, None, False
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, weight_transfer_config=transfer, model_config=model
        )
        self.engine_core = self
        self.label = "default"
        self.paused = False
        self.asleep = 0
        self.sleeping = False
        self.running = self.waiting = 0
        self.place: list[Any] = []
        self.hangs = False
        self.staging = [READY, READY]
        self.swapped: dict[str, Any] = {"pause_s": 0.01, "exchange_s": 0.001, "error": None, "whole": True}
        self.swapping = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.ended: list[str] = []
        self.errored = False
        self.codes: dict[str, int] = {}
        self.resources = SimpleNamespace(engine_manager=self)  # as vLLM keeps them
        self.failed_proc_name: str | None = None
        self.step_s = 0.0

    def finished_procs(self) -> dict[str, int]:
        return self.codes

    async def call_utility_all_async(self, method: str, *arguments: Any) -> list[Any]:
        if self.hangs:
            await asyncio.Event().wait()
        if method == "slipstream_state":
            told = {"boot": "e1", "label": self.label, "paused": self.paused, "asleep": self.sleeping}
            return [
                {
                    **told,
                    "running": self.running,
                    "waiting": self.waiting,
                    "place": [*self.place],
                    "step_s": self.step_s,
                    "generated": 3,
                }
            ]
        if method == "slipstream_workers":
            assert arguments[0] == "slipstream_staging"
            return [{"answers": self.staging, "error": None}]
        self.swapping.set()
        await self.go_on.wait()
        if not self.swapped["error"]:
            self.label = arguments[0]
        return [self.swapped]

    async def resume_generation(self) -> None:
        self.paused = False


class Server(httpx.AsyncClient):
    engine: Engine
    condition: EngineStatus
    root: list[str]
    generating: asyncio.Event


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    engine, generating = Engine(), asyncio.Event()

    async def pause(request: Request) -> Response:
        engine.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        await engine.resume_generation()
        return JSONResponse({"status": "resumed"})

    async def generate(request: Request) -> Response:
        generating.set()
        await asyncio.Event().wait()
        return JSONResponse({})

    async def done(request: Request) -> Response:
        return JSONResponse({"message": "done"})

    async def sleep(request: Request) -> Response:
        engine.asleep += 1
        return JSONResponse({})

    closed = ["/sleep", "/wake_up", "/collective_rpc", "/abort_requests", "/v1/load_lora_adapter", "/new"]
    control = ["/start_weight_update", "/finish_weight_update", "/update_weight_version"]
    app = Starlette(
        routes=[
            Route("/pause", pause, methods=["POST"]),
            Route("/resume", resume, methods=["POST"]),
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/health", done),
            *(Route(path, done, methods=["POST"]) for path in control),
            *(Route(path, sleep, methods=["POST"]) for path in closed),
        ]
    )
    app.state.engine_client = engine
    app.state.args = SimpleNamespace(enable_scale_out=True)
    app.add_middleware(Slipstream)
    condition = status_of(engine)
    condition.end = lambda: engine.ended.append("ended")
    root: list[str] = []

    async def below_root(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "".join(root)}, receive, send)

    async with Server(transport=httpx.ASGITransport(below_root), base_url="http://server") as server:
        server.engine, server.condition, server.generating, server.root = engine, condition, generating, root
        yield server
    for task in (condition.heartbeat, condition.ending):
        if task is not None:
            task.cancel()


async def test_the_state_says_what_the_engine_says_and_what_only_the_server_knows() -> None:
    async with serving() as server:
        reply = await server.get("/slipstream/state")
        assert reply.status_code == 200
        state = reply.json()
        assert state.pop("boot").endswith("-e1")
        assert state == {
            "label": "default",
            "paused": False,
            "whole": True,
            "alive": True,
            "pause_owner": "none",
            "workers": 2,
            "transport": "gloo",
            "reason": None,
            "owner": "",
            "owner_silent_s": 0.0,
            "stuck": None,
            "step_s": 0.0,
            "generated": 3,
        }


async def test_an_engine_in_a_step_is_silent_and_how_long_its_steps_take_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.weight_sync.vllm.engines.LOOK_TIMEOUT_S", 0.05)
    async with serving() as server:
        server.engine.step_s = 17.0
        assert (await server.get("/slipstream/state")).json()["step_s"] == 17.0
        server.engine.hangs = True
        state = (await server.get("/slipstream/state")).json()
        assert (state["alive"], state["step_s"]) == (False, 17.0)


@pytest.mark.parametrize(
    ("program", "signal_to_it", "why"),
    [
        ("while True: pass", None, COMPUTES),
        ("import time; time.sleep(60)", None, NO_ANSWER),
        ("import time; time.sleep(60)", signal.SIGSTOP, STOPPED),
    ],
    ids=["computes", "waits", "is stopped"],
)
async def test_the_processes_of_an_engine_show_why_it_does_not_answer(
    program: str, signal_to_it: signal.Signals | None, why: str
) -> None:
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", server], start_new_session=True) as started:  # noqa: ASYNC220
        try:
            api = psutil.Process(started.pid)
            await until(lambda: bool(api.children()))
            if signal_to_it is None:
                # Until Python has started there, it computes.
                await until(lambda: engine_state.why_unanswered(api) == why)
            else:
                api.children()[0].send_signal(signal_to_it)
                assert engine_state.why_unanswered(api) == why
        finally:
            os.killpg(started.pid, signal.SIGKILL)


async def test_an_engine_of_long_steps_is_given_long_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ASK_EVERY_S": 0.01, "ANSWER_WITHIN_S": 0.01, "QUESTIONS": 1}.items():
        monkeypatch.setattr(engine_state, name, value)
    asked: list[float] = []

    async def ask(_: Any, within_s: float) -> None:
        asked.append(within_s)

    status = engine_state.EngineStatus(step_s=30.0, end=lambda: None)
    await engine_state.watch(SimpleNamespace(), status, ask)
    assert asked == [60.0]
    assert "did not answer 1 times in a row, 60 s each" in (status.broken or "")


async def test_an_engine_that_hangs_is_not_alive_though_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weight_sync.vllm.engines.LOOK_TIMEOUT_S", 0.05)
    async with serving() as server:
        server.engine.hangs = True
        reply = await asyncio.wait_for(server.get("/slipstream/state"), 5)
        assert reply.status_code == 503
        assert not reply.json()["alive"]
        assert reply.json()["reason"] == "the engine does not answer"


async def test_an_engine_that_hangs_for_good_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ASK_EVERY_S": 0.01, "ANSWER_WITHIN_S": 0.01, "QUESTIONS": 3}.items():
        monkeypatch.setattr(engine_state, name, value)
    monkeypatch.setattr("slipstream.weight_sync.vllm.engine_state.TELL_S", 0.01)
    async with serving() as server:
        server.engine.hangs = True
        generating = asyncio.create_task(server.post("/inference/v1/generate", json={}))
        reply = await asyncio.wait_for(generating, 5)
        assert reply.status_code == 503
        assert "did not answer 3 times" in reply.json()["error"]["message"]
        await until(lambda: server.engine.ended == ["ended"])


async def test_a_persons_resume_within_a_swap_waits_for_its_end_and_goes_through() -> None:
    async with serving() as server:
        await server.post("/pause")
        server.engine.go_on.clear()
        swap = asyncio.create_task(server.post("/slipstream/swap", json={"label": "7"}))
        await server.engine.swapping.wait()
        resume = asyncio.create_task(server.post("/resume"))
        await asyncio.sleep(0.05)
        assert not resume.done()
        assert server.engine.paused, "not before the swap's end"
        server.engine.go_on.set()
        assert (await resume).status_code == 200
        assert (await swap).status_code == 200
        assert not server.engine.paused
        assert not server.condition.user_pause


async def test_a_resume_within_a_swap_that_takes_long_is_told_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weight_sync.vllm.control_rules.SWAP_WITHIN_S", 0.05)
    async with serving() as server:
        await server.post("/pause")
        server.engine.go_on.clear()
        swap = asyncio.create_task(server.post("/slipstream/swap", json={"label": "7"}))
        await server.engine.swapping.wait()
        refused = await server.post("/resume")
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        assert "new weights are being swapped in" in message
        assert "nothing needs to be done" in message
        assert server.condition.user_pause, "it is still to be ended"
        server.engine.go_on.set()
        await swap


@pytest.mark.parametrize(
    ("code", "told"), [(-9, "signal 9"), (1, "exit code 1")], ids=["killed by the kernel", "its own error"]
)
async def test_an_engine_that_ended_is_told_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, told: str
) -> None:
    monkeypatch.setattr(engine_state, "LOOK_EVERY_S", 0.01)
    async with serving() as server:
        generating = asyncio.create_task(server.post("/inference/v1/generate", json={}))
        await server.generating.wait()
        server.engine.codes, server.engine.failed_proc_name = {"EngineCore_DP0": code}, "EngineCore_DP0"
        reply = await asyncio.wait_for(generating, 5)
    assert reply.json()["error"]["message"] == f"its EngineCore process ended ({told})"
    assert f"not generate any more: its EngineCore process ended ({told})" in caplog.text


@pytest.mark.parametrize("dies", [True, False])
async def test_the_last_word_of_a_server_is_why_it_ends(caplog: pytest.LogCaptureFixture, dies: bool) -> None:
    """vLLM ends by itself when its engine is gone, after an error for each request."""
    engine = Engine()
    engine.codes, engine.failed_proc_name = {"EngineCore_DP0": -9}, "EngineCore_DP0" if dies else None
    app = Starlette()
    app.state.engine_client = engine
    app.state.args = SimpleNamespace(enable_scale_out=True)
    app.add_middleware(Slipstream)
    events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(events)

    async def send(message: Any) -> None: ...

    await app({"type": "lifespan", "app": app, "state": {}}, receive, send)
    assert ("this server ends: its EngineCore process ended (signal 9)" in caplog.text) == dies


def test_vllm_tells_the_end_of_its_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would log a longer traceback for each request: 18 MB for 128 of them."""
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    Slipstream(Starlette())
    of_vllm = logging.getLogger("vllm.entrypoints")
    for error in (type("EngineDeadError", (Exception,), {}), ValueError):
        for number in range(3):
            try:
                raise error
            except Exception:
                of_vllm.exception("%s %d", error.__name__, number)
    of_vllm.warning("without an error")
    assert told == ["EngineDeadError 0", "ValueError 0", "ValueError 1", "ValueError 2", "without an error"]


async def test_i6_a_pause_that_nobody_holds_and_a_sleeping_engine_are_told() -> None:
    async with serving() as server:

        async def stuck() -> str | None:
            told: str | None = (await server.get("/slipstream/state")).json()["stuck"]
            return told

        server.engine.paused = True
        assert "neither a publication nor a person holds the pause" in str(await stuck())
        await server.post("/resume")
        assert await stuck() is None
        for headers in ({}, OURS):
            await server.post("/pause", headers=headers)
            assert await stuck() is None, "it has an owner"
            await server.post("/resume", headers=headers)
        server.engine.sleeping = True
        assert await stuck() == "it sleeps: start it again"


def test_i6_an_engine_that_has_requests_and_makes_no_step_is_stalled() -> None:
    def engine(running: int, waiting: int, place: int, paused: bool = False) -> dict[str, Any]:
        return {"running": running, "waiting": waiting, "place": [place], "paused": paused, "step_s": 0.1}

    waits, runs, idle = engine(0, 3, 1), engine(2, 0, 1), engine(0, 0, 0)
    for stalled, text in ((waits, "lets requests wait and runs none"), (runs, "has made no step")):
        progress = Progress()
        looks = [progress.why_stalled([idle, stalled], now) for now in (100, 102, 109, 110, 111)]
        assert looks == [None, None, None, *[f"its engine {text} for 10 s"] * 2]
        assert progress.why_stalled([idle, {**stalled, "place": [2]}], 113) is None
        assert progress.why_stalled([idle, {**stalled, "place": [2]}], 130) is None, "nobody looked in between"
    progress, slow = Progress(), {**runs, "step_s": 20.0}
    assert [progress.why_stalled([slow], now) for now in (100, 120, 140, 159)] == [None] * 4
    assert progress.why_stalled([slow], 160) == "its engine has made no step for 60 s"
    for other in (idle, engine(0, 3, 1, paused=True)):
        progress = Progress()
        assert [progress.why_stalled([other], now) for now in (100, 105, 112, 120)] == [None] * 4


async def test_the_slowest_worker_is_what_staging_is() -> None:
    async with serving() as server:
        building = {"stage": "building", "error": None, "seconds": {"receiving": 2.0}}
        server.engine.staging = [READY, building]
        assert (await server.post("/slipstream/staged", json={"wait_s": 0})).json() == building
        failed = {"stage": "failed", "error": "no place", "seconds": {}}
        server.engine.staging = [building, failed]
        assert (await server.post("/slipstream/staged", json={"wait_s": 9})).json()["error"] == "worker 1: no place"


async def test_health_is_never_200_once_an_exchange_has_failed_even_if_asked_within_it() -> None:
    async with serving() as server:
        assert (await server.get("/health")).status_code == 200
        server.engine.swapped = {"pause_s": 0.01, "exchange_s": 0.0, "error": "OSError: no room", "whole": False}
        server.engine.go_on.clear()
        swap = asyncio.create_task(server.post("/slipstream/swap", json={"label": "7"}))
        await server.engine.swapping.wait()
        health = asyncio.create_task(server.get("/health"))
        await asyncio.sleep(0.02)
        server.engine.go_on.set()
        assert (await swap).status_code == 503
        answer = await health
        assert answer.status_code == 503
        assert "OSError: no room" in answer.text


async def test_the_flags_that_a_run_depends_on_are_told() -> None:
    async with serving() as server:
        facts = parse(ServerFacts, (await server.get("/slipstream/facts")).json())
    assert facts == ServerFacts(None, "policy", "raw_logprobs", "float32", 64, "gloo", scale_out=True, max_logprobs=20)


async def test_i6_a_swap_ends_though_its_client_went_away() -> None:
    async with serving() as server:
        server.engine.go_on.clear()
        swap = asyncio.create_task(server.post("/slipstream/swap", json={"label": "3", "clear_cache": False}))
        await server.engine.swapping.wait()
        assert not server.condition.whole
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        server.engine.go_on.set()
        await asyncio.sleep(0.05)
        assert server.engine.label == "3"
        assert server.condition.whole


async def test_a_swap_of_what_is_not_ready_is_refused_and_the_server_goes_on() -> None:
    async with serving() as server:
        server.engine.swapped = {"pause_s": 0.0, "exchange_s": 0.0, "error": "worker 1 is not ready", "whole": True}
        reply = await server.post("/slipstream/swap", json={"label": "3", "clear_cache": False})
        assert reply.status_code == 409
        assert "worker 1 is not ready" in reply.text
        assert (await server.get("/slipstream/state")).status_code == 200


async def test_i6_a_swap_that_fails_half_way_answers_503_to_all_at_once_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.weight_sync.vllm.engine_state.TELL_S", 0.05)
    async with serving() as server:
        generating = asyncio.create_task(server.post("/inference/v1/generate", json={}))
        await server.generating.wait()
        server.engine.swapped = {"pause_s": 0.0, "exchange_s": 0.0, "error": "RuntimeError: boom", "whole": False}
        reply = await server.post("/slipstream/swap", json={"label": "3", "clear_cache": False})
        assert reply.status_code == 503
        in_flight = await asyncio.wait_for(generating, 1)
        assert in_flight.status_code == 503
        assert "failed half-way: RuntimeError: boom" in in_flight.text
        assert (await server.post("/resume")).status_code == 503
        state = await server.get("/slipstream/state")
        assert (state.status_code, state.json()["whole"]) == (503, False)
        await until(lambda: server.engine.ended == ["ended"])


async def test_i6_a_pause_whose_owner_died_ends_by_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_rules.grant_pause, "__defaults__", (0.05,))
    async with serving() as server:
        await server.post("/pause", headers=OURS)
        assert (await server.get("/slipstream/state")).json()["pause_owner"] == "publication"
        await until(lambda: not server.engine.paused)
        assert server.condition.pause_owner == "none"


async def test_i6_a_lease_that_is_renewed_holds() -> None:
    async with serving() as server:
        await server.post("/pause", headers=OURS)
        for _ in range(3):
            reply = await server.post("/slipstream/lease", json={"owner": "publication", "seconds": 1.0}, headers=OURS)
            assert reply.status_code == 200
            await asyncio.sleep(0.4)
        assert server.engine.paused
        await until(lambda: not server.engine.paused)
        late = await server.post("/slipstream/lease", json={"owner": "x", "seconds": 1}, headers=OURS)
        assert late.status_code == 409


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/sleep/", "/wake_up", "/collective_rpc", "/abort_requests", "/v1/load_lora_adapter", "/new"],
)
async def test_i6_a_route_of_vllm_that_a_run_does_not_need_is_closed(path: str) -> None:
    async with serving() as server:
        reply = await server.post(path, params={"level": "0"}, headers={"slipstream-run": "a-1"})
        assert reply.status_code == 403
        assert f"POST {path} is closed on a server of a run" in reply.json()["error"]["message"]
        assert server.engine.asleep == 0


async def test_rules_hold_below_a_root_path_too() -> None:
    async with serving() as server:
        server.root.append("/policy")
        assert (await server.post("/policy/sleep")).status_code == 403
        assert (await server.post("/policy/update_weight_version")).status_code == 409


async def test_i6_a_stranger_gets_no_pause_under_a_lease() -> None:
    async with serving() as server:
        await server.get("/slipstream/state", headers={"slipstream-run": "a-1"})
        for headers in ({"slipstream-owner": "me"}, {"slipstream-owner": "me", "slipstream-run": "b-2"}):
            assert (await server.post("/pause", headers=headers)).status_code in (403, 409)
            lease = {"owner": "me", "seconds": 9}
            assert (await server.post("/slipstream/lease", json=lease, headers=headers)).status_code in (403, 409)
        assert not server.engine.paused
        assert server.condition.lease_owner is None


async def test_i6_a_persons_resume_ends_the_lease_of_all_but_the_owning_run() -> None:
    async with serving() as server:
        stranger = {"slipstream-owner": "me", "slipstream-run": "b-2"}
        assert (await server.post("/pause", headers=stranger)).status_code == 200
        assert (await server.post("/resume")).status_code == 409, "b-2 is the owner as long as it calls"
        server.condition.owner.heard_at -= engine_state.SILENT_S
        assert (await server.post("/resume")).status_code == 200
        assert not server.engine.paused
        assert server.condition.pause_owner == "none"
        # And the next run's learner needs no such help.
        server.condition.owner.heard_at += engine_state.SILENT_S
        await server.post("/pause", headers=stranger)
        await server.post("/slipstream/goodbye", json={"run": "b-2"})
        assert (await server.post("/pause", headers=OURS)).status_code == 200
        assert (await server.post("/resume", headers=OURS)).status_code == 200


async def test_a_model_left_half_loaded_never_generates_and_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_rules.grant_pause, "__defaults__", (0.1,))
    monkeypatch.setattr("slipstream.weight_sync.vllm.engine_state.TELL_S", 0.01)
    async with serving() as server:
        server.engine.vllm_config.weight_transfer_config.backend = "in place"
        await server.post("/pause", headers=OURS)
        await server.post("/start_weight_update")
        assert (await server.post("/resume")).status_code == 409
        assert server.engine.paused
        await until(lambda: server.engine.ended == ["ended"])
        assert server.engine.paused
        assert (await server.post("/inference/v1/generate")).status_code == 503


async def test_a_persons_pause_stands_through_a_publication_in_place() -> None:
    async with serving() as server:
        server.engine.vllm_config.weight_transfer_config.backend = "in place"
        await server.post("/pause")
        await server.post("/pause", headers=OURS)
        await server.post("/start_weight_update")
        await server.post("/finish_weight_update")
        assert (await server.post("/resume", headers=OURS)).status_code == 423
        assert server.engine.paused
        assert (await server.get("/slipstream/state")).json()["pause_owner"] == "person"
        assert (await server.post("/resume")).status_code == 200
        assert not server.engine.paused


@pytest.mark.parametrize("path", ["/finish_weight_update", "/update_weight_version"])
async def test_weights_of_a_staged_transport_are_labelled_by_the_swap_alone(path: str) -> None:
    async with serving() as server:
        reply = await server.post(path, json={"weight_version": "9"})
        assert reply.status_code == 409
        assert "/slipstream/swap" in reply.text


async def test_i8_a_body_on_our_routes_is_bounded() -> None:
    async with serving() as server:
        assert (await server.post("/slipstream/staged", content=b"x" * (17 << 20))).status_code == 413
        assert (await server.post("/slipstream/staged", content=b"[1]")).status_code == 400
        assert (await server.post("/slipstream/nothing", json={})).status_code == 404
