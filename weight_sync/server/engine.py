"""The port through which weights are published: what a publication asks of one server, and what it answers.

`control.ServerControl` implements it over HTTP. Nothing else in the publisher knows the server's routes and fields.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.protocol.engine import OWNER, AdaptersState, EngineState, LayerFindings, ServerFacts, Staged, Swap

Floats = npt.NDArray[np.float32]


class ControlError(RuntimeError):
    """A call to a server failed or timed out. The text names server, call and cause.

    Attributes:
        status: The HTTP status, None without an answer.
        unconnected: Why there was no connection, None where there was one.
        answered: Whether there was an answer, which was a refusal or made no sense.
    """

    def __init__(
        self, text: str, status: int | None = None, unconnected: str | None = None, answered: bool = False
    ) -> None:
        super().__init__(text)
        self.status = status
        self.unconnected = unconnected
        self.answered = answered or status is not None


class Scoring(Protocol):
    """Scores sequences under some weights of a server. Every call raises `ControlError` if it fails."""

    url: str

    async def score(self, sequences: list[list[int]]) -> list[Floats]:
        """Return log-probs without a request, during generation.

        Returns:
            Float32 [engines, T-1] for each of `sequences` [T].
        """

    async def score_by_request(self, token_ids: list[int]) -> Floats:
        """Return log-probs float32 [engines, T-1] of `token_ids` [T] by the path that episodes take."""


class ProofTarget(Scoring, Protocol):
    """The target of a proof: the model of a server, or one of its loaded adapters."""

    async def layers(self, label: str) -> LayerFindings:
        """Compare what the layers hold with what arrived for `label`."""


class AdapterEngine(Protocol):
    """The part of a server that takes adapters."""

    async def adapters(self) -> AdaptersState:
        """Return which adapters the server has."""

    async def put_adapter(self, name: str, start: int, chunk: bytes, digest: str) -> None:
        """Send a chunk of an adapter's file, from byte `start`. `digest`: the chunk's BLAKE3 in hex."""

    async def load_adapter(self, name: str, config: str, digest: str) -> None:
        """Load an adapter that has arrived. It serves nobody yet. `digest`: `adapter_digest` of file and `config`."""

    async def serve_adapter(self, name: str) -> None:
        """Make the adapter the one that requests ask for."""

    async def score_adapter(self, name: str, sequences: list[list[int]]) -> list[Floats]:
        """As `Scoring.score`, under a loaded adapter."""

    async def adapter_layers(self, name: str) -> LayerFindings:
        """Compare a loaded adapter in the layers with its file."""


class Engine(AdapterEngine, ProofTarget, Protocol):
    """One server, as a publication sees it. Every call raises `ControlError` if it fails."""

    @property
    def run_id(self) -> str:
        """Id of the calling run, which then owns the server; "" while it is not known."""

    async def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the engine answers."""

    async def facts(self) -> ServerFacts:
        """Return the flags that the server was started with."""

    async def state(self) -> EngineState:
        """Return the server's status, also when it refuses to generate."""

    async def explain(self, failed: ControlError | TimeoutError, waited_s: float = ...) -> str:
        """Say why `state` gave none within `waited_s`."""

    async def goodbye(self) -> None:
        """Leave the server to the next run. A server that does not answer finds out by the learner's silence."""

    async def score_by_request(self, token_ids: list[int], adapter: str | None = None) -> Floats:
        """As `Scoring.score_by_request`.

        Args:
            adapter: Name of a loaded adapter to compute under; None: the weights that serve now.
        """

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Have the workers connect to the learner that `init_info` names."""

    async def end_transfer(self) -> None:
        """End an open update and the workers' connection that a dead learner or a failed publication left.

        The model is not touched. A server with nothing open stays as it is.
        """

    async def start_update(self) -> None:
        """Open an update."""

    async def update(self, update_info: dict[str, Any]) -> None:
        """Pass `update_info` to the workers' end of the transport. Returns when that has taken it."""

    async def finish_update(self, label: str) -> None:
        """End the update of a transport that loads in place, and label the weights that serve from now on."""

    async def staged(self, wait_s: float) -> Staged:
        """Return how far the workers are, once all have ended or `wait_s` seconds are over."""

    async def swap(self, label: str, clear_cache: bool) -> Swap:
        """Exchange the live weights for the staged ones and label them, in one call that needs no second one.

        Args:
            clear_cache: Whether to drop all cached keys and values.
        """

    async def lease(self, seconds: float, owner: str = OWNER) -> None:
        """Renew the pause that `owner` holds: it ends in `seconds` at the earliest."""

    async def pause(self, clear_cache: bool) -> None:
        """Pause generation under a lease that `lease` renews. May be called while it is paused.

        Args:
            clear_cache: Whether to drop all cached keys and values.
        """

    async def resume(self) -> None:
        """Let generation continue, unless a person paused it."""
