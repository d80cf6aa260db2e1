"""Corrections and masks next to TRL's own code, on the same batch: its ratio, its masks and its loss."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.loss_terms import lowest_kept
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL, the oracle, is not installed")
TRAINER = grpo_trainer.GRPOTrainer
RATIO = "vllm_importance_sampling_ratio"


class Padded:
    """A batch as TRL has it, [B, T]: `mask` is 0 for padding and tools' tokens; `policy` is what trains."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (6, 9)
        lengths = random.integers(2, 10, 6)
        mask = (np.arange(9) < lengths[:, None]) & (random.random(shape) < 0.85)
        mask[:, 0] = True
        self.mask = torch.from_numpy(mask.astype(np.int64))
        self.sampler = _floats(random.normal(-2, 0.5, shape))
        self.old = self.sampler + _floats(random.normal(0, 0.3, shape))
        self.policy = (self.old + _floats(random.normal(0, 0.2, shape))).requires_grad_()
        self.entropies = _floats(random.random(shape))
        self.advantages = _floats(random.normal(size=6))

    def tokens(self, top_entropy: float) -> Tokens:
        """The same as ours: the tokens that count, their weights those of a mean over rollouts of means over tokens."""
        where = self.mask.bool()
        rollout = torch.arange(6)[:, None].expand(6, 9)[where]
        lengths = self.mask.sum(1).float()
        behaviour, proximal = self.sampler[where], self.old[where]
        logprobs, entropy = self.policy.detach()[where].requires_grad_(), self.entropies[where]

        def of_rollouts(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(6).index_add_(0, rollout, values)[rollout]

        drift = of_rollouts(logprobs.detach() - behaviour)
        return Tokens(
            logprobs=logprobs,
            behaviour=behaviour,
            old=behaviour,
            proximal=proximal,
            entropy=entropy,
            advantages=self.advantages[rollout],
            weights=1 / (6 * lengths[rollout]),
            staleness=torch.zeros_like(rollout, dtype=torch.int32),
            rollout=rollout,
            lengths=lengths[rollout],
            drift=drift,
            old_drift=torch.zeros_like(drift),
            proximal_drift=of_rollouts(proximal - behaviour),
            top_entropy=entropy >= lowest_kept(entropy, top_entropy),
        )


def _floats(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


@cache
def ratio_code() -> CodeType:
    """The statement that computes TRL's `importance_sampling_ratio`, cut out of its method."""
    source = textwrap.dedent(inspect.getsource(TRAINER._generate_and_score_completions))
    outermost = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and any(isinstance(of, ast.Assign) and getattr(of.targets[0], "id", "") == RATIO for of in node.body)
    )
    return compile(ast.Module([outermost], []), "grpo_trainer.py", "exec")


def trl_ratio(batch: Padded, mode: str, low: float, high: float) -> torch.Tensor:
    """[B, T], or [B, 1] for whole rollouts."""
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    scope: dict[str, Any] = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "completion_mask": batch.mask,
        "tool_mask": None,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.sampler,
    }
    exec(ratio_code(), scope)
    ratio = scope[RATIO]
    assert isinstance(ratio, torch.Tensor)
    return ratio


def trl_loss(batch: Padded, ratio: torch.Tensor | None, threshold: float | None, share: float) -> torch.Tensor:
    """TRL's GRPO loss of the batch: its `_compute_loss` with a stand-in for the trainer around it."""
    accelerator = MagicMock(num_processes=1)
    for identity in ("gather", "gather_for_metrics", "pad_across_processes", "reduce"):
        getattr(accelerator, identity).side_effect = lambda value, *_, **__: value
    trainer = MagicMock(
        accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level="token",
        loss_type="grpo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=threshold,
        top_entropy_quantile=share,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=ratio is not None,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=TRAINER.get_off_policy_mask,
    )
    trainer.get_high_entropy_mask = lambda *given: TRAINER.get_high_entropy_mask(trainer, *given)
    trainer._get_per_token_logps_and_entropies.return_value = (batch.policy, batch.entropies, None)
    nothing = torch.zeros(6, 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(batch.mask),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "num_items_in_batch": batch.mask.sum(),
        "old_per_token_logps": batch.old if ratio is not None else batch.sampler,
        "sampling_per_token_logps": batch.sampler,
        "importance_sampling_ratio": ratio,
    }
    loss: torch.Tensor = TRAINER._compute_loss(trainer, None, inputs)
    return loss


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.3), (0.8, 1.3), (0.9, 3.0)])
def test_ratios_are_trl_s(mode: str, low: float, high: float) -> None:
    for seed in range(3):
        batch = Padded(seed)
        section = LearnerSection(correction=mode, correction_low=low, correction_high=high)  # type: ignore[arg-type]
        algorithm = Algorithm(section, longest=9)
        given = batch.tokens(1.0)
        ours = algorithm._correction(given).tokens.weights / given.weights
        ratio = trl_ratio(batch, mode, low, high)
        torch.testing.assert_close(ours, ratio.expand(6, 9)[batch.mask.bool()])

        result = algorithm(given)
        shown = algorithm.metrics({name: float(value) for name, value in {**result.sums, **result.peaks}.items()})
        theirs = ratio.flatten() if mode.startswith("sequence") else ratio[batch.mask.bool()]
        for name, expected in (("min", theirs.min()), ("mean", theirs.mean()), ("max", theirs.max())):
            assert shown[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize(("threshold", "share"), [(None, 1.0), (0.02, 1.0), (None, 0.3), (0.02, 0.5)])
def test_loss_and_gradient_are_trl_s(mode: str | None, threshold: float | None, share: float) -> None:
    """This includes its masks, which leave its normaliser as it is."""
    for seed in range(3):
        batch = Padded(seed)
        bounds = {} if mode is None else {"correction": mode, "correction_low": 0.8, "correction_high": 1.5}
        masks = {"off_policy_mask_threshold": threshold, "top_entropy_quantile": share}
        given = batch.tokens(share)
        ours = Algorithm(LearnerSection(**bounds, **masks), longest=9)(given).losses.sum()  # type: ignore[arg-type]
        ours.backward()
        theirs = trl_loss(batch, None if mode is None else trl_ratio(batch, mode, 0.8, 1.5), threshold, share)
        theirs.backward()
        assert given.logprobs.grad is not None
        assert batch.policy.grad is not None
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(given.logprobs.grad, batch.policy.grad[batch.mask.bool()])
