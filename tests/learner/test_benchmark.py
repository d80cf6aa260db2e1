"""The ways that `benchmarks.learner` compares do the same step: else their times would not be comparable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.learner import compare
from benchmarks.learner_cases import CASES, SIZES, Shape, Size, batch
from benchmarks.learner_ways import micro_batches

CPU = torch.device("cpu")
TINY = Size(1, {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8})
SHAPES = {
    "shared": Shape(3, 12, lambda count: [7] * count, distinct=5),
    "apart": Shape(2, 0, lambda count: [4 + 3 * i for i in range(count)]),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_ways_have_the_same_loss_and_gradient(shape: Shape) -> None:
    pytest.importorskip("trl", reason="the benchmark compares with TRL where it is installed: extra `bench`")
    figures = compare(shape, TINY, 60, 1, CPU)
    assert figures["agrees"]
    assert figures["gradient_difference"] < 1e-5
    assert figures["trl_ratio"] > 0
    assert set(figures["seconds"]) == {"ours", "padded", "trl"}


def test_another_gradient_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import learner_ways

    without_trl(monkeypatch)
    right = learner_ways.advantages_of

    def wrong(of: Any) -> Any:
        advantages, tokens = right(of)
        return [advantages[0] + 0.01, *advantages[1:]], tokens

    monkeypatch.setattr(learner_ways, "advantages_of", wrong)
    figures = compare(SHAPES["shared"], TINY, 60, 1, CPU)
    assert not figures["agrees"]


def test_without_trl_its_figures_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    without_trl(monkeypatch)
    figures = compare(SHAPES["shared"], TINY, 60, 1, CPU)
    assert figures["trl_ratio"] is None
    assert set(figures["seconds"]) == {"ours", "padded"}


def without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_the_cases_are_those_of_the_issue() -> None:
    for name, count, raw in (("short", 128, 20_480), ("long_prompt", 32, 32_000)):
        made = batch(CASES[name], 512)
        assert (len(made.samples), made.raw) == (count, raw)
        prompts = {(of.group, of.token_ids[: CASES[name].prompt].tobytes()) for of in made.samples}
        assert len(prompts) == CASES[name].groups
    lengths = sorted(len(of) for of in batch(CASES["mixed"], 512).samples)
    assert len(lengths) == 64
    assert (lengths[0] // 8, lengths[-1] // 256) == (4, 7)  # 32 to 2,048
    half = batch(CASES["short_half_equal"], 512).samples[:8]
    assert len({of.token_ids.tobytes() for of in half}) == 5


def test_a_micro_batch_holds_what_fits_when_padded() -> None:
    samples = batch(replace(SHAPES["apart"]), 64).samples
    made = list(micro_batches(samples, 100))
    assert [of for members in made for of in members] == samples
    assert all(max(map(len, members)) * len(members) <= 100 for members in made)


def test_the_models_have_the_sizes_of_their_names() -> None:
    for name, expected in (("0.4M", 0.4e6), ("7M", 7e6)):
        weights = sum(parameter.numel() for parameter in SIZES[name].build("sdpa", CPU).parameters())
        assert weights == pytest.approx(expected, rel=0.1)
