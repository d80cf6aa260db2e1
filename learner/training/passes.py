"""Runs forward passes without a gradient over all rows of a step, before its first backward pass.

The policy, the policy before the last step and the reference may each score all rows; only those that the algorithm
needs are run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.corrections import ProximalInputs
from slipstream.learner.algorithm.loss_terms import Routing, keep_top_entropy, lowest_kept
from slipstream.learner.algorithm.step_data import Floats, StepRollouts, Tokens
from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.model.logprobs import TokenScores
from slipstream.learner.model.reference import Reference
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team


@dataclass(frozen=True)
class Known:
    """Values of a row's N tokens from before it trains. A field is None where the algorithm does not need it.

    Attributes:
        logprobs: float32 [N], under the policy before the step.
        entropy: float32 [N], likewise.
        reference: float32 [N], log-probs under the reference model.
        previous: float32 [N], log-probs under the policy before the last step.
        routing: Of the row's tokens to experts.
        before: float32 [N], log-probs under the policy before the step's first update; None in that one.
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    routing: Routing | None = None
    before: torch.Tensor | None = None

    def after(self, first: Known) -> Known:
        """Return it with what is known from before the step's first update."""
        return replace(self, reference=first.reference, previous=first.previous, before=first.before)


def survey(policy: torch.nn.Module, rows: Sequence[PackedRow]) -> list[Known]:
    """Score all rows under the policy as it is."""
    known = []
    with torch.no_grad():
        for row in rows:
            scores: TokenScores = policy(row)
            known.append(Known(scores.logprobs, scores.entropy, routing=scores.routing))
    return known


class PreviousWeights:
    """Keeps a copy of the parameters that train as they were before the last optimiser step; buffers are not copied.

    A learner that resumes has none before its first step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy the weights as they are; called right before each optimiser step."""
        if not self._copies:
            self._copies = [torch.empty_like(wrapping.local(parameter.detach())) for parameter in self._parameters]
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.copy_(wrapping.local(parameter.detach()))

    @property
    def known(self) -> bool:
        """Whether there are previous weights."""
        return bool(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the previous weights inside the `with`. Pointers are swapped; nothing is copied unless ranks
        share the weights out."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if isinstance(parameter, DTensor):  # FSDP2 keeps a view of it
                held, copy = parameter.to_local(), self._copies[index]
                before = held.clone()
                held.copy_(copy)
                copy.copy_(before)
            else:
                parameter.data, self._copies[index] = self._copies[index], parameter.data


def with_previous(
    known: Sequence[Known], policy: torch.nn.Module, rows: Sequence[PackedRow], previous: PreviousWeights
) -> list[Known]:
    """Add the log-probs under the policy before the last step, if there was one."""
    if not previous.known:
        return list(known)
    with previous.in_place():
        before = survey(policy, rows)
    return [replace(of, previous=scored.logprobs) for of, scored in zip(known, before, strict=True)]


def consult(reference: Reference, rows: Sequence[PackedRow], known: Sequence[Known]) -> list[Known]:
    """Add the log-probs under the reference model."""
    return [replace(of, reference=reference.logprobs(row)) for row, of in zip(rows, known, strict=True)]


def in_several_rows(rows: Sequence[PackedRow]) -> bool:
    """Say whether a rollout stands in several rows. For rows on a GPU, the host waits for the answer."""
    in_rows = [torch.unique(row.rollout) for row in rows if row.supervised is None]
    if not in_rows:
        return False
    seen = torch.cat(in_rows)
    return len(seen) > len(torch.unique(seen))


class Preparation:
    """Holds a step's rollouts, advantages and weights, and the values of its rows from before training: the sources of
    a row's `Tokens`.

    Args:
        rows: This rank's rows.
        known: Values of each row from before training.
        team: Adds up values that depend on all rows of the step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        rollouts: StepRollouts,
        rows: Sequence[PackedRow],
        known: Sequence[Known],
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        team = team or Team()
        self.known = known
        self._algorithm = algorithm
        self._count = len(rollouts)
        surveyed = known[0].logprobs is not None
        real = [(row, of) for row, of in zip(rows, known, strict=True) if not row.is_padding and row.supervised is None]
        rows, known = [row for row, _ in real], [of for _, of in real]

        def drift_of(logprobs: Sequence[torch.Tensor | None]) -> torch.Tensor:
            found = [of for of in logprobs if of is not None]
            return team.add_up(_drift(rows, found, self._count, device))

        drift = _on_host(drift_of([of.reference for of in known])) if algorithm.kl_in_reward else None
        self._advantages = torch.from_numpy(algorithm.advantages(rollouts, drift)).to(device)
        self._weights = torch.from_numpy(algorithm.weights(rollouts)).to(device)
        self._lengths = torch.from_numpy(rollouts.tokens).to(device, torch.float32)
        self._trained = int(rollouts.tokens.sum())
        self._drift: torch.Tensor | None = None
        self._proximal_drift: torch.Tensor | None = None
        self._lowest_entropy: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        if surveyed:
            self._drift = drift_of([of.logprobs for of in known])
            self._proximal_drift = drift_of(
                [self._proximal(row, of.logprobs, of) for row, of in real if of.logprobs is not None]
            )
        if algorithm.top_entropy is not None and surveyed and len(rollouts):
            none = torch.zeros(0, device=device)
            entropies = team.joined(torch.cat([none, *(of.entropy for of in known if of.entropy is not None)]))
            self._lowest_entropy = lowest_kept(entropies, algorithm.top_entropy)
            self._kept = keep_top_entropy(entropies, self._lowest_entropy).sum()

    def tokens(self, row: PackedRow, scores: TokenScores, known: Known) -> Tokens:
        """Make the row's tokens from the policy's scores of them."""
        logprobs = scores.logprobs.detach()
        drift = self._of_rollout(row, logprobs, self._drift)
        proximal = self._proximal(row, logprobs, known)
        same = proximal is logprobs
        top = self._top_entropy(scores, known)
        return Tokens(
            logprobs=scores.logprobs,
            behaviour=row.behaviour,
            old=row.behaviour,
            proximal=proximal,
            entropy=scores.entropy,
            advantages=self._advantages[row.credited],
            weights=self._weights[row.rollout],
            staleness=row.staleness,
            rollout=row.rollout,
            lengths=self._lengths[row.rollout],
            drift=drift,
            old_drift=torch.zeros_like(drift),
            proximal_drift=drift if same else self._of_rollout(row, proximal, self._proximal_drift),
            reference=known.reference,
            teacher=row.teacher,
            teacher_top=row.teacher_top,
            others=scores.others,
            top_entropy=top,
            entropy_weights=self._entropy_weights(logprobs, top) if self._algorithm.needs_entropy else None,
        )

    def _proximal(self, row: PackedRow, logprobs: torch.Tensor, known: Known) -> torch.Tensor:
        of_step = logprobs if known.before is None else known.before
        return self._algorithm.proximal(ProximalInputs(row.behaviour, of_step, known.previous, row.staleness))

    def _top_entropy(self, scores: TokenScores, known: Known) -> torch.Tensor | None:
        """Say which tokens have the step's highest entropies. A row of which nothing is known is the step's
        only one."""
        share = self._algorithm.top_entropy
        if share is None:
            return None
        entropy = scores.entropy.detach() if known.entropy is None else known.entropy
        lowest = lowest_kept(entropy, share) if self._lowest_entropy is None else self._lowest_entropy
        return keep_top_entropy(entropy, lowest)

    def _entropy_weights(self, logprobs: torch.Tensor, top: torch.Tensor | None) -> torch.Tensor:
        """Return each token's part in the mean over the step's tokens, or over those of highest entropy where these
        alone are learnt from."""
        if top is None:
            return torch.full_like(logprobs, 1 / self._trained)
        return top / (top.sum() if self._kept is None else self._kept)

    def _of_rollout(self, row: PackedRow, logprobs: torch.Tensor, drift: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of logprobs - behaviour over each token's rollout. Where `drift` is None, the rollout stands
        in this row."""
        return (_drift([row], [logprobs], self._count, logprobs.device) if drift is None else drift)[row.rollout]


def _on_host(drift: torch.Tensor) -> Floats:
    """Copy to the host, float64 [S]; this waits for the device, once a step."""
    return drift.cpu().numpy().astype(np.float64)


def _drift(
    rows: Sequence[PackedRow], logprobs: Sequence[torch.Tensor], count: int, device: torch.device
) -> torch.Tensor:
    """Sum logprobs - behaviour over each of `count` rollouts, as far as they stand in these rows.

    Args:
        logprobs: float32 [N] for each row.

    Returns:
        float32 [count].
    """
    sums = torch.zeros(count, device=device)
    for row, of in zip(rows, logprobs, strict=True):
        sums.index_add_(0, row.rollout, of - row.behaviour)
    return sums
