"""The fake's engine: sampling by script, pausing, the weight-update life cycle and the version label."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.kit.fake_vllm.policies import Policy

BASE_WEIGHTS = "default"


class EngineError(Exception):
    """A call that vLLM's engine would refuse: HTTP 500."""


def logprob_of(token: int, position: int) -> float:
    """The log-prob that the fake gives a token: never 0, and different at every place."""
    return -(1 + token % 7) / 8 - position / 1024


def _empty(token_ids: list[int], index: int) -> list[int]:
    raise EngineError("the fake was given no policy")


@dataclass
class Sample:
    """`version`: label of the weights that sampled it; None for the engine's when the answer is written."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: str | None = None


@dataclass
class FakeEngine:
    """Keeps what vLLM's engine keeps. `hooks` are called with the body of the control route of that name;
    `aborted_after`: the tokens that a continuation has when it is aborted."""

    policy: Policy = _empty
    stop_token_ids: list[int] = field(default_factory=list)
    max_model_len: int = 4096
    max_num_seqs: int = 64
    latency_s: Callable[[int], float] | float = 0.0
    weight_version: str = BASE_WEIGHTS
    probe_logprob: Callable[[int, int], float] = logprob_of
    # What the further engines of a data-parallel server answer in its place.
    other_engines: list[Callable[[int, int], float]] = field(default_factory=list)
    wrong_layers: list[str] = field(default_factory=list)
    unread_layers: list[str] = field(default_factory=list)
    hooks: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    transfer_ready: bool = False
    updating: bool = False
    running: int = 0
    generated_tokens: int = 0
    aborted_after: int = 0
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    whole: bool = True
    alive: bool = True
    silence: str = "the engine does not answer"
    pause_owner: str = "none"
    stuck: str | None = None
    step_s: float = 0.0
    staged: dict[str, Any] = field(default_factory=lambda: {"stage": "ready", "error": None, "seconds": {}})

    def __post_init__(self) -> None:
        self._go_on = asyncio.Event()
        self._go_on.set()

    @property
    def engines(self) -> int:
        return 1 + len(self.other_engines)

    @property
    def paused(self) -> bool:
        return not self._go_on.is_set()

    def pause(self, owner: str = "person") -> None:
        self._go_on.clear()
        self.pause_owner = owner

    def resume(self) -> None:
        self._go_on.set()
        self.pause_owner = "none"

    def state(self) -> dict[str, Any]:
        """The answer of `/slipstream/state`: of a hanging engine, what the API process knows alone."""
        silent = None if self.alive else self.silence
        return {
            "boot": f"api-{self.boot}" if self.alive else "api",
            "label": self.weight_version if self.alive else "",
            "paused": self.paused or not self.alive,
            "whole": self.whole,
            "alive": self.alive,
            "pause_owner": self.pause_owner,
            "workers": 1,
            "transport": "gloo",
            "reason": silent if self.whole else "the model is half loaded",
            "step_s": self.step_s,
            "generated": self.generated_tokens,
            "stuck": self.stuck or ("nobody holds its pause" if self.paused and self.pause_owner == "none" else None),
        }

    def swap(self, label: str) -> None:
        """Next to a person's pause too: it stands."""
        self.finish_update(label)

    async def until_resumed(self) -> None:
        await self._go_on.wait()

    async def sample(
        self, token_ids: list[int], index: int, max_tokens: int, stops: list[int], aborted: asyncio.Event
    ) -> Sample:
        """One continuation. Waits while paused, as vLLM queues requests, and for the latency of this index; an abort
        ends the wait."""
        self.running += 1
        try:
            latency = self.latency_s(index) if callable(self.latency_s) else self.latency_s
            if latency or self.paused:
                await _first(self._until_sampled(latency), aborted.wait())
        finally:
            self.running -= 1
        if aborted.is_set():
            max_tokens = self.aborted_after
        sampled = self.policy(token_ids, index)
        ends = {*stops, *self.stop_token_ids}
        stop = next((place + 1 for place, token in enumerate(sampled) if token in ends), None)
        length = min(max_tokens, len(sampled) if stop is None else stop)
        sampled = sampled[:length]
        self.generated_tokens += length
        logprobs = [logprob_of(token, place) for place, token in enumerate(sampled)]
        if aborted.is_set():
            return Sample(sampled, logprobs, "abort")
        return Sample(sampled, logprobs, "stop" if stop == length else "length")

    async def _until_sampled(self, latency: float) -> None:
        await asyncio.sleep(latency)
        await self.until_resumed()

    def init_transfer(self) -> None:
        self.transfer_ready = True

    def shutdown_transfer(self) -> None:
        if self.updating:
            raise EngineError("Cannot shut down weight transfer while a weight update is active")
        self.transfer_ready = False

    def start_update(self) -> None:
        self._require_transfer()
        if self.updating:
            raise EngineError("A weight update is already active")
        self.updating = True

    def update(self) -> None:
        self._require_transfer()
        if not self.updating:
            raise EngineError("No weight update is active; call start_weight_update first")

    def drop_update(self) -> None:
        """Does what vLLM does with an update whose `/update_weights` fails."""
        self.updating = False

    def finish_update(self, version: str | None) -> None:
        self.update()
        self.updating = False
        if version is not None:
            self.weight_version = version

    def restart(self) -> None:
        """As a new process: base weights, no transfer engine, not paused."""
        self.weight_version = BASE_WEIGHTS
        self.transfer_ready = self.updating = False
        self.whole = True
        self.boot = secrets.token_hex(4)
        self.resume()

    def _require_transfer(self) -> None:
        if not self.transfer_ready:
            raise EngineError("Weight transfer engine is not initialized")


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one is done, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
