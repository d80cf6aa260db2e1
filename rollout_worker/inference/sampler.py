"""Samples turns: chooses servers, retries by the class of the error, and continues turns that a server aborted.

All episodes of a group share their first prompt, so their first turn is one request with n continuations. It is
streamed by default: an episode continues to its tools while its siblings are still sampling. Later turns are not
streamed, because servers label tokens with their version in the last chunk only, and tokens of a broken stream have no
version.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slipstream.protocol import reasons
from slipstream.protocol.client import retry_pause_s
from slipstream.protocol.config import RunConfig
from slipstream.rollout_worker.inference.engine import (
    AS_THE_RUN,
    Engine,
    Known,
    OwnParams,
    Sampled,
    TurnRequest,
    looks_back,
)
from slipstream.rollout_worker.inference.experts import known_until
from slipstream.rollout_worker.inference.failures import (
    BadSample,
    Doubtful,
    EpisodeFailed,
    RequestRejected,
    ServerFailed,
    ServerLeft,
    UnknownWeights,
)
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.vision.messages import Placed

# The length of a turn is estimated from the last turns, at first from a guess.
_TURNS_REMEMBERED, _FIRST_GUESS = 32, 256.0

PendingChoice = asyncio.Future[Sampled]


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """A group's first turn while it is sampled.

    Attributes:
        pending: `pending[i]` becomes the choice of affinity i, or its error.
        fills: Coroutines that have to run meanwhile.
    """

    pending: list[PendingChoice]
    fills: list[Coroutine[Any, Any, None]]


class Sampler:
    """Samples turns from the pool's servers. `retries`: number of requests after the first of a turn."""

    def __init__(
        self,
        engine: Engine,
        pool: ServerPool,
        config: RunConfig,
        stop_token_ids: list[int],
        stream_first_turn: bool = True,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.pool = pool
        self.retries = 0
        self._engine = engine
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._stream_first_turn = stream_first_turn
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._names = (f"{self._rng.getrandbits(48):x}-{number}" for number in itertools.count())
        self._usual_tokens = _FIRST_GUESS

    def first_turn(
        self,
        affinities: Sequence[Affinity],
        prompt: list[int],
        max_tokens: int,
        own: OwnParams = AS_THE_RUN,
        images: Sequence[Placed] = (),
    ) -> FirstTurn:
        """Begin the first turn of all affinities, in as few requests as the servers' limit allows."""
        loop = asyncio.get_running_loop()
        for affinity in affinities:
            affinity.siblings = affinities[0].siblings
        pending: list[PendingChoice] = [loop.create_future() for _ in affinities]
        step = self._config.vllm.max_num_seqs
        fills = []
        for start in range(0, len(affinities), step):
            part = slice(start, start + step)
            request = self._request(prompt, max_tokens, own, images=images, n=len(pending[part]))
            fills.append(self._fill(pending[part], affinities[part], request))
        return FirstTurn(pending, fills)

    async def sample(
        self,
        affinity: Affinity,
        prompt: list[int],
        max_tokens: int,
        pending: PendingChoice | None = None,
        own: OwnParams = AS_THE_RUN,
        known: int = 0,
        images: Sequence[Placed] = (),
    ) -> Sampled:
        """Sample a turn.

        A turn that a server aborts continues after the tokens so far, which keep their versions and servers, or
        restarts if its sampling looks back at them (`looks_back`). One whose server fails or leaves is sampled again.
        One that a server refuses or spoils is tried once on another server; if that one takes it, the first server is
        blamed.

        Args:
            prompt: Token ids to sample after.
            max_tokens: Maximum number of sampled tokens.
            pending: The first attempt, if it is part of a group's first turn.
            known: The first tokens of the prompt whose experts are known, with `learner.router_replay`.
            images: Images in the prompt.

        Raises:
            EpisodeFailed: No server gave the turn.
        """
        turn = Sampled()
        first: Doubtful | None = None
        failures = 0
        avoid: str | None = None
        while True:
            self.pool.check_proven(affinity)
            token_ids, room = prompt + turn.token_ids, max_tokens - len(turn.token_ids)
            try:
                start = known_until(turn.experts) if turn.experts else known
                request = self._request(token_ids, room, own, start, images, begun=len(turn.token_ids))
                part = await self._attempt(affinity, request, pending, avoid)
            except Doubtful as error:
                name = error.server.name if error.server is not None else affinity.server
                if first is not None or not self.pool.others(name):
                    raise self._given_up(first, error) from error
                first, pending, avoid = error, None, name
                self.retries += 1
                continue
            except ServerLeft:
                pending = None
                self.retries += 1
                continue
            except ServerFailed as error:
                part, why = Sampled(), str(error)
            except UnknownWeights as error:
                await self.pool.distrust(error.server, error.label)
                part, why = Sampled(), str(error)
            else:
                if part.token_ids:
                    if isinstance(first, RequestRejected):
                        self.pool.blame(first)
                    first = None
                turn.extend(part)
                if part.finish_reason != "abort":
                    return turn
                if len(turn.token_ids) >= max_tokens:
                    turn.finish_reason = "length"
                    return turn
                if looks_back(self._config.rollout, own):
                    turn = Sampled()
                why = f"{affinity.server}: the request was aborted"
            pending = None
            self.retries += 1
            if part.token_ids:
                failures = 0
                continue
            failures += 1
            if failures >= self._config.worker.request_attempts:
                raise EpisodeFailed(reasons.SERVER, f"{failures} attempts, the last: {why}", retryable=True)
            avoid = affinity.server
            if self.pool.serving and not self.pool.others(avoid):
                await self._give_time(failures)

    async def _attempt(
        self, affinity: Affinity, request: TurnRequest, pending: PendingChoice | None, avoid: str | None
    ) -> Sampled:
        """Return the turn from the pending request if there is one, else from a new request."""
        if pending is not None:
            sampled = await pending
        else:
            sampled = await self._one(affinity, request, avoid)
        if sampled.spans:
            self.pool.saw_version(sampled.spans[-1].server, sampled.spans[-1].version)
            affinity.sampled.update((span.server, span.version) for span in sampled.spans)
            self._usual_tokens += (len(sampled.token_ids) - self._usual_tokens) / _TURNS_REMEMBERED
        return sampled

    async def _one(self, affinity: Affinity, request: TurnRequest, avoid: str | None) -> Sampled:
        expected = self._expected(request.max_tokens)
        async with self.pool.request([affinity], len(request.token_ids), expected, avoid) as running:
            server = running.server
            running.id = request.id
            async with aclosing(self._engine.generate(server, request)) as choices:
                async for choice in choices:
                    return choice.checked(self._known)
            raise ServerFailed(f"{server.url}: the answer holds no choice")

    async def _fill(
        self, pending: Sequence[PendingChoice], affinities: Sequence[Affinity], request: TurnRequest
    ) -> None:
        """Sample one continuation for each of `pending`, all in one request."""
        try:
            await self._fill_from_one(pending, affinities, request)
        except (Doubtful, ServerFailed, UnknownWeights, EpisodeFailed) as error:
            for waiting in pending:
                if not waiting.done():
                    _fail(waiting, error)

    async def _fill_from_one(
        self, pending: Sequence[PendingChoice], affinities: Sequence[Affinity], request: TurnRequest
    ) -> None:
        """Fill `pending` from one request. Raises if an episode is left without its continuation, or has one that
        cannot be trained on; its siblings keep theirs."""
        spoiled: BadSample | UnknownWeights | None = None
        expected = self._expected(request.max_tokens)
        async with self.pool.request(affinities, len(request.token_ids), expected) as running:
            server = running.server
            running.id = request.id
            async with aclosing(self._engine.generate(server, request)) as choices:
                async for choice in choices:
                    if choice.index >= len(pending) or pending[choice.index].done():
                        continue
                    try:
                        pending[choice.index].set_result(choice.checked(self._known))
                    except (BadSample, UnknownWeights) as error:
                        spoiled = spoiled or error
                        _fail(pending[choice.index], error)
                    self.pool.shed(running, expected)
            if spoiled is not None:
                raise spoiled
            if any(not waiting.done() for waiting in pending):
                raise ServerFailed(f"{server.url}: the answer ended before every continuation was finished")

    @property
    def _known(self) -> Known:
        """What the registry says now, which may have changed since the request."""
        return Known(self.pool.run_id, self.pool.newest_version)

    def _given_up(self, first: Doubtful | None, last: Doubtful) -> EpisodeFailed:
        """Return the failure of an episode whose turn no server gave. A refusal counts as the request's own fault where
        two servers, or the only one, refuse it."""
        description = last.description if first is None else f"{first.description}; {last.description}"
        if isinstance(last, BadSample):
            return EpisodeFailed(last.reason, description, retryable=True)
        if first is None or first.server is None or last.server is None:
            certain = last.server is None or self.pool.lone(last.server.name)
        else:
            certain = isinstance(first, RequestRejected) and first.server.name != last.server.name
        return EpisodeFailed(reasons.REQUEST_REJECTED, description, retryable=not certain)

    def _expected(self, max_tokens: int) -> int:
        """Estimate the number of tokens of a turn of at most `max_tokens`."""
        return min(max_tokens, round(self._usual_tokens))

    def _request(
        self,
        token_ids: list[int],
        max_tokens: int,
        own: OwnParams,
        known: int = 0,
        images: Sequence[Placed] = (),
        begun: int = 0,
        n: int | None = None,
    ) -> TurnRequest:
        """Return a request of an episode's turn, or with `n` of the first turn of so many."""
        return TurnRequest(
            id=next(self._names),
            token_ids=token_ids,
            max_tokens=max_tokens,
            rollout=self._config.rollout,
            stop_token_ids=self._stop_token_ids,
            cache=self.pool.run_id or self._config.run.name,
            n=n or 1,
            stream=n is not None and self._stream_first_turn,
            own=own,
            experts_from=known if self._config.learner.router_replay else None,
            images=images,
            begun=begun,
        )

    async def _give_time(self, failures: int) -> None:
        """Wait before asking the only server again."""
        await self._sleep(retry_pause_s(failures) * (0.5 + self._rng.random() / 2))


def _fail(waiting: PendingChoice, error: Exception) -> None:
    waiting.set_exception(error)
    waiting.exception()  # Retrieve the error here, as an episode that is over never does.
