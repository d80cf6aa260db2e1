"""Measures how fast a server samples with few and with many requests, by asking it as workers do."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from slipstream.deploy.planning.serving import Curve
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Server
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import Engine, TurnRequest
from slipstream.rollout_worker.inference.failures import Doubtful, ServerFailed

FILE_NAME = "probe.json"

# Seconds until a load is steady, and for which it is measured.
_SETTLE_S, _MEASURE_S = 0.7, 2.5
_TIMEOUT_S = 60.0

# Times of a token that a server can have, seconds.
_MIN_S, _MAX_S = 1e-6, 100.0

# Prompts, new ones and one of which the server has kept all, from which the time of a prompt's token follows.
_PROMPTS, _TIMES = 32, 5


@dataclass(frozen=True)
class Shape:
    """How a run's episodes look to a server.

    Attributes:
        prompt, turn: Mean tokens of a group's prompt, and of a turn.
        turns: Mean number of turns.
    """

    prompt: int
    turn: int
    turns: float


def save(curve: Curve, folder: Path) -> None:
    """Keep a measured curve next to the record of the run that it is for."""
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(curve))


def read(folder: Path) -> Curve | None:
    """Read the curve that was measured for a run; None if none was. Raises `ConfigError` if the file is broken."""
    path = folder / FILE_NAME
    try:
        curve = msgspec.json.decode(path.read_bytes(), type=Curve)
        running = [number for number, _ in curve.points]
        if not running or any(after <= before for before, after in pairwise(running)):
            raise ValueError("its points are not in ascending order")
        if running[0] < 0 or not all(_MIN_S < token_s < _MAX_S for _, token_s in curve.points) or curve.prefill_s < 0:
            raise ValueError("its times are not those of a server")
        if not all(0 < slower < _MAX_S for _, slower in curve.sharing):
            raise ValueError("its times are not those of a server")
        return curve
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; delete it, and measure again with --probe") from None


async def measure(config: RunConfig, url: str, shape: Shape) -> Curve:
    """Measure the server at `url`, which nobody else may ask meanwhile. It takes about half a minute.

    Raises:
        ConfigError: The server does not answer as it should.
    """
    async with _asked(config, [url], shape) as (server,):
        await server.sample(1)  # what is compiled or allocated on first use
        points = [await server.sample(slots) for slots in _loads(config.vllm.max_num_seqs)]
        return Curve(tuple(sorted(points)), await server.prefill_s())


async def measure_sharing(config: RunConfig, urls: Sequence[str], shape: Shape, alone: Curve) -> Curve:
    """Measure servers that share the cores on which one was measured `alone`, all at one time.

    Raises:
        ConfigError: A server does not answer as it should.
    """
    async with _asked(config, urls, shape) as servers:
        await asyncio.gather(*(server.sample(1) for server in servers))
        slots = max(1, config.vllm.max_num_seqs // len(urls))
        found = await asyncio.gather(*(server.sample(slots) for server in servers))
        slower = fmean(token_s / alone.token_s(running) for running, token_s in found)
        return replace(alone, sharing=((len(urls), slower),))


@asynccontextmanager
async def _asked(config: RunConfig, urls: Sequence[str], shape: Shape) -> AsyncIterator[list[_Asking]]:
    try:
        async with InferenceClient(_TIMEOUT_S, config.token) as client:
            yield [_Asking(config, client, url, shape) for url in urls]
    except* (ServerFailed, Doubtful) as errors:
        failed: BaseException = errors
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        raise ConfigError(f"the vLLM server at {', '.join(urls)} does not answer the probe: {failed}") from None


def _loads(most: int) -> list[int]:
    """Return numbers of requests up to the greatest, so many that a curve shows between them."""
    return sorted({1, 4, 16, 32, most // 4, most // 2, most} & set(range(1, most + 1)))


class _Asking:
    """Asks one server."""

    def __init__(self, config: RunConfig, engine: Engine, url: str, shape: Shape) -> None:
        self._config = config
        self._engine = engine
        self._server = Server(url, url)
        self._url = url
        self._shape = shape
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._prompt = self._new_prompt()

    async def sample(self, slots: int) -> tuple[float, float]:
        """Keep `slots` requests running. Returns how many ran on average, and seconds a token of one."""
        load = _Load(slots)
        work = asyncio.create_task(self._keep_up(load))
        done, _ = await asyncio.wait([work], timeout=_SETTLE_S)
        began = load.note()
        if not done:
            done, _ = await asyncio.wait([work], timeout=_MEASURE_S)
        tokens, running_s = load.tokens - began[0], load.note()[1] - began[1]
        work.cancel()
        await asyncio.wait([work])
        for failed in done:
            failed.result()  # raises: the work ends only if it fails
        if not tokens:
            raise ConfigError(f"the vLLM server at {self._url} gave {slots} requests no token in {_MEASURE_S} s")
        return running_s / _MEASURE_S, running_s / tokens

    async def prefill_s(self) -> float:
        """Return the server's seconds for each token of a prompt that it has not kept."""
        seconds = [(await self._all([self._prompt] * _PROMPTS), await self._all(None)) for _ in range(_TIMES)]
        kept, new = (min(of) for of in zip(*seconds, strict=True))
        return float(max(0.0, new - kept) / (_PROMPTS * self._shape.prompt))

    async def _all(self, prompts: list[list[int]] | None) -> float:
        """Return the seconds that prompts take together, new ones by default."""
        prompts = prompts or [self._new_prompt() for _ in range(_PROMPTS)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(self._one(prompt))
        return time.perf_counter() - began

    async def _keep_up(self, load: _Load) -> None:
        """Begin a group whenever there is room for one."""
        size = min(self._config.rollout.group_size, load.slots)
        async with asyncio.TaskGroup() as tasks:
            while True:
                while load.free >= size:
                    load.take(size)
                    tasks.create_task(self._group(size, load))
                await load.freed()

    async def _group(self, size: int, load: _Load) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for tokens in self._turns(self._prompt, self._shape.turn, size, load):
                tasks.create_task(self._later_turns([*self._prompt, *tokens], load))

    async def _later_turns(self, prompt: list[int], load: _Load) -> None:
        left = self._shape.turns - 1
        while self._random.random() < left:
            left -= 1
            async for tokens in self._turns(prompt, self._shape.turn, 1, load):
                prompt = [*prompt, *tokens]
        load.take(-1)

    async def _one(self, prompt: list[int]) -> None:
        async for _ in self._turns(prompt, 1, 1, _Load(1)):
            pass

    async def _turns(self, prompt: list[int], length: int, count: int, load: _Load) -> AsyncIterator[list[int]]:
        """Sample `count` turns after a prompt, in the way of a worker: several are streamed as they end."""
        several = count > 1
        name = f"probe-{next(self._numbers)}"
        rollout = self._config.rollout
        request = TurnRequest(name, prompt, length, rollout, [], "probe", count, stream=several, exact=True)
        async with aclosing(self._engine.generate(self._server, request)) as choices:
            async for choice in choices:
                tokens = choice.token_ids
                load.tokens += len(tokens)
                yield list(tokens)

    def _new_prompt(self) -> list[int]:
        return [self._random.randrange(100) for _ in range(max(1, self._shape.prompt))]


class _Load:
    """Requests that run at once, of at most `slots`, and what came of them."""

    def __init__(self, slots: int) -> None:
        self.slots = self.free = slots
        self.tokens = 0
        self._running_s = 0.0
        self._at = time.perf_counter()
        self._freed = asyncio.Event()

    def take(self, count: int) -> None:
        self.note()
        self.free -= count
        if count < 0:
            self._freed.set()

    async def freed(self) -> None:
        await self._freed.wait()
        self._freed.clear()

    def note(self) -> tuple[int, float]:
        """Count the time until now. Returns the tokens so far, and the integral of running requests over time."""
        now = time.perf_counter()
        self._running_s += (now - self._at) * (self.slots - self.free)
        self._at = now
        return self.tokens, self._running_s
