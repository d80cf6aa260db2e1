"""The fake's routes for adapters: those of `weight_sync.vllm.adapters`, with vLLM's refusals, and no disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from blake3 import blake3

from slipstream.protocol.versions import HEADER, version_of

ROOT = "/slipstream/adapters"
KEPT = 3

Score = Callable[[list[int]], list[float]]
Refuse = Callable[[int, str], web.Response]


class FakeAdapters:
    """Holds what a server with `--enable-lora` holds. `refusal`: why vLLM loads nothing; `chunks`: bytes of each chunk;
    `damaged`: chunks that arrive with a bit turned; `events`: what was loaded, scored and served, in order."""

    def __init__(self, max_rank: int = 16) -> None:
        self.enabled = True
        self.refusal: str | None = None
        self.damaged = 0
        self.chunks: list[int] = []
        self.loaded: dict[str, bytes] = {}
        self.served: str | None = None
        self.events: list[tuple[str, str]] = []
        self._arriving: dict[str, bytes] = {}
        self._order: list[str] = []
        self._max_rank = max_rank

    def routes(self, score: Score, refuse: Refuse) -> list[web.RouteDef]:
        """score: log-probs of a sequence's tokens after the first; refuse: vLLM's answer of a status and a message."""

        def answering(handler: Callable[[web.Request], Awaitable[dict[str, Any]]]) -> Any:
            async def answered(request: web.Request) -> web.Response:
                try:
                    return web.json_response(await handler(request))
                except Refused as refusal:
                    return refuse(refusal.status, str(refusal))

            return answered

        async def scored(request: web.Request) -> dict[str, Any]:
            self._event("score", self._name(request))
            return {"engines": [[score(ids) for ids in (await request.json())["token_ids"]]]}

        return [
            web.get(ROOT, answering(self._state)),
            web.put(f"{ROOT}/{{name}}", answering(self._put)),
            web.post(f"{ROOT}/{{name}}/load", answering(self._load)),
            web.post(f"{ROOT}/{{name}}/score", answering(scored)),
            web.post(f"{ROOT}/{{name}}/serve", answering(self._serve)),
        ]

    def refuses(self, request: web.Request, model: str) -> str | None:
        """Why a request for tokens is refused with 409, None if it is not."""
        if self.served is None or HEADER in request.headers:
            return None
        return f"this server serves adapters; ask for the model {self.served}"

    def knows(self, model: str) -> bool:
        return model in self.loaded

    def restart(self) -> None:
        """As a new process: nothing is there."""
        self.served = None
        self.loaded.clear()
        self._arriving.clear()
        self._order.clear()

    async def _state(self, request: web.Request) -> dict[str, Any]:
        return {
            "enabled": self.enabled,
            "max_rank": self._max_rank,
            "served": self.served,
            "loaded": list(self.loaded),
        }

    async def _put(self, request: web.Request) -> dict[str, Any]:
        name, chunk, start = request.match_info["name"], await request.read(), int(request.query["start"])
        if version_of(name) is None:
            raise Refused(400, f"{name!r} is not a name of an adapter")
        if self.damaged:
            self.damaged -= 1
            chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
        there = b"" if start == 0 else self._arriving.get(name, b"")
        if start != len(there):
            raise Refused(409, f"{name}: the chunk begins at byte {start}, and {len(there)} bytes are there")
        if blake3(chunk).hexdigest() != request.query["blake3"]:
            raise Refused(400, f"{name}: the chunk at byte {start} was damaged on its way: its digest is another")
        self._arriving[name] = there + chunk
        self.chunks.append(len(chunk))
        return {"received": len(self._arriving[name])}

    async def _load(self, request: web.Request) -> dict[str, Any]:
        name, body = request.match_info["name"], await request.json()
        if self.refusal is not None:
            raise Refused(422, f"vLLM does not load the adapter {name}: {self.refusal}")
        file = self._arriving.pop(name, b"")
        if blake3(file).update(body["config"].encode()).hexdigest() != body["blake3"]:
            raise Refused(400, f"{name}: what arrived has another digest than what was sent")
        self.loaded[name] = file
        self._event("load", name)
        return {"load_s": 0.0}

    async def _serve(self, request: web.Request) -> dict[str, Any]:
        name = self._name(request)
        self.served = name
        self._order = [*(other for other in self._order if other != name), name][-KEPT:]
        for old in set(self.loaded) - set(self._order):
            del self.loaded[old]
        self._event("serve", name)
        return {"removed": 0}

    def _name(self, request: web.Request) -> str:
        name = request.match_info["name"]
        if name not in self.loaded:
            raise Refused(409, f"the adapter {name} is not loaded")
        return name

    def _event(self, kind: str, name: str) -> None:
        self.events.append((kind, name))


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
