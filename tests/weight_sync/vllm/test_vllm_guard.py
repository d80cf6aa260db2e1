"""The token on vLLM's routes (I8), and who sends it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from slipstream.deploy.servers import vllm_server
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import Server
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import TurnRequest
from slipstream.rollout_worker.inference.failures import ServerUnfit
from slipstream.weight_sync.vllm.guard import RequireToken
from tests.kit import config
from tests.kit.fake_vllm import FakeEngine, FakeVllm, serving


async def served(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})
    else:
        await send({"type": "served"})


def ask(path: str, authorization: str | None = None, kind: str = "http", root: str = "") -> list[dict[str, Any]]:
    """Return what a new guard sends for a request."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode(errors="surrogateescape"))]
    scope = {"type": kind, "path": path, "headers": headers, "method": "POST", "root_path": root}
    asyncio.run(RequireToken(served)(scope, None, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("path", ["/update_weights", "/pause", "/v1/models", "/metrics", "/health/x", "//health"])
@pytest.mark.parametrize(
    "given", [None, "", "s3cret", "Bearer ", "Bearer s3cre", "Bearer s3crets", "bearer s3cret", "Bearer \udcff"]
)
def test_i8_a_request_without_the_token_is_refused(
    path: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "s3cret")
    start, body = ask(path, given)
    assert start["status"] == 401
    assert (b"content-type", b"application/json") in start["headers"]
    assert b"SLIPSTREAM_TOKEN" in body["body"]
    assert b"s3cret" not in body["body"]


def test_i8_the_token_opens_every_route_and_the_health_probe_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert ask("/update_weights", "Bearer secret")[0]["status"] == 200
    assert ask("/health")[0]["status"] == 200


ROUTES = {
    "/inference/v1/generate": "worker learner",
    "/inference/v1/abort_requests": "worker learner",
    "/v1/models": "worker learner",
    "/v1/completions": "worker learner",
    "/tokenize": "worker learner",
    "/v1/load_lora_adapter": "learner",
    "/v1/unload_lora_adapter": "learner",
    "/metrics": "worker learner viewer",
    "/version": "worker learner viewer",
    "/server_info": "learner",
    "/weight_info": "learner",
    "/pause": "learner",
    "/resume": "learner",
    "/init_weight_transfer_engine": "learner",
    "/update_weights": "learner",
    "/collective_rpc": "learner",
    "/slipstream/state": "learner",
    "/slipstream/swap": "learner",
    "/v1": "learner",
    "//v1/models": "learner",
    "/metrics/x": "learner",
    "/nowhere": "learner",
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("role", access.ROLES)
def test_i8_a_role_s_token_opens_its_routes_alone(
    path: str, role: access.Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    held = access.derive_token("secret", role)
    start, body = ask(path, f"Bearer {held}")
    needed = ROUTES[path].split()
    assert start["status"] == (200 if role in needed else 403)
    if role not in needed:
        assert f"needs the token of a {needed[0]}, and this is a {role}'s".encode() in body["body"]
        assert held.encode() not in body["body"]


def test_i8_a_root_path_opens_no_other_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vLLM's --root-path /v1, which the router takes away before it looks."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    held = access.derive_token("secret", "worker")
    assert ask("/v1/pause", f"Bearer {held}", root="/v1")[0]["status"] == 403
    assert ask("/v1/health", root="/v1")[0]["status"] == 200


def test_i8_a_server_that_has_a_role_s_token_only_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", access.derive_token("secret", "worker"))
    with pytest.raises(access.TokenError, match="needs the run's secret"):
        RequireToken(served)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs the run's secret"):
        vllm_server.run(config(), 0)


def test_i8_staged_weights_are_asked_for_with_the_transfer_s_secret_and_nothing_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert ask("/slipstream/chunks/0123456789abcdef")[0]["status"] == 200
    for path in ("/slipstream/chunks", "/slipstream/swap", "/slipstream/state", "/x/slipstream/chunks/0"):
        assert ask(path)[0]["status"] == 401


def test_i8_a_websocket_without_the_token_is_closed_before_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert ask("/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask("/v1/realtime", "Bearer secret", kind="websocket") == [{"type": "served"}]


def test_the_application_starts_and_stops_through_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequireToken(served)({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "served"}]


def test_without_a_token_in_the_environment_everything_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    assert ask("/update_weights")[0]["status"] == 200


def middlewares(line: list[str]) -> list[str]:
    return [value for flag, value in pairwise(line) if flag == "--middleware"]


def test_i8_the_launched_server_is_guarded_and_its_command_line_never_shows_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    ours = "slipstream.weight_sync.vllm.middleware.Slipstream"
    assert middlewares(vllm_server.command(config(), 0)) == [ours]
    guarded = config(queue={"token": "s3cret"})
    line = vllm_server.command(guarded, 0)
    # vLLM asks the last first.
    assert middlewares(line) == [ours, "slipstream.weight_sync.vllm.guard.RequireToken"]
    assert not any("s3cret" in argument for argument in line)
    assert vllm_server.environment(guarded)["SLIPSTREAM_TOKEN"] == "s3cret"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "from-environment")
    assert vllm_server.environment(guarded)["SLIPSTREAM_TOKEN"] == "from-environment"


async def test_i8_the_worker_sends_the_token() -> None:
    fake = FakeVllm(FakeEngine(policy=lambda ids, index: [5, 2], stop_token_ids=[2]), token="secret")
    request = TurnRequest("r", [1, 2], 8, config().rollout, [2], "run")
    async with serving(fake) as url:
        async with InferenceClient(5, token="secret") as client:
            assert [choice.token_ids async for choice in client.generate(Server("a", url), request)]
        async with InferenceClient(5) as client:
            with pytest.raises(ServerUnfit, match="Unauthorized"):
                [choice async for choice in client.generate(Server("a", url), request)]
