"""One turn, sampled: the choice of server, the classes of error and their retries, aborted turns taken up again.

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
from typing import Any

from protocol.messages import Server
from rollout_worker.inference.client import SERVED_MODEL_NAME, InferenceClient
from rollout_worker.inference.errors import BadSample, EpisodeFailed, Rejected, ServerFailed, UnknownWeights
from rollout_worker.inference.pool import ServerPool
from rollout_worker.inference.router import Affinity
from rollout_worker.inference.wire import Choice, GenerateRequest, Sampled, SamplingParams, sampled_of

_BACKOFF_S, _BACKOFF_MAX_S = 0.5, 10.0
# Larger than any turn: a choice then comes in two parts, its first token and the rest.
_ONE_CHUNK = 1 << 30

PendingChoice = asyncio.Future[Choice]


@dataclass(frozen=True)
class SamplerSettings:
    """`max_choices`: continuations that a server accepts in one request, its max_num_seqs."""

    run_name: str
    temperature: float
    stop_token_ids: list[int]
    attempts: int = 4
    max_choices: int = 64
    stream_first_turn: bool = True


@dataclass(frozen=True)
class FirstTurn:
    """A group's first turn, under way: `pending[i]` gets affinity i's choice, or the error in its place. `fills` is the
    work that has to run meanwhile."""

    pending: list[PendingChoice]
    fills: list[Coroutine[Any, Any, None]]


class Sampler:
    """Samples turns from a fleet. `retries` counts the requests that were made again."""

    def __init__(
        self,
        client: InferenceClient,
        fleet: ServerPool,
        settings: SamplerSettings,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.pool = fleet
        self.retries = 0
        self._client = client
        self._settings = settings
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._names = (f"{self._rng.getrandbits(48):x}-{number}" for number in itertools.count())

    def first_turn(self, affinities: Sequence[Affinity], prompt: list[int], max_tokens: int) -> FirstTurn:
        """One request for the first turn of all affinities, or as few as the servers' limit allows."""
        loop = asyncio.get_running_loop()
        pending: list[PendingChoice] = [loop.create_future() for _ in affinities]
        step = self._settings.max_choices
        fills = [
            self._fill(pending[start : start + step], affinities[start : start + step], prompt, max_tokens)
            for start in range(0, len(affinities), step)
        ]
        return FirstTurn(pending, fills)

    async def sample(
        self, affinity: Affinity, prompt: list[int], max_tokens: int, pending: PendingChoice | None = None
    ) -> Sampled:
        """A turn of at most `max_tokens` after `prompt`; `pending`, if given, is its first attempt.

        A turn that the server aborts is taken up again after the tokens so far, which keep their versions.
        Raises `EpisodeFailed`.
        """
        turn = Sampled()
        failures = 0
        while True:
            try:
                part = await self._attempt(affinity, prompt + turn.token_ids, max_tokens - len(turn.token_ids), pending)
            except Rejected as error:
                raise EpisodeFailed("rejected", str(error), retryable=False) from error
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
            if failures >= self._settings.attempts:
                raise EpisodeFailed("server", f"{failures} attempts, the last: {why}", retryable=True)
            await self._move(affinity, failures)

    async def _attempt(
        self, affinity: Affinity, token_ids: list[int], max_tokens: int, pending: PendingChoice | None
    ) -> Sampled:
        """One request, or the one that is under way already, and its answer checked."""
        choice = await pending if pending is not None else await self._one(affinity, token_ids, max_tokens)
        name = affinity.server or ""
        try:
            sampled = sampled_of(choice)
        except UnknownWeights as error:
            await self.pool.distrust(name, error.label)
            raise
        if sampled.spans:
            self.pool.saw_version(name, sampled.spans[-1].version)
        return sampled

    async def _one(self, affinity: Affinity, token_ids: list[int], max_tokens: int) -> Choice:
        server = await self.pool.place([affinity])
        request = self._request(server, token_ids, max_tokens, n=1, stream=False)
        async with aclosing(self._client.generate(server.url, request)) as choices:
            async for choice in choices:
                return choice
        raise ServerFailed(f"{server.url}: the answer holds no choice")

    async def _fill(
        self, pending: Sequence[PendingChoice], affinities: Sequence[Affinity], prompt: list[int], limit: int
    ) -> None:
        """Sample one continuation of `prompt` for each pending."""
        error: Exception
        try:
            server = await self.pool.place(affinities)
            request = self._request(server, prompt, limit, n=len(pending), stream=self._settings.stream_first_turn)
            async with aclosing(self._client.generate(server.url, request)) as choices:
                async for choice in choices:
                    if choice.index < len(pending) and not pending[choice.index].done():
                        pending[choice.index].set_result(choice)
            error = ServerFailed(f"{server.url}: the answer ended before every continuation was finished")
        except (Rejected, ServerFailed, BadSample) as caught:
            error = caught
        for waiting in pending:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # an episode that is over by now will not look at it

    def _request(self, server: Server, token_ids: list[int], max_tokens: int, n: int, stream: bool) -> GenerateRequest:
        settings = self._settings
        return GenerateRequest(
            model=SERVED_MODEL_NAME,
            request_id=next(self._names),
            token_ids=token_ids,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=settings.temperature,
                stop_token_ids=settings.stop_token_ids,
                n=n,
                stream_interval=_ONE_CHUNK if stream else None,
            ),
            cache_salt=f"{settings.run_name}:{server.version}",
            stream=stream,
        )

    async def _move(self, affinity: Affinity, failures: int) -> None:
        """Go to another server; where there is none, give this one time."""
        failed = affinity.server
        if (await self.pool.place([affinity], avoid=failed)).name == failed:
            longest = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** (failures - 1))
            await self._sleep(longest * (0.5 + self._rng.random() / 2))
