"""Publishes adapters during generation.

`--enable-lora --middleware slipstream.weight_sync.vllm.adapters.Adapters` adds these routes:

    GET  /slipstream/adapters                             what is loaded, which one serves
    PUT  /slipstream/adapters/NAME?start=N&blake3=HEX     a chunk of the file, from byte N
    POST /slipstream/adapters/NAME/load                   {"config": str, "blake3": hex}
    POST /slipstream/adapters/NAME/score                  {"token_ids": [[int]]} -> {"engines": [[[float]]]}
    POST /slipstream/adapters/NAME/layers                 {} -> {"checked": int, "wrong": [str], "unread": [str]}
    POST /slipstream/adapters/NAME/serve                  {}

vLLM's own `/v1/load_lora_adapter` stays off, as it would load any path for anyone. Each answer to a request for tokens
names the newest proven adapter in the header `slipstream-adapter`, so that workers ask for it from then on. Once there
is one, a request for the base is refused (409): none of its tokens could be trained on (I5).
"""

from __future__ import annotations

import atexit
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.protocol.engine import AdapterReceived, LayerFindings, Scores
from slipstream.protocol.versions import HEADER
from slipstream.weight_sync.vllm import engine_state
from slipstream.weight_sync.vllm.adapter_store import AdapterStore
from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import RouteError, status_of
from slipstream.weight_sync.vllm.engines import ask_workers
from slipstream.weight_sync.vllm.loaded_adapters import LoadedAdapters
from slipstream.weight_sync.vllm.middleware import body_of, bytes_of, problem, respond
from slipstream.weight_sync.vllm.routes import given_logprobs, given_token_ids, read

ROOT = "/slipstream/adapters"
GENERATE = "/inference/v1/generate"

# Routes that change the base under all adapters.
OF_THE_BASE = frozenset({"/slipstream/swap", "/start_weight_update"})


async def score(loaded: LoadedAdapters, name: str, body: dict[str, Any]) -> Scores:
    """Score `{"token_ids": [[int]]}` under a loaded adapter, whether it serves or not.

    Raises:
        RouteError: 501 if the workers cannot do it, 409 if the adapter is not loaded.
    """
    which = _which(loaded, name)
    token_ids = given_token_ids(loaded.engine, body)
    return given_logprobs(await ask_workers(loaded.engine, "slipstream_score", token_ids, which))


async def layers(loaded: LoadedAdapters, name: str) -> LayerFindings:
    """Compare the layers of a loaded adapter with its file. Raises `RouteError`."""
    begun = await ask_workers(loaded.engine, "slipstream_read_adapter", _which(loaded, name))
    return await read(loaded.engine, begun)


def _which(loaded: LoadedAdapters, name: str) -> tuple[str, int, str]:
    """Return name, number and folder of an adapter. Raises `RouteError` 409 if it is not loaded."""
    adapter = loaded.adapter(name)
    if adapter is None:
        raise RouteError(409, f"the adapter {name} is not loaded")
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path


class Adapters:
    """ASGI middleware outside of `Slipstream` and inside of `RequireToken`. Other requests pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loaded: LoadedAdapters | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state if scope["type"] == "http" and "app" in scope else None
        engine = getattr(state, "engine_client", None)
        if engine is None:
            await self._app(scope, receive, send)
            return
        try:  # another run's learner must change nothing here
            engine_state.check_owner(status_of(engine).owner, scope)
        except RouteError as error:
            await problem(error.status, error.message)(scope, receive, send)
            return
        if scope["path"] == ROOT or scope["path"].startswith(f"{ROOT}/"):
            await respond(_answered(self._adapters_of(engine, state), scope, receive), scope, receive, send)
        elif scope["path"] == GENERATE and self._loaded is not None and self._loaded.served is not None:
            await self._generate(self._loaded.served, scope, receive, send)
        elif scope["path"] in OF_THE_BASE and self._loaded is not None:
            await self._loaded.clear()
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _adapters_of(self, engine: EngineClient, state: Any) -> LoadedAdapters:
        if self._loaded is None:
            store = AdapterStore()
            atexit.register(store.remove)
            self._loaded = LoadedAdapters(engine, state.openai_serving_models, store)
        return self._loaded

    async def _generate(self, served: str, scope: Scope, receive: Receive, send: Send) -> None:
        own = (HEADER.encode(), served.encode())
        if not any(name == own[0] for name, _ in scope["headers"]):
            refusal = problem(409, f"this server serves adapters; ask for the model {served}, with a header {HEADER}")
            refusal.headers[HEADER] = served
            await refusal(scope, receive, send)
            return

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        await self._app(scope, receive, naming)


async def _answered(loaded: LoadedAdapters, scope: Scope, receive: Receive) -> msgspec.Struct:
    """Call the route. Raises `RouteError`."""
    name, _, verb = scope["path"].removeprefix(ROOT).removeprefix("/").partition("/")
    match scope["method"], bool(name), verb:
        case "GET", False, "":
            return loaded.state()
        case "PUT", True, "":
            start, digest = _place(scope)
            return AdapterReceived(loaded.store.append(name, start, await bytes_of(receive), digest))
        case "POST", True, "load":
            body = await body_of(receive)
            return await loaded.load(name, _text(body, "config"), _text(body, "blake3"))
        case "POST", True, "score":
            return await score(loaded, name, await body_of(receive))
        case "POST", True, "layers":
            return await layers(loaded, name)
        case "POST", True, "serve":
            return await loaded.serve(name)
    raise RouteError(404, f"{scope['method']} {scope['path']} is not a route of Slipstream")


def _place(scope: Scope) -> tuple[int, str]:
    given = parse_qs(scope["query_string"].decode("ascii", "replace"))
    start, digest = given.get("start", [""])[0], given.get("blake3", [""])[0]
    if not (start.isascii() and start.isdigit() and len(start) <= 18):
        raise RouteError(400, f"start = {start[:40]!r}: must be the chunk's first byte")
    return int(start), digest


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str):
        raise RouteError(400, f"{field}: must be a text")
    return value
