"""vLLM's control routes: what a call says when it fails."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from tests.kit.fake_vllm import FakeVllm, Fault, serving


async def test_an_error_names_server_route_and_cause() -> None:
    fake = FakeVllm()
    fake.faults.append(Fault("status", route="/start_weight_update", status=503))
    async with serving(fake) as url, ServerControl(url, 5) as control:
        with pytest.raises(ControlError, match=f"{url}/start_weight_update: HTTP 503: .*a fault was asked for"):
            await control.start_update()


async def test_a_call_without_an_answer_ends_in_time() -> None:
    fake = FakeVllm()
    fake.faults.append(Fault("hang", route="/pause"))
    async with serving(fake) as url, ServerControl(url, 0.1, run_id=lambda: "run-1") as control:
        with pytest.raises(ControlError, match=rf"{url}/pause.*: no answer within 0\.1 s"):
            await control.pause(clear_cache=False)


async def test_a_server_without_the_rl_routes_is_told_what_it_lacks() -> None:
    async with serving(FakeVllm(dev_mode=False)) as url, ServerControl(url, 5) as control:
        with pytest.raises(
            ControlError, match=f"{url}/weight_info: HTTP 404: .*VLLM_SERVER_DEV_MODE=1.*slipstream vllm"
        ):
            await control.weight_label()


async def test_a_server_without_the_generate_route_is_told_what_it_lacks() -> None:
    async with serving(FakeVllm(scale_out=False)) as url, ServerControl(url, 5) as control:
        with pytest.raises(ControlError, match=r"HTTP 403: .*--enable-scale-out"):
            await control.score_by_request([1, 2])


async def test_i8_the_token_is_sent_and_a_missing_one_is_named() -> None:
    async with serving(FakeVllm(token="secret")) as url:
        async with ServerControl(url, 5, token="secret") as control:
            assert await control.weight_label() == "default"
        async with ServerControl(url, 5) as control:
            with pytest.raises(ControlError, match=r"/weight_info: HTTP 401: .*set SLIPSTREAM_TOKEN"):
                await control.weight_label()


async def test_nobody_at_the_address_is_an_error_with_the_setting_that_bounds_the_wait() -> None:
    async with serving(FakeVllm()) as url:
        pass
    async with ServerControl(url, 5) as control:
        with pytest.raises(
            ControlError, match=rf"{url}: not up after vllm\.start_timeout_s = 0\.2 s \(connection refused\)"
        ):
            await control.wait_until_up(0.2)


async def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **settings: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    async with ServerControl("http://NoSuchHost:8100", 5) as control:
        with pytest.raises(ControlError, match=r"does not answer \(host name nosuchhost is not known\)"):
            await control.weight_label()


async def test_an_answer_of_another_kind_of_server_is_an_error() -> None:
    from aiohttp import web

    answers = ["{", "{}"]

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=answers.pop(0), content_type="application/json")

    fake = FakeVllm(dev_mode=False)
    fake.app.add_routes([web.get("/weight_info", page)])
    async with serving(fake) as url, ServerControl(url, 5) as control:
        with pytest.raises(ControlError, match="/weight_info: Expecting"):
            await control.weight_label()
        with pytest.raises(ControlError, match=r"/weight_info: the answer \{\} holds no weight_version"):
            await control.weight_label()


CALLS: dict[str, Callable[[ServerControl], Awaitable[object]]] = {
    "GET /slipstream/state": lambda control: control.state(),
    "POST /slipstream/staged": lambda control: control.staged(0.0),
    "POST /slipstream/swap": lambda control: control.swap("1", clear_cache=False),
    "POST /slipstream/layers": lambda control: control.layers("1"),
    "POST /slipstream/score": lambda control: control.score([[1, 2]]),
    "GET /slipstream/adapters": lambda control: control.adapters(),
}


@pytest.mark.parametrize(
    "answer", ["null", "[]", "7", '"ok"', "{}", '{"stage": "done", "wrong": 3, "engines": [[["x"]]]}']
)
@pytest.mark.parametrize("route", CALLS)
async def test_i8_an_answer_that_is_no_message_is_one_error_that_quotes_it(route: str, answer: str) -> None:
    from aiohttp import web

    async def foreign(request: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    fake, (method, path) = FakeVllm(dev_mode=False), route.split()
    fake.app.add_routes([web.route(method, path, foreign)])
    async with serving(fake) as url, ServerControl(url, 5) as control:
        with pytest.raises(ControlError, match=rf"{path}: the answer .* is no [A-Z]\w+: ") as error:
            await CALLS[route](control)
    assert error.value.answered


@pytest.mark.parametrize("updating", [False, True])
async def test_what_was_left_open_can_be_ended(updating: bool) -> None:
    fake = FakeVllm()
    async with serving(fake) as url, ServerControl(url, 5) as control:
        await control.init_transfer({})
        if updating:
            await control.start_update()
        for _ in range(2):
            await control.end_transfer()
            assert not fake.engine.transfer_ready
            assert not fake.engine.updating
        # An update that is made to fail fills the server's log with tracebacks.
        assert "/update_weights" not in fake.calls
