"""Objectives next to TRL 1.16's own losses: its `_compute_loss` runs, on the same log-probs, on a stand-in for its
trainer that has only what that reads. Loss, gradient and the figures of the same name must agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import objectives
from slipstream.learner.algorithm.step_data import NORMALISERS, StepRollouts, Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens

pytest.importorskip("trl", reason="TRL, whose losses these are compared with, is not installed (extra `bench`)")
# TRL warns of vLLM's version where it is imported, and torch of what TRL takes of it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

LENGTHS = (6, 2, 5, 1, 4)
LONGEST = 16
# By what TRL is asked for: what we are.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({"loss_type": "dapo"}, {"delta": "none"}),
    "dapo, two-sided": ({"loss_type": "dapo", "delta": 1.6}, {"delta": 1.6}),
    "grpo": ({"loss_type": "grpo"}, {"delta": "none", "normaliser": "sequences"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"delta": "none", "normaliser": "constant"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.6},
        {"objective": "gspo", "delta": 1.6, "normaliser": "sequences"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 2.0}, {"objective": "cispo", "clip_high": 1.0}),
    "sequence_cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
        {"objective": "sequence_cispo", "clip_high": 0.1},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3},
        {
            "objective": "sapo",
            "sapo_temperature_pos": 0.8,
            "sapo_temperature_neg": 1.3,
            "normaliser": "sequences",
        },
    ),
    "vespo": ({"loss_type": "vespo"}, {"objective": "vespo"}),
    "rloo": ({"trainer": "RLOO"}, {"objective": "sequence_clip", "delta": "none", "normaliser": "rollouts"}),
}


class Batch:
    """Rollouts of `LENGTHS`, padded as in TRL; the fourth token of each is a tool's, unless `tools` is false."""

    def __init__(self, seed: int, tools: bool) -> None:
        random = np.random.default_rng(seed)
        places = np.arange(max(LENGTHS))
        self.completion_mask = torch.from_numpy(places < np.array(LENGTHS)[:, None]).long()
        self.tool_mask = torch.from_numpy(np.tile(places != 3, (len(LENGTHS), 1)) | (not tools)).long()
        self.mask = (self.completion_mask * self.tool_mask).bool()
        shape = self.mask.shape
        self.old = torch.from_numpy(random.uniform(-4, -1, shape)).float()
        self.logprobs = (self.old + torch.from_numpy(random.normal(0, 0.4, shape)).float()).requires_grad_()
        self.advantages = torch.from_numpy(random.normal(size=len(LENGTHS))).float()

    def tokens(self, normaliser: str) -> Tokens:
        rows = torch.arange(len(LENGTHS))[:, None].expand(self.mask.shape)[self.mask]
        counts = self.mask.sum(-1).numpy()
        step = StepRollouts.of(np.zeros(len(LENGTHS)), np.zeros(len(LENGTHS), dtype=np.int64), counts)
        weights = NORMALISERS[normaliser](step, LONGEST)[rows.numpy()]
        given = {"behaviour": self.old[self.mask], "logprobs": self.logprobs.detach()[self.mask], "rollout": rows}
        return tokens(np.ones(len(rows)), self.advantages[rows].numpy(), weights, **given)


def trl_loss(batch: Batch, trainer: str = "GRPO", **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's loss of the batch, and what it logs of it."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    def scores(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return batch.logprobs, torch.ones_like(batch.logprobs), None

    args = {
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        **settings,
    }
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=scores,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        loss_type=settings.get("loss_type"),
        epsilon_low=0.2,
        epsilon_high=settings.get("epsilon_high", 0.28),
        beta=0.0,
        args=SimpleNamespace(**args),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 2, dtype=torch.int64),
        "completion_ids": torch.zeros_like(batch.completion_mask),
        "completion_mask": batch.completion_mask,
        "tool_mask": batch.tool_mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "old_logps": (batch.old * batch.completion_mask).sum(1),
        "num_items_in_batch": batch.mask.sum(),
    }
    compute: Callable[..., torch.Tensor] = {"GRPO": GRPOTrainer, "RLOO": RLOOTrainer}[trainer]._compute_loss
    loss = compute(stand_in, None, inputs)
    return loss, {name: values[0] for name, values in stand_in._metrics["train"].items()}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_and_figures_are_trl_s(name: str, seed: int) -> None:
    asked, given = SAME[name]
    section = LearnerSection(**given)
    # TRL's RLOO trains the tools' tokens as well; ours never does.
    batch = Batch(seed, tools=name != "rloo")
    theirs, logged = trl_loss(batch, **asked)
    (expected,) = torch.autograd.grad(theirs, batch.logprobs)

    objective = objectives.build(section)
    row = batch.tokens(section.normaliser)
    result = objective(row)
    loss = result.losses.sum()
    (gradient,) = torch.autograd.grad(loss, row.logprobs)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(gradient, expected[batch.mask])
    assert not expected[~batch.mask].any()

    figures = objective.metrics({key: float(value) for key, value in result.sums.items()}, len(row.weights))
    shared = {key: value for key, value in logged.items() if key in figures}
    assert shared == pytest.approx({key: figures[key] for key in shared}, abs=1e-6)
    counted = {
        "cispo": {"cispo_clip_ratio"},
        "sequence_cispo": {"cispo_clip_ratio"},
        "vespo": {"vespo/phi_seq_mean"},
        "sapo": set(),
    }
    clip = {f"clip_ratio/{side}_mean" for side in ("low", "high", "region")}
    assert set(shared) == counted.get(name, clip)
