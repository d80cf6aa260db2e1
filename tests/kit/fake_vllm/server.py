"""The fake's HTTP side: vLLM's routes, status codes and error bodies, and the faults."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from aiohttp import web

from slipstream.protocol import access
from slipstream.protocol.versions import HEADER, label_in
from slipstream.weight_sync.vllm import engine_state
from slipstream.weight_sync.vllm.engine_state import RouteError
from slipstream.weight_sync.vllm.guard import CLOSED, HEALTH, OPEN_ROUTES, roles_for
from tests.kit.fake_vllm import replies
from tests.kit.fake_vllm.adapters import FakeAdapters
from tests.kit.fake_vllm.engine import EngineError, FakeEngine, Sample
from tests.kit.fake_vllm.faults import Fault, Faults

FAULT = web.RequestKey("fault", Fault)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeVllm:
    """A server with `engine` behind it. `requests` holds the generate requests' bodies, `traceparents` their header of
    that name, `calls` every route asked."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        dev_mode: bool = True,
        scale_out: bool = True,
        token: str | None = None,
        version: str = "0.32.0",
        says: dict[str, Any] | None = None,
        adapters: FakeAdapters | None = None,
    ) -> None:
        """`says`: what `/server_info` holds of the model in place of what suits a run; `adapters`: of a server that
        takes them."""
        self.engine = engine or FakeEngine()
        self._version = version
        self.says = says or {}
        self.faults = Faults()
        self.requests: list[dict[str, Any]] = []
        self.traceparents: list[str | None] = []
        self.calls: list[str] = []
        self.adapters = adapters
        self.owner = engine_state.Owner()
        self._scale_out = scale_out
        self._ring = access.AccessTokens(token) if token else None
        self._aborts: dict[str, asyncio.Event] = {}
        self._connections: set[asyncio.BaseTransport] = set()
        self.app = web.Application(middlewares=[self._middleware], client_max_size=1 << 30)
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._tell_version),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/v1/completions", self._completions),
                web.post("/_fault", self._add_fault),
                web.delete("/_fault", self._clear_faults),
            ]
        )
        if adapters is not None:
            self.app.add_routes(adapters.routes(self._log_probs, self._refused))
        if dev_mode:
            self.app.add_routes(
                [
                    web.post("/pause", self._pause),
                    web.post("/resume", self._resume),
                    web.get("/is_paused", self._is_paused),
                    web.post("/init_weight_transfer_engine", self._init_transfer),
                    web.post("/shutdown_weight_transfer_engine", self._shutdown_transfer),
                    web.post("/start_weight_update", self._start_update),
                    web.post("/update_weights", self._update_weights),
                    web.post("/finish_weight_update", self._finish_update),
                    web.post("/update_weight_version", self._update_version),
                    web.get("/weight_info", self._weight_info),
                    web.get("/get_world_size", self._world_size),
                    web.get("/server_info", self._server_info),
                    web.get("/slipstream/state", self._state),
                    web.get("/slipstream/facts", self._facts),
                    web.post("/slipstream/drop_update", self._drop_update),
                    web.post("/slipstream/staged", self._staged),
                    web.post("/slipstream/swap", self._swap),
                    web.post("/slipstream/goodbye", self._goodbye),
                    web.post("/slipstream/lease", self._lease),
                    web.post("/slipstream/score", self._score),
                    web.post("/slipstream/layers", self._layers),
                ]
            )

    def crash(self) -> None:
        """Break every connection, and each new one as soon as it asks for a sample."""
        self.faults.append(Fault("drop", times=None))
        for transport in self._connections:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.transport is not None:
            self._connections.add(request.transport)
        if self._ring is not None and request.path != HEALTH and (denied := self._denied(self._ring, request)):
            return _refusal(denied.status, f"Unauthorized: {denied.message}", "Unauthorized")
        try:
            engine_state.check_owner(self.owner, {"path": request.path, "headers": _raw(request)})
        except RouteError as error:
            return _refusal(error.status, error.message, "Conflict")
        if not request.path.startswith(("/slipstream/", "/_")) and request.path not in OPEN_ROUTES:
            return _refusal(403, f"{request.method} {request.path} {CLOSED}", "Forbidden")
        fault = self.faults.take(request.path)
        if fault is not None:
            request[FAULT] = fault
            if fault.kind == "hang":
                await asyncio.Event().wait()
            while fault.kind == "stop" and fault in self.faults:  # noqa: ASYNC110 (tests clear a list)
                await asyncio.sleep(0.01)
            if fault.kind == "slow":
                await asyncio.sleep(fault.seconds)
            if fault.kind == "status":
                return _refusal(fault.status, "a fault was asked for", "InternalServerError")
            if fault.kind == "drop":
                return _cut(request)
        try:
            return await handler(request)
        except EngineError as error:
            return _refusal(500, str(error), "InternalServerError")
        except web.HTTPException as error:
            return _refusal(error.status, error.reason, error.reason)

    def _denied(self, ring: access.AccessTokens, request: web.Request) -> access.AccessDenied | None:
        """As the guard does."""
        given = request.headers.get("Authorization", "").encode()
        return ring.denied(given, roles_for(request.path), f"{request.method} {request.path}", "server")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """With the name of the adapter that serves, whatever the answer."""
        response = await self._generated(request)
        if not response.prepared:
            response.headers.update(self._served())
        return response

    def _served(self) -> dict[str, str]:
        return {HEADER: self.adapters.served} if self.adapters is not None and self.adapters.served else {}

    async def _generated(self, request: web.Request) -> web.StreamResponse:
        if not self._scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return _refusal(403, message, "PermissionDeniedError")
        body = await request.json()
        if not {"token_ids", "sampling_params"} <= body.keys():
            return _refusal(400, "body.token_ids: Field required", "Bad Request", "body.token_ids")
        self.requests.append(body)
        self.traceparents.append(request.headers.get("traceparent"))
        prompt, params = body["token_ids"], body["sampling_params"]
        if self.adapters is not None and (refusal := self.adapters.refuses(request, body.get("model", "policy"))):
            return _refusal(409, refusal, "Conflict")
        if problem := self._problem(body):
            return problem
        if params.get("prompt_logprobs") is not None:
            await self.engine.until_resumed()
            engine = int(request.headers.get("X-data-parallel-rank", "0"))
            return web.json_response(replies.answer("probe", [], len(prompt), self.scored(prompt, engine)))
        n, limit = params.get("n", 1), min(params["max_tokens"], self.engine.max_model_len - len(prompt))
        stops = params.get("stop_token_ids") or []
        aborted = self._aborts[f"generate-tokens-{body['request_id']}"] = asyncio.Event()
        tasks = [asyncio.create_task(self._finished(prompt, index, limit, stops, aborted)) for index in range(n)]
        try:
            if body.get("stream"):
                return await self._stream(request, body, tasks)
            fault = request.get(FAULT)
            samples = await asyncio.gather(*tasks)
            version = self.engine.weight_version
            masks = params.get("logprobs", 0) > 0
            choices = [
                replies.choice(sample, index, sample.version or version, fault, masks) for index, sample in samples
            ]
            if fault and fault.kind == "die":
                return _cut(request)
            return web.json_response(replies.answer(body["request_id"], choices, len(prompt)))
        finally:
            del self._aborts[f"generate-tokens-{body['request_id']}"]
            for task in tasks:
                task.cancel()

    async def _abort(self, request: web.Request) -> web.Response:
        """Ids that are not running are no error."""
        for name in (await request.json())["request_ids"]:
            if name in self._aborts:
                self._aborts[name].set()
        return web.Response()

    def _problem(self, body: dict[str, Any]) -> web.Response | None:
        size, n = len(body["token_ids"]), body["sampling_params"].get("n", 1)
        model = body.get("model", "policy")
        if model != "policy" and not (self.adapters is not None and self.adapters.knows(model)):
            message = f"The model `{body['model']}` does not exist. Valid aliases: policy."
            return _refusal(404, message, "NotFoundError", "model")
        if n > self.engine.max_num_seqs:
            message = f"sampling_params.n must be at most the server's max_num_seqs ({self.engine.max_num_seqs})"
            return _refusal(400, message, "BadRequestError")
        if size + body["sampling_params"]["max_tokens"] > self.engine.max_model_len:
            message = f"This model's maximum context length is {self.engine.max_model_len} tokens."
            return _refusal(400, message, "BadRequestError", "input_tokens")
        return None

    async def _finished(
        self, prompt: list[int], index: int, limit: int, stops: list[int], aborted: asyncio.Event
    ) -> tuple[int, Sample]:
        return index, await self.engine.sample(prompt, index, limit, stops, aborted)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], tasks: list[asyncio.Task[tuple[int, Sample]]]
    ) -> web.StreamResponse:
        """Each choice as it is finished."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self._served()})
        await response.prepare(request)
        fault = request.get(FAULT)
        interval = body["sampling_params"].get("stream_interval") or 1
        for sent, finished in enumerate(asyncio.as_completed(tasks)):
            index, sample = await finished
            if fault and fault.kind == "die" and sent == fault.after:
                return _cut(request)
            if fault and fault.kind == "stream_error" and sent == fault.after:
                await response.write(replies.event(replies.error(fault.status, "the engine died", "GenerationError")))
                break
            masks = body["sampling_params"].get("logprobs", 0) > 0
            whole = replies.choice(sample, index, sample.version or self.engine.weight_version, fault, masks)
            for event in replies.chunks(body["request_id"], whole, interval):
                await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]
        if body.get("prompt_logprobs") is None and body.get("return_token_ids"):
            stops = body.get("stop_token_ids") or []
            sample = await self.engine.sample(prompt, 0, body["max_tokens"], stops, asyncio.Event())
            return web.json_response(replies.completion(prompt, None, sample))
        scored = self.scored(prompt) if body.get("prompt_logprobs") is not None else None
        return web.json_response(replies.completion(prompt, scored))

    def scored(self, prompt: list[int], engine: int = 0) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of an answer: nothing for the first token."""
        return [None] + [
            {str(token): {"logprob": logprob, "rank": 1, "decoded_token": ""}}
            for token, logprob in zip(prompt[1:], self._log_probs(prompt, engine), strict=True)
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self.engine
        return web.Response(
            text=f'vllm:num_requests_running{{model_name="policy"}} {engine.running}\n'
            f'vllm:generation_tokens_total{{model_name="policy"}} {engine.generated_tokens}\n'
        )

    async def _pause(self, request: web.Request) -> web.Response:
        if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
            return web.json_response({"error": "Invalid mode"}, status=400)
        await self._hook("pause", dict(request.query))
        if not (self.engine.paused and self.engine.pause_owner == "person"):
            self.engine.pause("publication" if "slipstream-owner" in request.headers else "person")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        if "slipstream-owner" in request.headers and self.engine.paused and self.engine.pause_owner == "person":
            return _refusal(423, "a person paused this server", "SlipstreamError")
        await self._hook("resume", None)
        self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.engine.paused})

    async def _init_transfer(self, request: web.Request) -> web.Response:
        await self._hook("init_weight_transfer_engine", await _embedded(request, "init_info"))
        self.engine.init_transfer()
        return web.json_response({"message": "Weight transfer initialized"})

    async def _shutdown_transfer(self, request: web.Request) -> web.Response:
        self.engine.shutdown_transfer()
        return web.json_response({"message": "Weight transfer shut down"})

    async def _start_update(self, request: web.Request) -> web.Response:
        self.engine.start_update()
        await self._hook("start_weight_update", None)
        return web.json_response({"message": "Weight update started"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        info = await _embedded(request, "update_info")
        self.engine.update()
        if not info:
            self.engine.drop_update()
            raise EngineError("Invalid update_info for the engine")
        await self._hook("update_weights", info)
        return web.json_response({"message": "Weights updated"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        await self._hook("finish_weight_update", body)
        self.engine.finish_update(body.get("weight_version"))
        return web.json_response({"message": "Weight update finished"})

    async def _update_version(self, request: web.Request) -> web.Response:
        self.engine.weight_version = await _embedded(request, "new_version")
        return web.json_response({"success": True, "new_version": self.engine.weight_version})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.weight_version})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def _server_info(self, request: web.Request) -> web.Response:
        model = self._said()
        config = {"model_config": model, "weight_transfer_config": {"backend": "gloo"}}
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    def _said(self) -> dict[str, Any]:
        return {
            "dtype": "torch.float32",
            "max_model_len": self.engine.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "served_model_name": "policy",
            **self.says,
        }

    async def _facts(self, request: web.Request) -> web.Response:
        said = self._said()
        return web.json_response(
            {
                "served_name": said["served_model_name"],
                "logprobs_mode": said["logprobs_mode"],
                "dtype": said["dtype"].removeprefix("torch."),
                "max_model_len": said["max_model_len"],
                "transport": "gloo",
                "scale_out": self._scale_out,
                "quantization": said.get("quantization"),
                "engines": self.engine.engines,
            }
        )

    async def _drop_update(self, request: web.Request) -> web.Response:
        dropped = self.engine.updating
        self.engine.drop_update()
        return web.json_response({"dropped": dropped})

    async def _state(self, request: web.Request) -> web.Response:
        state = self.engine.state()
        if self.adapters is not None and self.adapters.served:
            state["label"] = str(label_in(self.adapters.served))
        now = time.monotonic()
        state |= {"owner": self.owner.live(now), "owner_silent_s": self.owner.silent_s(now)}
        return web.json_response(state, status=503 if state["reason"] else 200)

    async def _goodbye(self, request: web.Request) -> web.Response:
        self.owner.leaves((await request.json())["run"])
        return web.json_response({})

    async def _staged(self, request: web.Request) -> web.Response:
        await self._hook("staged", await request.json())
        return web.json_response(self.engine.staged)

    async def _swap(self, request: web.Request) -> web.Response:
        """Generation stands still while the hook runs."""
        body = await request.json()
        paused = self.engine.paused
        if not paused:
            self.engine.pause("publication")
        try:
            await self._hook("swap", body)
            self.engine.swap(body["label"])
        finally:
            if not paused:
                self.engine.resume()
        return web.json_response({"pause_s": 0.001, "exchange_s": 0.0005})

    async def _lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._hook("lease", body)
        return web.json_response(body)

    async def _score(self, request: web.Request) -> web.Response:
        sequences = (await request.json())["token_ids"]
        return web.json_response(
            {"engines": [[self._log_probs(ids, engine) for ids in sequences] for engine in range(self.engine.engines)]}
        )

    def _log_probs(self, token_ids: list[int], engine: int = 0) -> list[float]:
        of = [self.engine.probe_logprob, *self.engine.other_engines][engine]
        return [of(token, place) for place, token in enumerate(token_ids[1:], start=1)]

    def _refused(self, status: int, message: str) -> web.Response:
        return _refusal(status, message, "SlipstreamError")

    async def _layers(self, request: web.Request) -> web.Response:
        await self._hook("layers", await request.json())
        return web.json_response({"checked": 8, "wrong": self.engine.wrong_layers, "unread": self.engine.unread_layers})

    async def _hook(self, name: str, body: Any) -> None:
        if hook := self.engine.hooks.get(name):
            result = hook(body)
            if inspect.isawaitable(result):
                await result

    async def _add_fault(self, request: web.Request) -> web.Response:
        self.faults.append(Fault(**await request.json()))
        return web.json_response([asdict(fault) for fault in self.faults])

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self.faults.clear()
        return web.json_response([])


@asynccontextmanager
async def serving(fake: FakeVllm, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `fake` on this event loop; gives its URL."""
    # vLLM's keep-alive; requests that hang are cut off at the end.
    runner = web.AppRunner(fake.app, keepalive_timeout=5.0, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _embedded(request: web.Request, key: str) -> Any:
    """The value of a body that FastAPI would take with `Body(embed=True)`: the key is required."""
    body = await request.json() if request.can_read_body else {}
    if key not in body:
        raise web.HTTPBadRequest(reason=f"body.{key}: Field required")
    return body[key]


def _refusal(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    return web.json_response(replies.error(status, message, kind, param), status=status)


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _raw(request: web.Request) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
