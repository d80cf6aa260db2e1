"""Asks vLLM's generate route over HTTP: kept connections, typed decoding, server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from slipstream.protocol import reasons, tracing
from slipstream.protocol.codec import error_message
from slipstream.protocol.messages import Server
from slipstream.protocol.versions import HEADER, SERVED_MODEL_NAME, label_in, version_of
from slipstream.rollout_worker.inference.engine import Continuation, Engine, Known, Sampled, TurnRequest
from slipstream.rollout_worker.inference.failures import BadSample, ServerFailed, UnknownWeights, error_of
from slipstream.rollout_worker.inference.wire import (
    Asked,
    GenerateRequest,
    Reply,
    SampledChoice,
    join,
    request_of,
    sampled_of,
)

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"

# vLLM closes idle connections after 5 s. Closing them earlier here means that few break in use.
_KEEPALIVE_S = 3.0
# Seconds for a connection attempt, fewer than for a request: a machine that is gone never answers.
_CONNECT_S = 10.0
_ABORT_S = 5.0
# Attempts of one request: a server names another adapter whenever one was published between two attempts.
_NAMES_TRIED = 4

# Prefix that vLLM puts before the ids of requests to this route.
_ID_AT_VLLM = "generate-tokens-"

_decoder = msgspec.json.Decoder(Reply)


class InferenceClient(Engine):
    """Asks vLLM servers for tokens. Use it as a context manager, on one event loop.

    Args:
        timeout_s: Seconds for a whole request.
        token: Bearer token of the servers.
    """

    def __init__(self, timeout_s: float, token: str | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        # The adapter that each server named last, by URL.
        self._adapters: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def forget(self, url: str) -> None:
        """Forget the adapter that this server named: it is not of this run."""
        self._adapters.pop(url, None)

    async def generate(self, server: Server, request: TurnRequest) -> AsyncGenerator[Continuation, None]:
        model = self._adapters.get(server.url, SERVED_MODEL_NAME)
        wire = request_of(request, model, server.version if model == SERVED_MODEL_NAME else model)
        async with aclosing(self._choices(server, wire)) as choices:
            async for choice in choices:
                yield _Answered(self, server, request, wire, choice)

    async def _choices(self, server: Server, request: GenerateRequest) -> AsyncGenerator[SampledChoice, None]:
        """Yield finished choices. Afterwards `request.model` names the adapter that sampled them, if the server serves
        adapters."""
        async with self._sampling(server.url, request, server.name) as response:
            if not request.stream:
                for choice in _decode(await response.read()).choices:
                    yield choice
                return
            events = EventSplitter()
            unfinished: dict[int, SampledChoice] = {}
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    for part in _decode(event).choices:
                        whole = join(unfinished.pop(part.index), part) if part.index in unfinished else part
                        if whole.finish_reason is None:
                            unfinished[whole.index] = whole
                        else:
                            yield whole

    @asynccontextmanager
    async def _sampling(self, url: str, request: GenerateRequest, server: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request and yield the answer. Send it again if the server names another adapter."""
        for _ in range(_NAMES_TRIED):
            headers = {HEADER: request.model} if request.model != SERVED_MODEL_NAME else {}
            async with self._post(url + GENERATE, msgspec.json.encode(request), self._timeout, headers) as response:
                named = response.headers.get(HEADER)
                if named is not None and version_of(named) is not None:
                    self._adapters[url] = named
                if response.status == 200:
                    yield response
                    return
                lost = response.status == 404 and headers
                if response.status not in (404, 409) or (named is None and not lost):
                    raise error_of(response.status, error_message(await response.read()))
                if named is None:
                    # The server was restarted, and has the weights that it was started with.
                    self._adapters.pop(url, None)
                    raise UnknownWeights(f"{request.model}, which it does not have", server)
                if named == request.model:
                    raise error_of(response.status, error_message(await response.read()))
                request.model = named
        raise ServerFailed(f"{url}: it named {_NAMES_TRIED} adapters, and served none of them")

    async def abort(self, url: str, request_ids: Sequence[str]) -> None:
        body = msgspec.json.encode({"request_ids": [_ID_AT_VLLM + name for name in request_ids]})
        async with self._post(url + ABORT, body, aiohttp.ClientTimeout(total=_ABORT_S)) as response:
            if response.status != 200:
                raise error_of(response.status, error_message(await response.read()))

    @asynccontextmanager
    async def _post(
        self, url: str, body: bytes, timeout: aiohttp.ClientTimeout, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("use the client as a context manager: async with InferenceClient(...) as client")
        headers = {**(headers or {}), **tracing.headers()}
        try:
            try:
                response = await self._session.post(url, data=body, timeout=timeout, headers=headers)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                # The server has just closed a kept connection: sampling is safe to repeat, so ask once more.
                response = await self._session.post(url, data=body, timeout=timeout, headers=headers)
            async with response:
                yield response
        except aiohttp.ConnectionTimeoutError:
            raise ServerFailed(f"{url}: no connection within {timeout.sock_connect or timeout.total:g} s") from None
        except TimeoutError:
            raise ServerFailed(f"{url}: no answer within {timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailed(f"{url}: {_in_words(error)}") from error


@dataclass(frozen=True, slots=True)
class _Answered:
    """A finished choice, with what was asked of which server: a `Continuation`."""

    client: InferenceClient
    server: Server
    turn: TurnRequest
    request: GenerateRequest
    choice: SampledChoice

    @property
    def index(self) -> int:
        return self.choice.index

    @property
    def token_ids(self) -> list[int]:
        return self.choice.token_ids or []

    def checked(self, known: Known) -> Sampled:
        turn, request = self.turn, self.request
        asked = Asked(
            turn.max_tokens,
            turn.stop_token_ids,
            known.newest_version,
            label_in(request.model),
            known.run_id,
            None if turn.experts_from is None else (turn.experts_from, len(turn.token_ids)),
            mask=request.sampling_params.logprobs > 0,
        )
        try:
            return sampled_of(self.choice, self.server.name, asked)
        except BadSample as error:
            error.server = self.server
            raise
        except UnknownWeights:
            self.client.forget(self.server.url)
            raise


def _in_words(error: aiohttp.ClientError | OSError) -> str:
    """Say what became of a connection. aiohttp's own texts name its classes and parsers."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"it takes no connection ({error.os_error.strerror or error})"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "it closed the connection before it answered"
        case aiohttp.ClientPayloadError():
            return "it stopped answering: the connection was lost in the middle of an answer"
    return str(error) or type(error).__name__


class EventSplitter:
    """Splits a byte stream into server-sent events. aiohttp's own line reader limits the length of a line."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes, without the closing `[DONE]`."""
        self._buffer += data
        events = []
        start = 0
        while (end := self._buffer.find(b"\n\n", max(start, self._searched - 1))) >= 0:
            event = bytes(self._buffer[start:end])
            start = self._searched = end + 2
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                events.append(event[len(b"data: ") :])
        del self._buffer[:start]
        self._searched = len(self._buffer)
        return events


def _decode(data: bytes) -> Reply:
    try:
        reply = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadSample(reasons.UNREADABLE, f"the answer does not look like vLLM's: {error}") from error
    if reply.error is not None:
        raise error_of(reply.error.code, reply.error.message)
    return reply
