"""Proves each version on one server, by its log-probs of the probe and by the content of its layers (I5).

The server's own log-probs from before the swap are version v-1's in the server's arithmetic, exactly, so the learner
need not compute them to tell v from v-1.

Log-probs come from the server's workers, during generation: that takes no slot and no cache, nobody waits, and the cost
depends on the probe, not on the load. What the workers cannot compute that way (latent attention, state-space layers,
parallel pipelines) is asked for as a request, which waits behind episodes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from slipstream.weight_sync.server.cancellation import gather_two
from slipstream.weight_sync.server.engine import ControlError, ProofTarget, Scoring
from slipstream.weight_sync.server.proof_rule import Baseline, Evidence, Floats, judge_engines
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

logger = logging.getLogger(__name__)

# 404, 405: a server without our routes; 501: our route cannot compute it for this model.
CANNOT = frozenset({404, 405, 501})

# Maximum number of wrong layers that an error names.
NAMED = 4


class Scorer:
    """Gets log-probs from one server: from its workers, or by request once it turns out that they cannot."""

    def __init__(self) -> None:
        self._by_request = False

    async def __call__(self, control: Scoring, token_ids: list[int]) -> Floats:
        """Return log-probs of `token_ids` [T] by the weights that serve now.

        Returns:
            Float32 [engines, T-1].

        Raises:
            ControlError: A call to the server failed.
        """
        if not self._by_request:
            try:
                return (await control.score([token_ids]))[0]
            except ControlError as error:
                if error.status not in CANNOT:
                    raise
                self._by_request = True
                logger.info(
                    "%s cannot score during generation, so its proofs wait behind episodes: %s", control.url, error
                )
        return await control.score_by_request(token_ids)


class ProofFailed(RuntimeError):
    """The server computes with other weights than were sent."""


@dataclass(frozen=True)
class Swapped:
    """What the proof of a version needs, without its weights: as much of a `Snapshot` as outlives its buffer."""

    version: int
    label: str
    probe: Probe
    words: torch.Tensor

    @classmethod
    def of(cls, snapshot: Snapshot) -> Swapped:
        return cls(snapshot.version, snapshot.label, snapshot.probe, snapshot.words)


@dataclass(frozen=True)
class ProofMetrics:
    """Findings of a proof that holds, over all engines. Differences are of log-probs of the probe, in nats.

    Attributes:
        max_abs_diff: Largest difference between server and learner.
        difference: Median difference between server and learner.
        moved: Median difference between the learner and what the server computed before the swap; None: not asked.
        told_apart: Whether log-probs alone would have shown a swap that was left out.
        layers: Number of tensors compared with those that arrived; None if the server's layers cannot be read.
        seconds: Time that the proof took.
    """

    max_abs_diff: float
    difference: float
    moved: float | None
    told_apart: bool
    layers: int | None
    seconds: float


@dataclass(frozen=True)
class _Earlier:
    """The server's log-probs for the probe of `version` from before that version was swapped in.

    Attributes:
        words: Words sampled from the weights that were proven on it then (`Snapshot.words`), None if unknown.
    """

    version: int
    logprobs: Floats
    words: torch.Tensor | None


class ServerProof:
    """Proves versions on one server: `look` before each swap, `prove` after it. Outlives connections and restarts."""

    def __init__(self, tolerance: float, dtype: str, rounds_more: bool = False) -> None:
        """Prepare to prove versions on one server.

        Args:
            tolerance: What the differences of a proven version stay below, in nats: see `proof_rule`.
            dtype: Type that the server computes in.
            rounds_more: Whether it rounds what it is sent, so that a small change may vanish there.
        """
        self._tolerance = tolerance
        self._dtype = dtype
        self._rounds_more = rounds_more
        self._baseline = Baseline(dtype, tolerance)
        self._scorer = Scorer()
        self._before: _Earlier | None = None
        self._proven: torch.Tensor | None = None
        self._layers_unreadable = self._unread_told = False

    async def look(self, control: ProofTarget, snapshot: Snapshot, known: bool) -> None:
        """Ask the server, before the swap, for its log-probs of the probe of `snapshot`.

        A second attempt keeps the first one's answer, which v-1 gave.

        Args:
            known: Whether the server still holds the weights last proven on it.

        Raises:
            ControlError: A call to the server failed.
        """
        if self._before is not None and self._before.version == snapshot.version and self._before.words is not None:
            return
        served = await self._scorer(control, snapshot.probe.token_ids)
        self._before = _Earlier(snapshot.version, served, self._proven if known else None)

    async def prove(self, control: ProofTarget, snapshot: Snapshot | Swapped) -> ProofMetrics:
        """Prove, after the swap, that the server computes with `snapshot`.

        Raises:
            ProofFailed: It does not; the text says why.
            ControlError: A call to the server failed.
        """
        began = time.monotonic()
        # Each waits for the engine's present step; at once, both wait for the same one.
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
        judgement = judge_engines(evidence, self._tolerance, self._baseline)
        if judgement.fault is not None:
            raise ProofFailed(f"{control.url}: after version {snapshot.version} {judgement.fault}{self._remedy()}")
        self._baseline.learn(judgement.difference)
        self._proven = snapshot.words
        return ProofMetrics(
            max_abs_diff=judgement.max_abs_diff,
            difference=judgement.difference,
            moved=judgement.moved,
            told_apart=judgement.told_apart,
            layers=layers,
            seconds=time.monotonic() - began,
        )

    def _changed(self, before: _Earlier | None, snapshot: Snapshot | Swapped) -> int | None:
        if before is None or before.words is None or self._rounds_more:
            return None
        if before.words.shape != snapshot.words.shape:
            return None
        return int((before.words != snapshot.words).sum())

    async def _layers(self, control: ProofTarget, snapshot: Snapshot | Swapped) -> int | None:
        """Return the number of tensors of the live layers that were compared with those that arrived. Raises
        `ProofFailed`."""
        if self._layers_unreadable:
            return None
        try:
            found = await control.layers(snapshot.label)
        except ControlError as error:
            if error.status not in CANNOT:
                raise
            self._layers_unreadable = True
            logger.info("%s cannot say what its layers hold, so log-probs alone prove them: %s", control.url, error)
            return None
        wrong = found.wrong
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise ProofFailed(
                f"{control.url}: after version {snapshot.version} these layers do not hold what arrived: "
                f"{', '.join(wrong[:NAMED])}{more}; they are sent again by themselves, and where that fails too the "
                f"fault is the server's: start it again"
            )
        self._tell_unread(control.url, found.unread)
        return found.checked

    def _tell_unread(self, url: str, unread: list[str]) -> None:
        """Log unreadable layers, once for each server: they depend on its build, not on a version."""
        if self._unread_told or not unread:
            return
        self._unread_told = True
        more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
        logger.info(
            "%s: of these layers it cannot be read what they hold, so their products and log-probs alone prove them: "
            "%s%s",
            *(url, ", ".join(unread[:NAMED]), more),
        )

    def _remedy(self) -> str:
        quantised = " quantised" if self._rounds_more else ""
        return (
            f" (weight_sync.probe_tolerance allows {self._tolerance:g} with this{quantised} {self._dtype} server): "
            f"it is published to again by itself; where that fails too, look at the server's log and start it again, "
            f"or, where it rounds more than it says, raise weight_sync.probe_tolerance"
        )
