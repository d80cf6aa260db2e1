"""The proof of each version on one server: what its log-probs and its layers say (I5).

The server's own log-probs of the probe, from before the swap, are what v is told apart from: they are v-1's in the
server's arithmetic, exactly, and cost the learner nothing.

Where a server's log-probs come from: its workers, beside generation; else a request of vLLM's own kind.

In the workers no slot and no cache is taken and nobody waits: the cost hangs on the probe, not on the load. What vLLM's
workers cannot compute that way (latent attention, state-space layers, parallel pipelines) is asked for as a request,
which waits behind episodes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weight_sync.server.cancellation import gather_two
from weight_sync.server.control import ControlError
from weight_sync.server.proof_rule import Baseline, Evidence, Floats, judge
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# 404, 405: a server without our routes; 501: our route cannot compute it for this model.
CANNOT = frozenset({404, 405, 501})


class Scoring(Protocol):
    """What the proof needs of `ServerControl`."""

    url: str

    async def score(self, sequences: list[list[int]]) -> list[Floats]: ...

    async def score_by_request(self, token_ids: list[int]) -> Floats: ...


class Scorer:
    """The log-probs of one server. What it cannot do is found out, and said, once."""

    def __init__(self) -> None:
        self._by_request = False

    async def __call__(self, control: Scoring, token_ids: list[int]) -> Floats:
        """float32 [T-1] of `token_ids` [T], by the weights that now serve. Raises `ControlError`."""
        if not self._by_request:
            try:
                return (await control.score([token_ids]))[0]
            except ControlError as error:
                if error.status not in CANNOT:
                    raise
                self._by_request = True
                logger.info(
                    "%s cannot score beside generation, so its proofs wait behind episodes: %s", control.url, error
                )
        return await control.score_by_request(token_ids)


# Of layers that are wrong, so many are named.
NAMED = 4


class ProofFailed(RuntimeError):
    """The server computes with other weights than were sent."""


class ProofTarget(Scoring, Protocol):
    """What the proof asks a server: `ServerControl`."""

    async def layers(self, body: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ProofFigures:
    """Nats: `max_abs_diff`, the largest difference in log-prob between server and learner; `difference`, the median
    one; `moved`, the median between the learner's version and what the server held before, None where nobody asked.
    `told_apart`: whether log-probs alone would have shown a swap that was left out. `layers`: how many were compared to
    what arrived, None where the server's layers cannot be read. `seconds`: of it all."""

    max_abs_diff: float
    difference: float
    moved: float | None
    told_apart: bool
    layers: int | None
    seconds: float


@dataclass(frozen=True)
class _Before:
    """What the server gave for the probe of `version`, before that was swapped in; words: of what was proven then."""

    version: int
    logprobs: Floats
    words: torch.Tensor | None


class ServerProof:
    """One server's proofs; it outlives connections and restarts of the server.

    `await look(...)` before each transfer and `await prove(...)` after the swap.
    """

    def __init__(self, tolerance: float, dtype: str, rounds_more: bool = False) -> None:
        """`tolerance`: the largest `max_abs_diff` that proves a version, in nats; `dtype`: the type that the server
        computes in; `rounds_more`: whether it rounds what it is sent, so that a small change may vanish there."""
        self._tolerance = tolerance
        self._dtype = dtype
        self._rounds_more = rounds_more
        self._usual = Baseline(dtype, tolerance)
        self._scorer = Scorer()
        self._before: _Before | None = None
        self._proven: torch.Tensor | None = None
        self._layers_unreadable = self._unread_told = False

    async def look(self, control: ProofTarget, snapshot: Snapshot, known: bool) -> None:
        """Before the swap: what the server gives for the probe of `snapshot`. `known`: whether it holds what was last
        proven on it. A second attempt keeps the first one's answer: it stays true that v-1 gives it.

        Raises `ControlError`.
        """
        if self._before is not None and self._before.version == snapshot.version and self._before.words is not None:
            return
        served = await self._scorer(control, snapshot.probe.token_ids)
        self._before = _Before(snapshot.version, served, self._proven if known else None)

    async def prove(self, control: ProofTarget, snapshot: Snapshot) -> ProofFigures:
        """After the swap. Raises `ProofFailed`, which says why, and `ControlError`."""
        began = time.monotonic()
        # Each waits for the step that the engine is in: at once, for the same one.
        layers, served = await gather_two(
            self._layers(control, snapshot), self._scorer(control, snapshot.probe.token_ids)
        )
        before = self._before if self._before is not None and self._before.version == snapshot.version else None
        evidence = Evidence(
            learner=snapshot.probe.logprobs,
            served=served,
            before=before.logprobs if before else None,
            changed=self._changed(before, snapshot),
        )
        judgement = judge(evidence, self._tolerance, self._usual)
        if judgement.fault is not None:
            raise ProofFailed(f"{control.url}: after version {snapshot.version} {judgement.fault}{self._remedy()}")
        self._usual.learn(judgement.difference)
        self._proven = snapshot.words
        return ProofFigures(
            max_abs_diff=judgement.max_abs_diff,
            difference=judgement.difference,
            moved=judgement.moved,
            told_apart=judgement.told_apart,
            layers=layers,
            seconds=time.monotonic() - began,
        )

    def _changed(self, before: _Before | None, snapshot: Snapshot) -> int | None:
        if before is None or before.words is None or self._rounds_more:
            return None
        if before.words.shape != snapshot.words.shape:
            return None
        return int((before.words != snapshot.words).sum())

    async def _layers(self, control: ProofTarget, snapshot: Snapshot) -> int | None:
        """How many of the live layers hold what arrived. Raises `ProofFailed` if one does not."""
        if self._layers_unreadable:
            return None
        try:
            found = await control.layers({"label": snapshot.label})
        except ControlError as error:
            if error.status not in CANNOT:
                raise
            self._layers_unreadable = True
            logger.info("%s cannot say what its layers hold, so log-probs alone prove them: %s", control.url, error)
            return None
        if not isinstance(found.get("wrong"), list) or not isinstance(found.get("checked"), int):
            raise ControlError(f"{control.url}/slipstream/layers: the answer {found!r:.200} does not name layers")
        wrong = [str(name) for name in found["wrong"]]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise ProofFailed(
                f"{control.url}: after version {snapshot.version} these layers do not hold what arrived: "
                f"{', '.join(wrong[:NAMED])}{more}; the fault is the server's: start it again"
            )
        self._tell_unread(control.url, found.get("unread"))
        checked: int = found["checked"]
        return checked

    def _tell_unread(self, url: str, unread: Any) -> None:
        """Once a server: it is of its build, not of a version."""
        if self._unread_told or not isinstance(unread, list) or not unread:
            return
        self._unread_told = True
        more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
        logger.info(
            "%s: of these layers it cannot be read what they hold, so their products and log-probs alone prove them: "
            "%s%s",
            *(url, ", ".join(str(name) for name in unread[:NAMED]), more),
        )

    def _remedy(self) -> str:
        quantised = " quantised" if self._rounds_more else ""
        return (
            f" (weight_sync.probe_tolerance allows {self._tolerance:g} with this{quantised} {self._dtype} server): "
            f"look at the server's log and start it again; where it rounds more than it says, raise "
            f"weight_sync.probe_tolerance"
        )
