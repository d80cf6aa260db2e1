"""Percentiles of ratios and KL by staleness: from sums of fixed size, which add up over rows and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.algorithm.drift import (
    BIN,
    FINEST,
    MAX_SERVERS,
    MAX_STALENESS,
    drift_metrics,
    drift_sums,
    server_drift_sums,
    zero_sums,
)
from slipstream.learner.algorithm.objectives import MAX_LOG_RATIO


def of(log_ratios: list[float], staleness: list[int] | None = None) -> dict[str, float]:
    ages = torch.tensor(staleness or [0] * len(log_ratios), dtype=torch.int32)
    return drift_metrics(drift_sums(torch.tensor(log_ratios), ages))


@given(
    st.lists(st.floats(-MAX_LOG_RATIO, MAX_LOG_RATIO, width=32), min_size=1, max_size=300),
    st.sampled_from([1, 50, 99]),
)
def test_a_percentile_is_off_by_less_than_the_width_of_its_bin(log_ratios: list[float], percent: int) -> None:
    exact = float(np.percentile(np.array(log_ratios), percent, method="inverted_cdf"))
    found = math.log(of(log_ratios)[f"sampler/ratio_p{percent}"])
    assert abs(found - exact) <= 1.02 * BIN * (abs(exact) + FINEST) + 1e-6, "a float32's rounding may move a bin's edge"


def test_the_percentiles_of_many_ratios_are_those_of_numpy() -> None:
    log_ratios = np.random.default_rng(0).normal(0, 0.01, 50_000).astype(np.float32)
    found = of(log_ratios.tolist())
    for percent in (1, 50, 99):
        exact = math.exp(float(np.percentile(log_ratios, percent)))
        assert found[f"sampler/ratio_p{percent}"] == pytest.approx(exact, abs=2e-5)


def test_the_sums_of_two_rows_are_those_of_both_in_one() -> None:
    random = np.random.default_rng(1)
    log_ratios = torch.from_numpy(random.normal(0, 0.1, 200).astype(np.float32))
    ages = torch.from_numpy(random.integers(0, 4, 200).astype(np.int32))
    parts = [drift_sums(log_ratios[:70], ages[:70]), drift_sums(log_ratios[70:], ages[70:])]
    whole = drift_sums(log_ratios, ages)
    added = {name: parts[0][name] + parts[1][name] for name in whole}
    assert drift_metrics(added) == pytest.approx(drift_metrics(whole), rel=1e-5)


def test_the_kl_of_a_staleness_is_the_mean_over_its_tokens() -> None:
    """That of staleness 0 stands elsewhere: over turns that the version began itself."""
    found = of([-0.5, -0.1, -0.3, 0.25, -9.0], [0, 1, 1, 3, MAX_STALENESS + 5])
    kls = {name: value for name, value in found.items() if "kl" in name}
    assert kls == pytest.approx(
        {"sampler/kl_staleness_1": 0.2, "sampler/kl_staleness_3": -0.25, f"sampler/kl_staleness_{MAX_STALENESS}": 9.0}
    )


def test_the_distance_of_a_server_is_the_mean_over_its_fresh_tokens() -> None:
    log_ratios = torch.tensor([0.1, -0.3, 5.0, 0.2, 7.0])
    fresh = torch.tensor([True, True, False, True, True])
    server = torch.tensor([0, 0, 0, 1, MAX_SERVERS + 3], dtype=torch.int32)
    sums = {**zero_sums(torch.device("cpu")), **server_drift_sums(log_ratios, fresh, server)}
    assert drift_metrics(sums, ("vllm-0", "vllm-1", "vllm-2")) == pytest.approx(
        {
            "sampler/distance/vllm-0": 0.2,
            "sampler/distance_tokens/vllm-0": 2,
            "sampler/distance/vllm-1": 0.2,
            "sampler/distance_tokens/vllm-1": 1,
        }
    )


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_a_log_ratio_that_is_no_number_reaches_beyond_no_bin(wild: float) -> None:
    found = of([wild, 0.0, 0.0])
    assert found["sampler/ratio_p50"] == pytest.approx(1.0, abs=1e-5)
    assert all(math.isfinite(value) for value in found.values())


def test_a_step_without_tokens_has_no_figures() -> None:
    assert of([]) == {}
