"""Several ranks make the step that one makes: over packings, micro-batches, algorithms, and ways to hold the weights.

Each team of processes is started once for the module, with gloo on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.learner.feed.demonstrations import rows_of
from slipstream.learner.feed.packing import PackedRow, Sample, SampledFrom, deal, pack
from slipstream.learner.run import build_trainer
from slipstream.learner.training.base import DivergedError, StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import RankReport
from tests.kit import LEARNER, config
from tests.kit.learner import sample, step_rollouts
from tests.kit.messages import VOCABULARY
from tests.kit.model import tiny_model
from tests.kit.ranks import Ranks
from tests.learner.feed.test_demonstrations import conversations

BETA = 0.9
# The gradient itself is compared: it is not clipped, and the weights stay as they are.
STILL: dict[str, Any] = {"learning_rate": 1e-30, "betas": (BETA, 0.95), "max_grad_norm": 1e9}
# What is known of all rows before the first one trains: by rollout, by the step's quantile, by the reference.
SURVEYED: dict[str, Any] = {
    "objective": "sequence_clip",
    "normaliser": "rollouts",
    "top_entropy_quantile": 0.6,
    "entropy_coef": 0.01,
    "kl_coef": 0.1,
    "kl_in_reward": True,
}
# What goes over from one step to the next.
MOVING: dict[str, Any] = {
    "learning_rate": 1e-2,
    "algorithm": "decoupled_ppo",
    "proximal": "last_step",
    "kl_coef": 0.1,
    "reference_sync_steps": 2,
    "num_iterations": 2,
}


def run_file(folder: Path, ranks: int, tied: bool = False, **learner: Any) -> RunConfig:
    path = folder / f"model-{tied}"
    if not path.exists():
        tiny_model(tie_word_embeddings=tied).save_pretrained(path)
    return config(
        LEARNER, model={"path": str(path)}, run={"dir": str(folder)}, learner={"ranks": ranks, **STILL, **learner}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


class Pair:
    """The same trainer twice: of several ranks, and of one."""

    def __init__(self, several: Ranks, alone: PolicyTrainer) -> None:
        self.several = several
        self.alone = alone


def pair(several: RunConfig) -> Iterator[Pair]:
    one = several.model_copy(update={"learner": several.learner.model_copy(update={"ranks": 1})})
    with Ranks(several) as ranks:
        yield Pair(ranks, build_trainer(one, None))


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[Pair]:
    yield from pair(run_file(folder, 3))


@pytest.fixture(scope="module")
def surveyed(folder: Path) -> Iterator[Pair]:
    yield from pair(run_file(folder, 2, **SURVEYED))


@pytest.fixture(scope="module")
def credited(folder: Path) -> Iterator[Pair]:
    yield from pair(run_file(folder, 2, credit="gigpo", objective="gspo", normaliser="sequences"))


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Iterator[Pair]:
    yield from pair(run_file(folder, 2, tied=True, shard_weights=True, **SURVEYED))


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "sharded"])
def moving(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from pair(run_file(folder, 2, tied=True, shard_weights=request.param, **MOVING))


def step(
    trainer: PolicyTrainer, rows: list[PackedRow], rollouts: StepRollouts
) -> tuple[StepMetrics, list[torch.Tensor]]:
    """A step with an optimiser that has made none, and its gradient, of all weights."""
    empty = trainer.state()
    empty["optimiser"] = {**empty["optimiser"], "state": {}}
    trainer.restore(empty)
    metrics = trainer.step(rows, rollouts)
    state = trainer.state()["optimiser"]["state"]
    return metrics, [state[number]["exp_avg"] / (1 - BETA) for number in sorted(state)]


def samples_of(lengths: list[int], per_rollout: int, seed: int) -> list[Sample]:
    """Sequences of which `per_rollout` are of one rollout."""
    found = [sample(length, 3, seed + i, rollout=i // per_rollout) for i, length in enumerate(lengths)]
    for of in found:
        of.weights[-1] = 1.0
    # Every third has been sampled from two ids in each place.
    return [replace(of, mask=two_left(of)) if number % 3 == 2 else of for number, of in enumerate(found)]


def two_left(of: Sample) -> SampledFrom:
    """A sampling mask: each token that trains, and the next id."""
    trained = of.token_ids[of.weights > 0]
    other = (trained + 1) % VOCABULARY
    return SampledFrom(np.stack([trained, other], axis=1).reshape(-1), np.where(of.weights > 0, 2, 0))


steps = given(
    lengths=st.lists(st.integers(6, 40), min_size=1, max_size=8),
    per_rollout=st.integers(1, 3),
    budget=st.integers(40, 120),
    branches=st.booleans(),
    evenly=st.booleans(),
    seed=st.integers(0, 100),
)
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def in_turns(samples: list[Sample], rollouts: StepRollouts) -> tuple[list[Sample], StepRollouts]:
    """Divide each rollout into two turns, in the middle of each sequence, with random rewards at them."""
    rewards = np.random.default_rng(len(rollouts)).normal(size=(len(rollouts), 2))
    turns = StepTurns(np.full(len(rollouts), 2), rewards.ravel(), np.arange(rewards.size) % 3)
    divided = [replace(of, turns=2 * of.rollout + (2 * np.arange(len(of)) >= len(of))) for of in samples]
    return divided, replace(rollouts, rewards=rewards.sum(1), turns=turns)


def compare(
    pair: Pair,
    lengths: list[int],
    per_rollout: int,
    budget: int,
    branches: bool,
    evenly: bool,
    seed: int,
    by_turn: bool = False,
) -> None:
    samples = samples_of(lengths, per_rollout, seed)
    rollouts = step_rollouts(samples)
    if by_turn:
        samples, rollouts = in_turns(samples, rollouts)
    rows = pack(samples, budget, branches, ranks=2 if evenly else 1)
    metrics, gradient = pair.several.call(step, rows, rollouts)
    expected, right = step(pair.alone, pack(samples, budget, branches), rollouts)
    assert len(gradient) == len(right)
    norm = torch.cat([of.flatten() for of in right]).norm()
    apart = torch.cat([(a - b).flatten() for a, b in zip(gradient, right, strict=True)]).norm()
    assert apart <= 1e-5 * max(1.0, norm), f"{float(apart):.3g} of {float(norm):.3g}"
    told, known = (_flat(of) for of in (metrics, expected))
    assert told == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in known.items()}


def _flat(metrics: StepMetrics) -> dict[str, Any]:
    plain = asdict(metrics)
    del plain["train_s"]
    return {**plain.pop("objective"), **plain}


@few
@steps
def test_three_ranks_have_the_gradient_of_one(three: Pair, **given: Any) -> None:
    compare(three, **given)


@few
@steps
def test_two_ranks_know_of_all_rows_what_one_knows(surveyed: Pair, **given: Any) -> None:
    compare(surveyed, **given)


@few
@steps
def test_two_ranks_know_the_advantage_of_each_turn(credited: Pair, **given: Any) -> None:
    compare(credited, **given, by_turn=True)


@few
@steps
def test_two_ranks_that_share_the_weights_out_have_the_gradient_of_one(sharded: Pair, **given: Any) -> None:
    compare(sharded, **given)


@pytest.mark.parametrize("only", [False, True], ids=["mixed in", "alone"])
@pytest.mark.parametrize("team", ["three", "surveyed", "sharded"])
def test_ranks_have_the_gradient_of_one_with_demonstrations(
    request: pytest.FixtureRequest, team: str, only: bool
) -> None:
    """Also where rank 0 has no row of demonstrations, and where another rank has nothing else."""
    several = request.getfixturevalue(team)
    some = conversations([12, 30, 7, 25, 40])
    samples = [] if only else samples_of([20, 30, 25, 12], 2, 0)
    rollouts = StepRollouts.none() if only else step_rollouts(samples)
    for budget, ranks in ((64, 1), (1000, 1), (1000, 3)):
        rows = [*(pack(samples, 1000) if samples else ()), *rows_of(some, 0.5, budget, ranks=ranks)]
        metrics, gradient = several.several.call(step, rows, rollouts)
        expected, right = step(several.alone, rows, rollouts)
        for found, wanted in zip(gradient, right, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        told, known = _flat(metrics), _flat(expected)
        assert told["beside"]["demonstrations/loss"] == pytest.approx(known["beside"]["demonstrations/loss"], rel=1e-5)
        assert told["loss"] == pytest.approx(known["loss"], rel=1e-4)


def steps_and_weights(trainer: PolicyTrainer, batches: list[tuple[list[PackedRow], StepRollouts]]) -> dict[str, Any]:
    for rows, rollouts in batches:
        trainer.step(rows, rollouts)
    return {name: weight.clone() for name, weight in trainer.weights()}


def test_several_steps_make_the_weights_that_one_rank_makes(moving: Pair) -> None:
    """Through the weights before the last step, and a reference that follows."""
    batches = []
    for seed in range(4):
        samples = samples_of([30, 20, 25, 35, 12, 18], 2, 10 * seed)
        batches.append((pack(samples, 64), step_rollouts(samples)))
    found, right = moving.several.call(steps_and_weights, batches), steps_and_weights(moving.alone, batches)
    assert list(found) == list(right)
    for name, weight in right.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-4, msg=name)


def figures(trainer: PolicyTrainer, rows: list[PackedRow], rollouts: StepRollouts) -> list[RankReport]:
    trainer.step(rows, rollouts)
    return trainer.ranks


def test_each_rank_says_what_it_did_and_how_long_it_waited_for_the_slowest(moving: Pair) -> None:
    samples = samples_of([30, 20, 25, 35, 12, 18], 2, 0)
    rows, rollouts = pack(samples, 64), step_rollouts(samples)
    found = moving.several.call(figures, rows, rollouts)
    hands = deal(rows, len(found))
    assert [of.rank for of in found] == list(range(len(found)))
    assert len(found) > 1
    assert [of.tokens for of in found] == [sum(row.tokens for row in hand if not row.is_padding) for hand in hands]
    slowest = max(of.busy_s for of in found)
    for of in found:
        assert 0 < of.busy_s <= of.step_s
        assert of.wait_s == pytest.approx(slowest - of.busy_s)
        assert of.memory_bytes > 10**6
    assert figures(moving.alone, rows, rollouts) == []


def diverge(trainer: PolicyTrainer, rows: list[PackedRow], rollouts: StepRollouts) -> str:
    try:
        trainer.step(rows, rollouts)
    except DivergedError as error:
        return str(error)
    return "it did not"


def test_a_step_that_diverges_is_refused_by_all_and_the_next_one_is_made(three: Pair) -> None:
    samples = samples_of([20, 30, 25, 12], 1, 0)
    rollouts = step_rollouts(samples)
    rows = pack(samples, 40)
    rows[-1].behaviour.fill_(float("nan"))
    assert "no weight was changed" in three.several.call(diverge, rows, rollouts)
    compare(three, [20, 30, 25, 12], 1, 40, True, False, 0)


def test_rows_are_dealt_evenly_and_padding_fills_up() -> None:
    samples = samples_of([40] * 5, 1, 0)
    hands = deal(pack(samples, 40), 3)
    assert [len(hand) for hand in hands] == [2, 2, 2]
    assert [sum(not row.is_padding for row in hand) for hand in hands] == [2, 2, 1]
    assert not hands[0][0].is_padding
    (one,) = pack(samples[:1], 40)
    assert [[row.is_padding for row in hand] for hand in deal([one], 3)] == [[False], [True], [True]]


def test_a_step_is_packed_into_as_many_rows_as_ranks_share_evenly() -> None:
    samples = [
        sample(
            30,
            5,
            i,
            rollout=i,
        )
        for i in range(8)
    ]
    for number, of in enumerate(samples):
        object.__setattr__(of, "group", number)
    assert len(pack(samples, 1000)) == 1
    for ranks in (2, 3, 4):
        rows = pack(samples, 1000, ranks=ranks)
        assert len(rows) == ranks
        assert max(row.cost for row in rows) <= 1.6 * min(row.cost for row in rows)
    assert len(pack(samples[:1], 1000, ranks=4)) == 1, "there is no more to share"
