"""Calls the control routes of one vLLM server, each with a time-out, which vLLM never sets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np

from slipstream.protocol import client
from slipstream.protocol.codec import DecodeError, error_message
from slipstream.protocol.engine import (
    NO_ANSWER,
    OWNER,
    AdapterLoaded,
    AdapterReceived,
    AdapterServed,
    AdaptersState,
    Done,
    Dropped,
    EngineState,
    LayerFindings,
    Lease,
    Scores,
    ServerFacts,
    Staged,
    Swap,
    parse,
)
from slipstream.protocol.versions import HEADER, RUN_HEADER
from slipstream.weight_sync.server.answers import hint
from slipstream.weight_sync.server.cancellation import gather
from slipstream.weight_sync.server.engine import ControlError, Engine, Floats

M = TypeVar("M", bound=msgspec.Struct)

ROOT = "/slipstream/adapters"
RESUME_ATTEMPTS = 3
RESUME_TIMEOUT_S = 10.0
RESUME_PAUSE_S = 0.5

# A server that does not answer within this time counts as still starting.
LOOK_TIMEOUT_S = 5.0

# A server that answers anything answers this in no time.
HEALTH_TIMEOUT_S = 2.0

# A learner that ends does not wait for a server that hangs.
GOODBYE_TIMEOUT_S = 2.0

# HTTP status of a resume on a server that a person paused: that pause continues.
USER_PAUSE = 423

# Has vLLM generate in the data-parallel engine of this number.
ENGINE_HEADER = "X-data-parallel-rank"


class ServerControl(Engine):
    """The routes of one vLLM server, as methods. Use it as an async context manager."""

    def __init__(
        self, url: str, timeout_s: float, token: str | None = None, run_id: Callable[[], str] = lambda: ""
    ) -> None:
        """Prepare to call a server.

        Args:
            timeout_s: Bound on each call, in seconds.
            token: The token that the server's `slipstream.weight_sync.vllm.guard` asks for, None without one.
            run_id: Returns the id of the calling run, which then owns the server; "" while it is not known.
        """
        self.url = url
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def run_id(self) -> str:
        return self._run_id()

    async def __aenter__(self) -> Self:
        # vLLM closes idle connections and those that had a 500 without notice, so none is used twice.
        self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the engine answers. vLLM takes half a minute to start, more with a large model."""
        last: ControlError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        state = await self.state()
                        if state.alive and not state.reason:
                            return
                        last = ControlError(state.reason or NO_ANSWER)
                    except ControlError as error:
                        last = error
                    await asyncio.sleep(0.5)
        except TimeoutError:
            why = last.unconnected or last if last is not None else NO_ANSWER
            raise ControlError(f"{self.url}: not up after vllm.start_timeout_s = {timeout_s:g} s ({why})") from None

    async def facts(self) -> ServerFacts:
        return await self._answer(ServerFacts, "GET", "/slipstream/facts")

    async def weight_label(self) -> str:
        """Return the label of the weights that serve, "default" after every start."""
        return str(await self._read("/weight_info", "weight_version"))

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def end_transfer(self) -> None:
        # vLLM refuses the second call while an update is open, has no route to drop one, and logs pages of tracebacks
        # for one that is made to fail.
        await self._answer(Dropped, "POST", "/slipstream/drop_update")
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def start_update(self) -> None:
        await self._call("POST", "/start_weight_update")

    async def update(self, update_info: dict[str, Any]) -> None:
        """Pass `update_info` to the workers. vLLM answers when its engine's `update_weights` returns."""
        await self._call("POST", "/update_weights", {"update_info": update_info})

    async def finish_update(self, label: str) -> None:
        """End the update and label the weights that serve from now on."""
        await self._call("POST", "/finish_weight_update", {"weight_version": label})

    async def state(self) -> EngineState:
        return await self._answer(EngineState, "GET", "/slipstream/state", answered=(503,))

    async def explain(self, failed: ControlError | TimeoutError, waited_s: float = LOOK_TIMEOUT_S) -> str:
        """Say why `state` gave none within `waited_s`. Where something else answered, say whether the server answers
        its health probe, which needs no token: what stands between may pass on some routes alone."""
        text = str(failed) or f"{self.url}: no answer within {waited_s:.2g} s"
        if not isinstance(failed, ControlError) or not failed.answered or failed.status in (401, 403):
            return text
        if await self._is_well():
            return f"{text}; it answers GET /health: does a proxy before it pass on /slipstream, whole?"
        return f"{text}; it does not answer GET /health either: is the proxy before it, or its URL, the right one?"

    async def _is_well(self) -> bool:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def goodbye(self) -> None:
        if self.run_id:
            with contextlib.suppress(ControlError):
                await self._answer(
                    Done, "POST", "/slipstream/goodbye", {"run": self.run_id}, timeout_s=GOODBYE_TIMEOUT_S
                )

    async def staged(self, wait_s: float) -> Staged:
        wait = {"wait_s": wait_s}
        return await self._answer(Staged, "POST", "/slipstream/staged", wait, timeout_s=wait_s + self._timeout_s)

    async def swap(self, label: str, clear_cache: bool) -> Swap:
        wanted = {"label": label, "clear_cache": clear_cache}
        return await self._answer(Swap, "POST", "/slipstream/swap", wanted)

    async def lease(self, seconds: float, owner: str = OWNER) -> None:
        await self._answer(Lease, "POST", "/slipstream/lease", {"owner": owner, "seconds": seconds})

    async def score(self, sequences: list[list[int]]) -> list[Floats]:
        return await self._scores("/slipstream/score", sequences)

    async def layers(self, label: str) -> LayerFindings:
        return await self._answer(LayerFindings, "POST", "/slipstream/layers", {"label": label})

    async def adapters(self) -> AdaptersState:
        return await self._answer(AdaptersState, "GET", ROOT)

    async def put_adapter(self, name: str, start: int, chunk: bytes, digest: str) -> None:
        path = f"{ROOT}/{name}?start={start}&blake3={digest}"
        await self._answer(AdapterReceived, "PUT", path, data=chunk)

    async def load_adapter(self, name: str, config: str, digest: str) -> None:
        await self._answer(AdapterLoaded, "POST", f"{ROOT}/{name}/load", {"config": config, "blake3": digest})

    async def serve_adapter(self, name: str) -> None:
        await self._answer(AdapterServed, "POST", f"{ROOT}/{name}/serve", {})

    async def score_adapter(self, name: str, sequences: list[list[int]]) -> list[Floats]:
        return await self._scores(f"{ROOT}/{name}/score", sequences)

    async def adapter_layers(self, name: str) -> LayerFindings:
        return await self._answer(LayerFindings, "POST", f"{ROOT}/{name}/layers", {})

    async def pause(self, clear_cache: bool) -> None:
        path = f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}"
        await self._call("POST", path, headers={"slipstream-owner": OWNER})

    async def resume(self) -> None:
        """Let generation continue. Tries a few times within half a minute, as a paused server is as good as dead."""
        for attempt in range(1, RESUME_ATTEMPTS + 1):
            try:
                await self._call(
                    "POST",
                    "/resume",
                    timeout_s=min(self._timeout_s, RESUME_TIMEOUT_S),
                    headers={"slipstream-owner": OWNER},
                    answered=(USER_PAUSE,),
                )
                return
            except ControlError as error:
                if attempt == RESUME_ATTEMPTS:
                    raise ControlError(f"{error}; after {attempt} attempts the server may still be paused") from error
                await asyncio.sleep(RESUME_PAUSE_S)

    async def score_by_request(self, token_ids: list[int], adapter: str | None = None) -> Floats:
        engines = (await self.facts()).engines or 1
        rows = [self._score_in_engine(token_ids, adapter, place if engines > 1 else None) for place in range(engines)]
        return np.stack(await gather(*rows))

    async def _score_in_engine(self, token_ids: list[int], adapter: str | None, engine: int | None) -> Floats:
        reply = await self._call(
            "POST",
            "/inference/v1/generate",
            ({"model": adapter} if adapter else {})
            | {
                "token_ids": token_ids,
                "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False},
                "output_mode": "tokens",
            },
            headers=({HEADER: adapter} if adapter else {}) | ({} if engine is None else {ENGINE_HEADER: str(engine)}),
        )
        try:
            entries = reply["prompt_logprobs"][1:]
            return np.array(
                [entry[str(token)]["logprob"] for entry, token in zip(entries, token_ids[1:], strict=True)],
                dtype=np.float32,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ControlError(f"{self.url}: the answer to the probe holds no prompt log-probs ({error!r})") from error

    async def _scores(self, path: str, sequences: list[list[int]]) -> list[Floats]:
        scores = await self._answer(Scores, "POST", path, {"token_ids": sequences})
        try:
            # One array of a sequence's rows in all engines.
            rows = [np.array(of, dtype=np.float32) for of in zip(*scores.engines, strict=True)]
            return [row for row, _ in zip(rows, sequences, strict=True)]
        except ValueError as error:
            raise ControlError(f"{self.url}{path}: no log-probs in {scores!r:.200} ({error!r})") from error

    async def _read(self, path: str, field: str) -> Any:
        reply = await self._call("GET", path)
        try:
            return reply[field]
        except (KeyError, TypeError) as error:
            raise ControlError(f"{self.url}{path}: the answer {reply!r:.200} holds no {field}") from error

    async def _answer(
        self,
        kind: type[M],
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        answered: tuple[int, ...] = (),
        data: bytes | None = None,
    ) -> M:
        """Call one of Slipstream's routes, which answers with a message of `protocol.engine`."""
        reply = await self._call(method, path, body, timeout_s, answered=answered, data=data)
        try:
            return parse(kind, reply)
        except DecodeError as error:
            raise ControlError(f"{self.url}{path}: {error}", answered=True) from error

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
        answered: tuple[int, ...] = (),
        data: bytes | None = None,
    ) -> Any:
        """Return the answer's JSON.

        Args:
            answered: Statuses from 400 on that are answers too.
            data: A body that is not JSON.
        """
        if self._session is None:
            raise RuntimeError("use the control as a context manager: async with ServerControl(...) as control")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if run_id := self.run_id:
            headers = {**(headers or {}), RUN_HEADER: run_id}
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                if response.status >= 400 and response.status not in answered:
                    text = error_message(await response.read())
                    raise ControlError(
                        f"{self.url}{path}: HTTP {response.status}: {text}{hint(path, response.status, text)}",
                        response.status,
                    )
                return await response.json()
        except TimeoutError as error:
            raise ControlError(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            why = client.connection_failure(error)
            if not isinstance(error, aiohttp.ClientConnectorDNSError):
                why = why.lower()
            raise ControlError(f"{self.url} does not answer ({why})", unconnected=why) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            spoiled = isinstance(error, ValueError | aiohttp.ContentTypeError | aiohttp.ClientPayloadError)
            raise ControlError(f"{self.url}{path}: {str(error) or type(error).__name__}", answered=spoiled) from error
