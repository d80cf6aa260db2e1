"""The port of training: what loop, session and checkpoints ask of a trainer.

`trainer.PolicyTrainer` implements it for models of transformers, on one rank or several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.protocol.messages import RankReport

if TYPE_CHECKING:
    from slipstream.learner.algorithm.step_data import StepRollouts
    from slipstream.learner.feed.packing import PackedRow
    from slipstream.learner.feed.recorded_experts import RoutedLayers
    from slipstream.learner.model.adapter import Adapter
    from slipstream.learner.model.share import Share
    from slipstream.learner.ranks.liveness import RankLost
    from slipstream.learner.ranks.team import Guard

    # Calls its second argument with this rank's share of the weights, and returns what that returns. Meanwhile each
    # other rank hands over its own share, with the first argument.
    HandOverShares = Callable[[Mapping[str, Any], Callable[[Share], float]], float]


class DivergedError(LearnerFailed):
    """Loss or gradient is not finite: a step would destroy the weights."""


class RanksOutOfMemory(torch.OutOfMemoryError):
    """The memory of one of several ranks does not hold its part of a step. The others wait in the middle of it, so no
    further step can be made."""


@dataclass(frozen=True)
class StepMetrics:
    """The measurements of one optimiser step, a part of its line in `metrics.jsonl`.

    A trainer of the user's own may leave most of them out.

    Attributes:
        entropy: Mean entropy of the sampling distribution over the tokens that train, in nats.
        grad_norm: Norm of the gradient before clipping.
        train_s: Seconds of the step.
        objective: The algorithm's own metrics.
        log_ratio_max: The greatest distance of a token's log-prob from the sampler's, in nats.
        sampler_kl_staleness_0: KL(sampler, learner) in nats, a mean over the fresh tokens (`PackedRow`); None without
            any.
        sampler_tokens_staleness_0: Number of the fresh tokens.
        beside: Further metrics by their names, of `learner.algorithm.drift` and `learner.training.flops`.
    """

    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    train_s: float = 0.0
    objective: Mapping[str, float | None] = field(default_factory=dict)
    log_ratio_max: float | None = None
    sampler_kl_staleness_0: float | None = None
    sampler_tokens_staleness_0: int = 0
    beside: Mapping[str, float] = field(default_factory=dict)


class Scores(NamedTuple):
    """Log-probs of a rollout's tokens that train, in the order of the step's rows: float32 [N] each.

    Attributes:
        sampled: As they were sampled.
        learner: In the step, before its update.
    """

    sampled: npt.NDArray[np.float32]
    learner: npt.NDArray[np.float32]


class BatchForm(NamedTuple):
    """How batches are made for a trainer.

    Attributes:
        pin: Whether rows lie in pinned memory.
        branches: Whether rollouts with a common prefix share it in a row.
        routed: Layers whose recorded experts it takes; None without `learner.router_replay`.
    """

    pin: bool = False
    branches: bool = False
    routed: RoutedLayers | None = None


class Trainer(Protocol):
    """Owns the weights and their optimiser; knows nothing of the queue or of versions."""

    @property
    def batch_form(self) -> BatchForm: ...

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""

    @property
    def on_gpu(self) -> bool: ...

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that trains; None where all weights do."""

    @property
    def ranks(self) -> list[RankReport]:
        """What each of several ranks did in the newest step; none for one rank."""

    def before_change(self, hear: Callable[[], None]) -> Callable[[], None]:
        """Call `hear` right before weights change, from now on. Returns what ends that."""

    def guard(self, guard: Guard) -> None:
        """Make signals wait for work that several ranks must end together."""

    def on_rank_lost(self, hear: Callable[[RankLost], None]) -> None:
        """Call `hear`, on a thread, with what is known of a rank that is gone."""

    def on_rank_silent(self, hear: Callable[[str | None], None]) -> None:
        """Call `hear`, on a thread, with the names of ranks without a heartbeat, and with None when all have one
        again."""

    def step(self, rows: Sequence[PackedRow], rollouts: StepRollouts) -> StepMetrics:
        """Train on `rows`, which hold the tokens of `rollouts` that train.

        Raises:
            DivergedError: Before any weight is changed.
            torch.OutOfMemoryError: The memory does not hold the step. After `RanksOutOfMemory` no other can be made.
        """

    def discard(self) -> None:
        """Drop what a step that failed has left, such as its gradient."""

    def scores_of(self, rollouts: Collection[int]) -> dict[int, Scores]:
        """Return the log-probs in the newest step of some of its rollouts, by their numbers. Some may be missing."""

    def score(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Score a sequence at temperature 1.

        Returns:
            log p(token_ids[i + 1] | token_ids[: i + 1]), float32 [T - 1].
        """

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield names and tensors of all weights as servers take them."""

    @property
    def shares(self) -> HandOverShares | None:
        """Hands over the weights by shares; None where this process has them all."""

    def save_model(self, folder: Path) -> None:
        """Save the weights as a folder that servers load. Raises `OSError`."""

    def save_without_weights(self, folder: Path) -> None:
        """Save that folder without the weights, as a trial. Raises what the libraries do that write it."""

    def state(self, parts: Path | None = None) -> dict[str, Any]:
        """Return what a resume needs besides the weights, as tensors and plain values.

        Args:
            parts: Folder for what does not fit on one rank; `restore` then needs it. None to gather all of it.

        Raises:
            OSError: It cannot be written.
        """

    def restore(self, state: dict[str, Any], parts: Path | None = None) -> None:
        """Load what `state` returned. The settings are those of this start."""

    def saved_bytes(self) -> int:
        """Return about how many bytes a checkpoint of the model and of `state` has."""

    def for_callbacks(self) -> dict[str, Any]:
        """Return what callbacks of transformers are given: `model`, `optimizer` and `lr_scheduler`."""
