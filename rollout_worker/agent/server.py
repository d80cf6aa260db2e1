"""Listens for agents' clients: keys, bounds, and the routes of OpenAI's API that are answered.

No body is read before its key is checked, and no body is decompressed. A connection that sends no request, or sends one
too slowly, is closed. An answer whose client has disconnected is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.sections import LOOPBACK
from slipstream.rollout_worker.agent.api.anthropic import AnthropicApi, error_body
from slipstream.rollout_worker.agent.api.base import Api
from slipstream.rollout_worker.agent.api.messages import SERVER, ApiError, over
from slipstream.rollout_worker.agent.session import CHAT, MODEL, Session
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.user_code.values import encodable

logger = logging.getLogger(__name__)
# aiohttp writes a traceback for whatever is no HTTP, with the line at fault, which may hold a key.
_SILENT = logging.Logger(f"{__name__}.http", logging.CRITICAL + 1)

CHATS, COMPLETIONS, RESPONSES, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
POSTED = (CHATS, RESPONSES, MESSAGES, COMPLETIONS)
# Anthropic's clients put /v1 before every route themselves, so that it stands there twice after `endpoint.base_url`.
_TWICE = "/v1"
# Bytes that a body may have: a base, and for each token of a full context, as JSON may write it.
_BODY_BYTES, _BYTES_PER_TOKEN = 1 << 20, 32
# Bodies larger than this wait, unread, while an episode's others have as many bytes as it may hold at once.
_SMALL_BYTES, _HELD_BYTES = 32 << 10, 128 << 20
_MIN_HELD, _MAX_HELD = 4, 64
# Bytes of a body that waits to be read; a connection may hold a few times as many.
_BUFFER_BYTES = 16 << 10
# Characters of an error that the worker may tell.
_SHOWN_CHARACTERS = 300
# Seconds for the first request of a connection, for a body, and between two requests.
_HEADER_S, _BODY_S, _IDLE_S = 30.0, 60.0, 60.0
_LINGER_S, _CLOSE_S = 1.0, 1.0
_MAX_CONNECTIONS = 8192
# Keys of finished episodes are remembered, so that their agents get an error that says so.
_MAX_REMEMBERED = 8192
_KEY = "sk-slipstream-"
# Headers of Anthropic's clients: their key, and the version of their API.
_OWN_KEY, _VERSION = "x-api-key", "anthropic-version"
ANTHROPIC = AnthropicApi()
# The content coding of a body that is not compressed.
_PLAIN = "identity"
# Keeps clients from retrying: the worker has retried already.
_FINAL = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Opened:
    """An episode's session, the secret part of its key, and a place for each large body that it may hold at once."""

    secret: bytes
    session: Session
    places: asyncio.Semaphore


OPENED = web.RequestKey("opened", Opened)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """One listener for all episodes of a worker, to be used as a context manager.

    Args:
        port: 0 takes any free port.
        max_model_len: Tokens of the context, which bound a body.

    Raises:
        ConfigError: On entering, where it cannot listen.
    """

    def __init__(self, host: str, port: int, max_model_len: int) -> None:
        self._host = host
        self._port = port
        self._most_bytes = _BODY_BYTES + _BYTES_PER_TOKEN * max_model_len
        self._url = ""
        # By the public part of a key.
        self._keys: dict[str, Opened] = {}
        self._over: OrderedDict[str, bytes] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        # Connections that have sent no request yet.
        self._new: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard], client_max_size=self._most_bytes)
        app.add_routes(
            [
                web.post(CHATS, partial(self._answer, api=CHAT)),
                web.post(COMPLETIONS, self._complete),
                web.post(RESPONSES, self._answer),
                *(web.post(prefix + MESSAGES, partial(self._answer, api=ANTHROPIC)) for prefix in ("", _TWICE)),
                *(web.post(prefix + COUNT, self._count) for prefix in ("", _TWICE)),
                *(web.get(prefix + MODELS, self._models) for prefix in ("", _TWICE)),
                *(web.get(prefix + MODELS + "/{model}", self._model) for prefix in ("", _TWICE)),
            ]
        )
        self._runner = web.AppRunner(
            app,
            keepalive_timeout=_IDLE_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=_CLOSE_S,
            handler_cancellation=True,
            auto_decompress=False,  # Decompression would run on the loop, even for refused bodies.
            access_log=None,
            logger=_SILENT,
            read_bufsize=_BUFFER_BYTES,
        )
        await self._runner.setup()
        _allow_many_files()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._connected, self._host, self._port, backlog=1024
            )
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"worker.agent_host = {self._host}, worker.agent_port = {self._port}: the agents' endpoint cannot "
                f"listen there ({error}); name an address of this machine, and port 0 for any that is free"
            ) from None
        port = self._listener.sockets[0].getsockname()[1]
        host = await _reached_at(self._host)
        self._url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._keys.values():
            opened.session.end()
        for timer in self._new.values():
            timer.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session) -> Endpoint:
        """Return an endpoint with a key for this session alone."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        held = max(_MIN_HELD, min(_MAX_HELD, _HELD_BYTES // self._most_bytes))
        self._keys[name] = Opened(secret.encode(), session, asyncio.Semaphore(held))
        return Endpoint(self._url, f"{_KEY}{name}-{secret}", MODEL, session.temperature)

    def close(self, endpoint: Endpoint) -> None:
        """End a session: abort its running requests and withdraw its key."""
        name = endpoint.api_key.removeprefix(_KEY).partition("-")[0]
        opened = self._keys.pop(name)
        self._over[name] = opened.secret
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)
        opened.session.end()

    def _connected(self) -> asyncio.BaseProtocol:
        server = self._runner.server if self._runner is not None else None
        assert server is not None, "it listens"
        protocol = server()
        protocol.__class__ = _Connection
        full = len(server.connections) >= _MAX_CONNECTIONS
        self._new[protocol] = asyncio.get_running_loop().call_later(0 if full else _HEADER_S, self._cut, protocol)
        return protocol

    def _cut(self, protocol: Any) -> None:
        del self._new[protocol]
        if protocol.transport is not None:
            protocol.transport.abort()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the key of an episode for every route, and answer errors in the form of the API."""
        if (timer := self._new.pop(request.protocol, None)) is not None:
            timer.cancel()
        is_anthropic = _VERSION in request.headers or request.path.endswith((MESSAGES, COUNT))

        def failed(error: ApiError) -> web.Response:
            if (opened := request.get(OPENED)) is not None:
                opened.session.refused = f"{error.status}: {str(error)[:_SHOWN_CHARACTERS]}"
            return _error_response(error, error_body(error) if is_anthropic else error.body)

        try:
            request[OPENED] = opened = self._opened_by(request.headers)
            await opened.session.pace.turn()
            return await handler(request)
        except ApiError as error:
            return failed(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._most_bytes} bytes, which is more than vllm.max_model_len takes"
            return failed(ApiError(413, text, reasons.TOO_LARGE))
        except web.HTTPException as error:
            text = f"there is no {request.method} {request.path} here; there are {', '.join(POSTED)} and {MODELS}"
            return failed(ApiError(error.status, text, "unknown_url"))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("a request of an agent failed unexpectedly")
            return failed(
                ApiError(500, "the endpoint failed unexpectedly: see the worker's log", "internal", kind=SERVER)
            )

    def _opened_by(self, headers: Mapping[str, str]) -> Opened:
        own = headers.get(_OWN_KEY)
        authorization = headers.get(hdrs.AUTHORIZATION, "") if own is None else f"bearer {own}"
        scheme, _, key = authorization.partition(" ")
        name, _, secret = key.strip().removeprefix(_KEY).partition("-")
        given = secret.encode("utf-8", "replace")
        found = self._keys.get(name)
        if found is not None and scheme.lower() == "bearer" and hmac.compare_digest(found.secret, given):
            return found
        if (expected := self._over.get(name)) is not None and hmac.compare_digest(expected, given):
            raise over()
        text = "this is not the key of an episode: give endpoint.api_key as the client's api_key"
        raise ApiError(401, text, "invalid_api_key")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        async with self._held(request) as given:
            body = await request[OPENED].session.complete(given)
        return web.Response(body=body, content_type="application/json")

    @asynccontextmanager
    async def _held(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read a body, and hold it while its request is answered. Of an episode's large bodies only some are held at
        once; the others wait unread, as those answered first need nothing of them."""
        opened, length = request[OPENED], request.content_length
        if length is not None and length > self._most_bytes:
            raise web.HTTPRequestEntityTooLarge(self._most_bytes, length)
        is_small = length is not None and length <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else opened.places:
            opened.session.check_open()
            yield await self._body(request)

    async def _body(self, request: web.Request) -> bytes:
        coding = request.headers.get(hdrs.CONTENT_ENCODING, _PLAIN)
        if coding.strip().lower() not in ("", _PLAIN):
            text = (
                f"Content-Encoding: {encodable(coding)[:60]}: nothing is unpacked here; send the JSON without a coding"
            )
            raise ApiError(415, text, "unsupported_encoding")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                # Not `request.read`: it keeps the body for as long as the connection stays open.
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > self._most_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._most_bytes, len(body))
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_S:g} s", "timeout") from None
        return bytes(body)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        async with self._held(request) as given:
            return _json({"input_tokens": await request[OPENED].session.count(given, ANTHROPIC)})

    async def _answer(self, request: web.Request, api: Api | None = None) -> web.StreamResponse:
        """Answer in an API that keeps nothing, or as the session's responses."""
        async with self._held(request) as given:
            session = request[OPENED].session
            reply = await session.answer(given, api or session.responses)
            is_streamed = reply.is_streamed
            body = reply.events() if is_streamed else reply.whole()
        if not is_streamed:
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(body)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_policy()], "has_more": False, "first_id": MODEL, "last_id": MODEL})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != MODEL:
            raise ApiError(404, f"the only model here is {MODEL!r}", "model_not_found", ["model"])
        return _json(_policy())


class _Connection(RequestHandler):
    """Answers what is no HTTP request in the form of both APIs, as its path may be unknown; aiohttp would in text."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # raises where an answer has begun
        what = " ".join((message or "the endpoint failed unexpectedly").split())
        return _unreadable(status, what)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # aiohttp refuses it before any handler of ours
            asked = encodable(request.headers.get(hdrs.EXPECT, ""))[:60]
            resp = _unreadable(resp.status, f"Expect: {asked}: only 100-continue is known; leave it out")
        return await super().finish_response(request, resp, start_time)


def _unreadable(status: int, why: str) -> web.Response:
    error = ApiError(status, f"the request cannot be read: {why}", "bad_request")
    answer = _json({**error_body(error), **error.body, "type": "error"}, status, _FINAL)
    answer.force_close()
    return answer


def _policy() -> dict[str, Any]:
    """Return the policy as OpenAI's API describes a model, and as Anthropic's does."""
    openai = {"object": "model", "created": 0, "owned_by": "slipstream"}
    anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return {"id": MODEL, **openai, **anthropic}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _error_response(error: ApiError, body: Mapping[str, Any]) -> web.Response:
    response = _json(body, error.status, _FINAL)
    if error.status in (401, 408, 410, 413, 415, 429):
        response.force_close()  # the rest of the body is not read
    return response


async def _reached_at(host: str) -> str:
    """Return the host that agents reach the listener at: for one on all addresses the machine's name, if it
    resolves."""
    if host not in ("0.0.0.0", "::"):
        return host
    name = socket.gethostname()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_HEADER_S):
            await asyncio.get_running_loop().getaddrinfo(name, None)
        return name
    return LOOPBACK[0]


def _allow_many_files() -> None:
    """Raise the limit of open files: each episode may have connections of its own, at both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
