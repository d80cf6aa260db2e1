from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import loss_terms
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.loss_terms import lowest_kept
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import joined, tokens


def test_none_is_set_unless_the_run_file_sets_it() -> None:
    assert loss_terms.build_masks(LearnerSection()) == {}
    chosen = LearnerSection(off_policy_mask_threshold=0.5, top_entropy_quantile=0.2)
    assert set(loss_terms.build_masks(chosen)) == {"off_policy", "low_entropy"}


def test_bad_rollouts_that_the_policy_has_left_are_left_out() -> None:
    """Means of log behaviour - log policy: 0.5, 0.1 and -1; the threshold is 0.3."""
    ratios = np.exp([-0.9, -0.1, -0.1, -0.1, 1.0, 1.0])
    numbers = torch.tensor([0, 0, 1, 1, 2, 2])
    mask = loss_terms.build_masks(LearnerSection(off_policy_mask_threshold=0.3))["off_policy"]
    assert mask(tokens(ratios, [-1.0] * 6, rollout=numbers)).tolist() == [False, False, True, True, True, True]
    for advantage in (0.0, 1.0):
        assert mask(tokens(ratios, [advantage] * 6, rollout=numbers)).all()


def test_a_policy_that_is_not_a_number_is_not_hidden_by_the_mask() -> None:
    mask = loss_terms.build_masks(LearnerSection(off_policy_mask_threshold=0.3))["off_policy"]
    assert mask(tokens([1.0], [-1.0], logprobs=torch.tensor([torch.nan]))).all()


@settings(max_examples=200)
@given(
    entropies=st.lists(st.integers(0, 20), min_size=1, max_size=50),
    share=st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99]),
)
def test_what_is_kept_is_what_a_quantile_keeps(entropies: list[int], share: float) -> None:
    values = torch.tensor(entropies, dtype=torch.float32) / 7
    kept = values >= lowest_kept(values, share)
    quantile = np.quantile(values.numpy().astype(np.float64), 1 - share)
    assert kept.tolist() == [bool(value >= quantile - 1e-9) for value in values.tolist()]
    assert kept.any()


def test_masked_tokens_have_no_loss_and_no_gradient_and_the_others_no_more_than_before() -> None:
    """The normaliser stays as it is, as TRL's does."""
    ratios, advantages, weights = [1.1, 0.9, 1.0], [1.0, -1.0, 2.0], [0.2, 0.3, 0.5]
    plain = tokens(ratios, advantages, weights)
    Algorithm(LearnerSection(), longest=9)(plain).losses.sum().backward()
    masked = tokens(ratios, advantages, weights, top_entropy=torch.tensor([True, False, True]))
    algorithm = Algorithm(LearnerSection(top_entropy_quantile=0.7), longest=9)
    result = algorithm(masked)
    result.losses.sum().backward()
    assert plain.logprobs.grad is not None
    assert masked.logprobs.grad is not None
    assert masked.logprobs.grad.tolist() == [plain.logprobs.grad[0], 0, plain.logprobs.grad[2]]
    assert algorithm.metrics({name: float(value) for name, value in result.sums.items()})["masked/low_entropy"] == (
        pytest.approx(1 / 3)
    )


def test_packing_cannot_change_what_is_masked_or_counted() -> None:
    algorithm = Algorithm(LearnerSection(top_entropy_quantile=0.5, off_policy_mask_threshold=0.1), longest=9)
    rows = []
    for seed in range(2):
        random = np.random.default_rng(seed)
        ratios, kept = np.exp(random.normal(0, 0.5, 12)), torch.from_numpy(random.random(12) < 0.5)
        rows.append(tokens(ratios, [-1.0] * 12, top_entropy=kept, rollout=torch.arange(12) // 3))
    apart, together = [algorithm(row) for row in rows], algorithm(joined(*rows))
    torch.testing.assert_close(together.losses, torch.cat([result.losses for result in apart]))
    assert {"masked/off_policy", "masked/low_entropy"} <= set(together.sums)
    for name, value in together.sums.items():
        torch.testing.assert_close(value, apart[0].sums[name] + apart[1].sums[name], msg=name)


def test_top_entropy_needs_the_whole_step_and_says_so() -> None:
    mask = loss_terms.build_masks(LearnerSection(top_entropy_quantile=0.5))["low_entropy"]
    with pytest.raises(ValueError, match=r"learner\.top_entropy_quantile needs it"):
        mask(tokens([1.0], [1.0]))


def test_tokens_of_one_entropy_stand_or_go_together_whatever_rounding_makes_of_them() -> None:
    """The same context in two rows: its entropies differ in the last digit."""
    entropies = torch.tensor([0.5, 0.3 + 1e-7, 0.3, 0.3 - 1e-7, 0.1])
    assert loss_terms.keep_top_entropy(entropies, lowest_kept(entropies, 0.5)).tolist() == [
        True,
        True,
        True,
        True,
        False,
    ]
