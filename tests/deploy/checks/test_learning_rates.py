"""Usual learning rates by a model's size: what doctor says, what init writes, and the table of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.deploy.checks.learning_rates import find_unusual_rate, parameters_of
from slipstream.protocol.config import ModelSection
from slipstream.protocol.config.learning_rates import TABLE, lower_rate, usual_rates
from tests.kit import config

DOCS = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 0.6e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6),
        ("org/Llama-3.1-8B", 8e9),
        ("org/model-v2", None),
        ("gpt2", None),
    ],
)
def test_the_size_of_a_model_that_is_not_here_is_read_from_its_name(path: str, parameters: float | None) -> None:
    assert parameters_of(ModelSection(path=path)) == parameters


@pytest.mark.parametrize(
    ("path", "rate", "rank", "first"),
    [
        ("a/m-135M", 1e-6, 0, "2e-05"),  # teaches nothing in 50 steps
        ("a/m-135M", 2e-5, 0, None),
        ("a/m-135M", 0.02, 0, "2e-05"),  # destroys it in two
        ("a/m-1B", 1e-6, 0, None),
        ("a/m-1B", 1e-5, 0, None),
        ("a/m-1B", 1e-4, 0, "2e-06"),
        ("a/m-1B", 1e-4, 16, None),
        ("a/m-7B", 1e-6, 16, "1e-05"),
        ("a/m-7B", 1e-6, 0, None),
        ("a/unknown", 0.3, 0, None),
    ],
)
def test_a_rate_far_from_the_usual_ones_is_named_with_their_range(
    path: str, rate: float, rank: int, first: str | None
) -> None:
    found = find_unusual_rate(config(model={"path": path}, learner={"learning_rate": rate}, lora={"r": rank}))
    assert (found is None) == (first is None)
    assert found is None or found.remedy.startswith(f"begin with {first}; ")


def test_other_optimisers_have_rates_of_their_own() -> None:
    settings = {"learning_rate": 0.3, "optim": "sgd"}
    assert find_unusual_rate(config(model={"path": "a/m-1B"}, learner=settings)) is None


def test_a_trainer_of_the_users_own_has_rates_of_its_own() -> None:
    settings = {"learning_rate": 0.3, "script": "train.py"}
    assert find_unusual_rate(config(model={"path": "a/m-1B"}, learner=settings)) is None


def test_the_table_of_the_docs_has_the_same_rates() -> None:
    text = DOCS.read_text("utf-8")
    for row in TABLE:
        adapter = usual_rates(row.parameters, adapter=True)
        assert f"| {row.lowest:.0e} to {row.highest:.0e} | {row.first:.0e} |".replace("e-0", "e-") in text, row
        assert f"| {adapter.first:.0e} |".replace("e-0", "e-") in text, adapter


@pytest.mark.parametrize(
    ("path", "rate", "rank", "lower"),
    [
        ("a/m-135M", 0.3, 0, 2e-5),
        ("a/m-135M/", 2e-4, 0, 2e-5),
        ("a/m-135M", 2e-3, 16, 2e-4),
        ("a/m-1B", 0.02, 0, 2e-6),
        ("a/m", 0.3, 0, 0.03),  # its size is not known
    ],
)
def test_the_rate_after_one_that_destroyed_the_policy_is_usual_for_its_size(
    path: str, rate: float, rank: int, lower: float
) -> None:
    run = config(model={"path": path}, learner={"learning_rate": rate}, lora={"r": rank})
    assert lower_rate(run) == pytest.approx(lower)
