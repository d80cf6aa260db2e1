"""Sharded weights in mixed precision: layers travel in the type that computes, gradients are summed in float32, and a
step is the one that a rank with whole masters makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.learner.feed.packing import pack
from slipstream.learner.model.precision import find_rounding_warning
from slipstream.learner.ranks import wrapping
from slipstream.learner.run import build_trainer
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import RunConfig
from tests.kit import LEARNER, config
from tests.kit.learner import step_rollouts
from tests.kit.model import tiny_model
from tests.kit.ranks import Ranks
from tests.learner.ranks.test_ranks import STILL, samples_of, step

LENGTHS = [30, 20, 25, 35, 12, 18]


def run_file(folder: Path, dtype: str, ranks: int) -> RunConfig:
    path = folder / "model"
    if not path.exists():
        tiny_model(tie_word_embeddings=True).save_pretrained(path)
    model = {"path": str(path), "dtype": dtype}
    learner = {"ranks": ranks, "shard_weights": ranks > 1, **STILL}
    return config(LEARNER, model=model, run={"dir": str(folder)}, learner=learner)


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of whole tensors that ranks gather and reduce, by type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for what, name in (("gathered", "_allgather_base_"), ("reduced", "_reduce_scatter_base_")):
            if func.__name__.startswith(name):
                whole = max(args[:2], key=torch.numel)
                key = what, whole.dtype
                self.elements[key] = self.elements.get(key, 0) + whole.numel()
        return func(*args, **(kwargs or {}))


def step_and_traffic(trainer: PolicyTrainer) -> tuple[list[torch.Tensor], dict[tuple[str, torch.dtype], int]]:
    """The gradient of a step, and its traffic."""
    samples = samples_of(LENGTHS, 2, 0)
    with Traffic() as traffic:
        _, gradient = step(trainer, pack(samples, 64, ranks=2), step_rollouts(samples))
    return gradient, traffic.elements


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Iterator[Any]:
    with Ranks(run_file(folder, "bfloat16", 2)) as ranks:
        yield ranks.call(step_and_traffic)


def test_layers_travel_in_the_type_that_computes_and_gradients_in_float32(mixed: Any) -> None:
    _, traffic = mixed
    model = tiny_model(tie_word_embeddings=True)
    layers = sum(of.numel() for of in model.model.layers.parameters())
    rest = sum(of.numel() for of in model.parameters()) - layers
    # Two rows on a rank: a layer is gathered before each pass, forward and backward, and the rest once a row.
    rows = traffic["reduced", torch.float32] / (layers + rest)
    assert rows == pytest.approx(2, rel=0.05)
    assert traffic["gathered", torch.bfloat16] == pytest.approx(rows * 2 * layers, rel=0.05)
    assert traffic["gathered", torch.float32] == pytest.approx(rows * rest, rel=0.05)
    assert set(traffic) == {
        ("gathered", torch.bfloat16),
        ("gathered", torch.float32),
        ("reduced", torch.float32),
    }


def test_the_gradient_is_that_of_a_rank_with_whole_masters(mixed: Any, folder: Path) -> None:
    """Up to the rounding of norms' weights and of the layers' gradients to bfloat16, which is a part of what computing
    in it costs."""
    gradient, _ = mixed
    samples = samples_of(LENGTHS, 2, 0)
    rows, rollouts = pack(samples, 64, ranks=2), step_rollouts(samples)
    _, whole = step(build_trainer(run_file(folder, "bfloat16", 1), None), rows, rollouts)
    _, exact = step(build_trainer(run_file(folder, "float32", 1), None), rows, rollouts)
    assert [of.dtype for of in gradient] == [torch.float32] * len(exact)
    apart, cost = (distance(ours, theirs) for ours, theirs in ((gradient, whole), (whole, exact)))
    assert apart < cost
    assert distance(gradient, exact) < 1.2 * cost


def warned(trainer: PolicyTrainer) -> str | None:
    return find_rounding_warning(trainer.policy.precision, partial(wrapping.own_weights, trainer.policy), 1e-6)


def test_rank_0_judges_the_rounding_of_steps_by_its_own_rows(folder: Path) -> None:
    """Without the other ranks: nothing is gathered for a warning."""
    settings = run_file(folder, "bfloat16", 2)
    learner = settings.learner.model_copy(update={"weights_dtype": "model"})
    with Ranks(settings.model_copy(update={"learner": learner})) as ranks:
        said = ranks.call(warned)
    assert said is not None
    assert "a step changes" in said


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    norm = torch.cat([of.flatten() for of in right]).norm()
    return float(torch.cat([(a - b).flatten() for a, b in zip(left, right, strict=True)]).norm() / norm)
