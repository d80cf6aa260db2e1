"""KL(sampler, learner) at staleness 0: what it is over, what it shows, and when it is told."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import PackedRow, pack_row
from slipstream.learner.model.policy import Policy
from slipstream.learner.report import sampler_checks
from slipstream.learner.report.progress import TerminalProgress, line
from slipstream.learner.report.records import StepRecord
from slipstream.learner.training.base import StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import sample
from tests.learner.report.test_summary import step_record


def metrics(policy: Policy, rows: Sequence[PackedRow]) -> StepMetrics:
    tokens = np.array([sum(len(row.rollout) for row in rows)])
    alone = StepRollouts.of(np.zeros(1), np.zeros(1, dtype=np.int64), tokens)
    return PolicyTrainer(policy, LearnerSection(), longest=64).step(rows, alone)


def sampled_by(policy: Policy, seed: int = 0, **fields: Any) -> PackedRow:
    """A row whose tokens `policy` sampled at staleness 0."""
    row = pack_row([replace(sample(24, 4, seed), staleness=np.zeros(24, np.int32), fresh=np.ones(24, np.bool_))])
    with torch.no_grad():
        return replace(row, behaviour=policy(row).logprobs, **fields)


def test_it_is_zero_where_the_learner_s_log_probs_are_the_sampler_s(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    found = metrics(policy, [sampled_by(policy), sampled_by(policy, 1)])
    assert found.sampler_kl_staleness_0 == pytest.approx(0.0, abs=1e-6)
    assert found.sampler_tokens_staleness_0 == 40


def test_it_is_over_the_fresh_tokens_of_all_rows(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    fresh, mixed = sampled_by(policy), sampled_by(policy, 1)
    of_it = torch.arange(20) % 4 == 0
    wild = torch.where(of_it, 0.3, 3.0)
    rows = [replace(fresh, behaviour=fresh.behaviour + 0.1), replace(mixed, behaviour=mixed.behaviour + wild)]
    rows[1] = replace(rows[1], fresh=of_it)
    found = metrics(policy, rows)
    assert found.sampler_tokens_staleness_0 == 25
    assert found.sampler_kl_staleness_0 == pytest.approx((20 * 0.1 + 5 * 0.3) / 25, abs=1e-5)


def test_where_no_token_is_fresh_there_is_none(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    row = sampled_by(policy)
    found = metrics(policy, [replace(row, fresh=torch.zeros_like(row.fresh))])
    assert (found.sampler_kl_staleness_0, found.sampler_tokens_staleness_0) == (None, 0)


def test_a_nucleus_shows_as_the_log_of_its_mass(make_policy: Callable[..., Policy]) -> None:
    """As with vLLM's processed log-probs: of a nucleus that holds 0.9, each token's is higher by -log 0.9. The k3
    estimate of such a KL would be 0.005."""
    policy = make_policy()
    row = sampled_by(policy)
    found = metrics(policy, [replace(row, behaviour=row.behaviour - math.log(0.9))])
    assert found.sampler_kl_staleness_0 == pytest.approx(-math.log(0.9), abs=1e-6)


def with_kl(kl: float | None, tokens: int = 1000) -> StepRecord:
    record = step_record(10)
    return replace(
        record, metrics=replace(record.metrics, sampler_kl_staleness_0=kl, sampler_tokens_staleness_0=tokens)
    )


@pytest.mark.parametrize(
    ("kl", "tokens", "told"),
    [(0.02, 1000, True), (-0.02, 1000, True), (0.009, 1000, False), (0.5, 10, False), (None, 0, False)],
)
def test_a_difference_that_is_not_rounding_is_told_with_its_likely_causes(
    kl: float | None, tokens: int, told: bool
) -> None:
    warning = sampler_checks.sampler_kl_warning(with_kl(kl, tokens).metrics)
    assert (warning is not None) == told
    if warning is not None:
        assert f"is {kl:.3g} nats a token over 1000 tokens" in warning
        assert "--logprobs-mode processed_logprobs" in warning


@pytest.mark.parametrize(
    ("kl", "always", "shown"),
    [(1e-6, False, None), (1e-6, True, "1e-06"), (0.02, False, "0.02"), (None, True, None)],
)
def test_the_terminal_shows_it_where_it_matters(kl: float | None, always: bool, shown: str | None) -> None:
    text = line(with_kl(kl), 100, 180.0, show_sampler_kl=always)
    assert (f"sampler KL {shown}" in text) if shown else ("sampler KL" not in text)
    console = Console(file=(file := io.StringIO()), width=200)
    TerminalProgress(100, console=console, log=False, show_sampler_kl=always).show(with_kl(kl))
    assert ("sampler KL" in file.getvalue()) == (shown is not None)


def test_it_is_in_the_line_of_metrics_and_in_the_learner_s_report() -> None:
    record = with_kl(0.02)
    assert record.flat()["sampler/kl_staleness_0"] == 0.02
    assert record.flat()["sampler/tokens_staleness_0"] == 1000
    assert record.report(None).metrics["sampler/kl_staleness_0"] == 0.02
    assert "sampler/kl_staleness_0" not in with_kl(None).report(None).metrics
    assert StepRecord.of(record.flat()).metrics.sampler_kl_staleness_0 == 0.02
