"""One turn, sampled: the choice of server, the classes of error and their retries, aborted turns continued.

All episodes of a group share their first prompt, so their first turn is one request with n continuations. It is
streamed by default: an episode goes on to its tools while its siblings are still sampling.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol import reasons
from protocol.config import RunConfig
from protocol.messages import Server
from rollout_worker.inference.client import SERVED_MODEL_NAME, InferenceClient
from rollout_worker.inference.errors import BadSample, EpisodeFailed, Rejected, ServerFailed, UnknownWeights
from rollout_worker.inference.pool import Affinity, ServerPool
from rollout_worker.inference.wire import Choice, GenerateRequest, Sampled, sampled_of, sampling_params

_BACKOFF_S, _BACKOFF_MAX_S = 0.5, 10.0
# Larger than any turn: a choice then comes in two parts, its first token and the rest.
_ONE_CHUNK = 1 << 30


class ServedChoice(NamedTuple):
    """A choice, and the name of the server that sampled it."""

    server: str
    choice: Choice


PendingChoice = asyncio.Future[ServedChoice]


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """A group's first turn, on its way: `pending[i]` becomes the choice of affinity i, or its error. `fills` is the
    work that has to run meanwhile."""

    pending: list[PendingChoice]
    fills: list[Coroutine[Any, Any, None]]


class Sampler:
    """Samples turns from the pool's servers. `retries` counts requests after the first of a turn."""

    def __init__(
        self,
        client: InferenceClient,
        pool: ServerPool,
        config: RunConfig,
        stop_token_ids: list[int],
        stream_first_turn: bool = True,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.pool = pool
        self.retries = 0
        self._client = client
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._stream_first_turn = stream_first_turn
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._names = (f"{self._rng.getrandbits(48):x}-{number}" for number in itertools.count())

    def first_turn(self, affinities: Sequence[Affinity], prompt: list[int], max_tokens: int) -> FirstTurn:
        """The first turn of all affinities, in as few requests as the servers' limit allows."""
        loop = asyncio.get_running_loop()
        pending: list[PendingChoice] = [loop.create_future() for _ in affinities]
        step = self._config.vllm.max_num_seqs
        fills = [
            self._fill(pending[start : start + step], affinities[start : start + step], prompt, max_tokens)
            for start in range(0, len(affinities), step)
        ]
        return FirstTurn(pending, fills)

    async def sample(
        self, affinity: Affinity, prompt: list[int], max_tokens: int, pending: PendingChoice | None = None
    ) -> Sampled:
        """A turn of at most `max_tokens` after `prompt`; `pending`, if given, is its first attempt.

        A turn that a server aborts goes on after the tokens so far, which keep their versions and servers.
        Raises `EpisodeFailed`.
        """
        turn = Sampled()
        failures = 0
        while True:
            try:
                part = await self._attempt(affinity, prompt + turn.token_ids, max_tokens - len(turn.token_ids), pending)
            except Rejected as error:
                raise EpisodeFailed(reasons.REQUEST_REJECTED, str(error), retryable=False) from error
            except BadSample as error:
                raise EpisodeFailed(error.reason, str(error), retryable=True) from error
            except (ServerFailed, UnknownWeights) as error:
                part, why = Sampled(), str(error)
            else:
                turn.extend(part)
                if part.finish_reason != "abort":
                    return turn
                if len(turn.token_ids) >= max_tokens:
                    turn.finish_reason = "length"
                    return turn
                why = f"{affinity.server}: the request was aborted"
            pending = None
            self.retries += 1
            if part.token_ids:
                failures = 0
                continue
            failures += 1
            if failures >= self._config.worker.request_attempts:
                raise EpisodeFailed(reasons.SERVER, f"{failures} attempts, the last: {why}", retryable=True)
            await self._move(affinity, failures)

    async def _attempt(
        self, affinity: Affinity, token_ids: list[int], max_tokens: int, pending: PendingChoice | None
    ) -> Sampled:
        """One request, or the pending one, and its answer checked."""
        server, choice = await pending if pending is not None else await self._one(affinity, token_ids, max_tokens)
        try:
            sampled = sampled_of(choice, server)
        except UnknownWeights as error:
            await self.pool.distrust(server, error.label)
            raise
        if sampled.spans:
            self.pool.saw_version(server, sampled.spans[-1].version)
        return sampled

    async def _one(self, affinity: Affinity, token_ids: list[int], max_tokens: int) -> ServedChoice:
        server = await self.pool.place([affinity])
        request = self._request(server, token_ids, max_tokens, n=1, stream=False)
        async with aclosing(self._client.generate(server.url, request)) as choices:
            async for choice in choices:
                return ServedChoice(server.name, choice)
        raise ServerFailed(f"{server.url}: the answer holds no choice")

    async def _fill(
        self, pending: Sequence[PendingChoice], affinities: Sequence[Affinity], prompt: list[int], max_tokens: int
    ) -> None:
        """Sample one continuation of `prompt` for each of `pending`, all in one request."""
        error: Exception
        try:
            server = await self.pool.place(affinities)
            request = self._request(server, prompt, max_tokens, n=len(pending), stream=self._stream_first_turn)
            async with aclosing(self._client.generate(server.url, request)) as choices:
                async for choice in choices:
                    if choice.index < len(pending) and not pending[choice.index].done():
                        pending[choice.index].set_result(ServedChoice(server.name, choice))
            error = ServerFailed(f"{server.url}: the answer ended before every continuation was finished")
        except (Rejected, ServerFailed, BadSample) as caught:
            error = caught
        for waiting in pending:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # an episode that is over by now will not look at it

    def _request(self, server: Server, token_ids: list[int], max_tokens: int, n: int, stream: bool) -> GenerateRequest:
        return GenerateRequest(
            model=SERVED_MODEL_NAME,
            request_id=next(self._names),
            token_ids=token_ids,
            sampling_params=sampling_params(
                self._config, self._stop_token_ids, max_tokens, n, stream_interval=_ONE_CHUNK if stream else None
            ),
            cache_salt=f"{self._config.run.name}:{server.version}",
            stream=stream,
        )

    async def _move(self, affinity: Affinity, failures: int) -> None:
        """Go to another server; if there is none, give this one time."""
        failed = affinity.server
        if (await self.pool.place([affinity], avoid=failed)).name == failed:
            longest = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** (failures - 1))
            await self._sleep(longest * (0.5 + self._rng.random() / 2))
