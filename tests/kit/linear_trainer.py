"""The second implementation of the port `training.base.Trainer`: a bigram policy in plain torch, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.ranks.liveness import RankLost
from slipstream.learner.ranks.team import Guard
from slipstream.learner.training.base import BatchForm, DivergedError, Scores, StepMetrics
from slipstream.protocol.messages import RankReport

FILE_NAME = "model.safetensors"


class LinearTrainer:
    """Predicts each token from the one before it. Trains by REINFORCE with the group's mean as its baseline."""

    batch_form = BatchForm()
    on_gpu = False
    adapter = None
    shares = None

    def __init__(self, vocabulary: int, model: Path | None = None) -> None:
        weight = torch.zeros(vocabulary, vocabulary) if model is None else load_file(model / FILE_NAME)["weight"]
        self.weight = weight.requires_grad_()
        self.vocabulary_size = vocabulary
        self.ranks: list[RankReport] = []
        self._optimiser = torch.optim.Adam([self.weight], lr=0.05)
        self._scored: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def before_change(self, hear: Callable[[], None]) -> Callable[[], None]:
        return self._optimiser.register_step_pre_hook(lambda *_: hear()).remove

    def guard(self, guard: Guard) -> None: ...

    def on_rank_lost(self, hear: Callable[[RankLost], None]) -> None: ...

    def on_rank_silent(self, hear: Callable[[str | None], None]) -> None: ...

    def step(self, rows: Sequence[PackedRow], rollouts: StepRollouts) -> StepMetrics:
        rewards = torch.from_numpy(rollouts.rewards).float()
        groups = torch.from_numpy(rollouts.groups)
        advantages = rewards - torch.stack([rewards[groups == of].mean() for of in groups])
        self._scored.clear()
        loss = torch.zeros(())
        for row in rows:
            pairs = self._logprobs(row.input_ids[0, row.positions], row.targets)[row.scored]
            loss = loss - (advantages[row.rollout] * pairs).sum()
            self._scored.append((row.rollout, row.behaviour, pairs.detach()))
        if not torch.isfinite(loss):
            raise DivergedError(f"the loss is {float(loss)}")
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        self._optimiser.zero_grad()
        return StepMetrics(loss=float(loss.detach()))

    def discard(self) -> None:
        self._optimiser.zero_grad()

    def scores_of(self, rollouts: Collection[int]) -> dict[int, Scores]:
        return {
            number: Scores(sampled[of == number].numpy(), ours[of == number].numpy())
            for of, sampled, ours in self._scored
            for number in rollouts
            if bool((of == number).any())
        }

    def score(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            return self._logprobs(ids[:-1], ids[1:]).numpy()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "weight", self.weight.detach()

    def save_model(self, folder: Path) -> None:
        self.save_without_weights(folder)
        save_file(dict(self.weights()), folder / FILE_NAME)

    def save_without_weights(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")

    def state(self, parts: Path | None = None) -> dict[str, Any]:
        return {"optimiser": self._optimiser.state_dict()}

    def restore(self, state: dict[str, Any], parts: Path | None = None) -> None:
        self._optimiser.load_state_dict(state["optimiser"])

    def saved_bytes(self) -> int:
        return 3 * self.weight.nbytes

    def for_callbacks(self) -> dict[str, Any]:
        return {"model": self.weight, "optimizer": self._optimiser, "lr_scheduler": None}

    def _logprobs(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return self.weight[before].log_softmax(-1).gather(-1, after[:, None])[:, 0]
