"""Every optimiser that may be used with sharded weights steps as it does with whole ones, and continues from a
checkpoint of them: two processes, gloo, gradients that are given."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from slipstream.learner.ranks import wrapping
from slipstream.learner.training import optimiser
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.sections.learner import SHARDED
from tests.kit.copies import start_function
from tests.kit.model import tiny_model

dist: Any = torch.distributed

# Arguments that make an optimiser keep or compute something else.
CASES: list[dict[str, Any]] = [
    {"optim": "adamw_torch_fused"},
    {"optim": "adamw_torch_fused", "optim_args": {"amsgrad": True}},
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch", "optim_args": {"foreach": True, "amsgrad": True}},
    {"optim": "sgd"},
    {"optim": "sgd", "optim_args": {"momentum": 0.9, "nesterov": True}},
    {"optim": "adagrad"},
    {"optim": "rmsprop"},
    {"optim": "rmsprop", "optim_args": {"momentum": 0.9, "centered": True}},
    {"optim": "muon"},
    {"optim": "adafactor"},
    {"optim": "adafactor", "optim_args": {"beta1": 0.9}},
]


def name_of(case: dict[str, Any]) -> str:
    return "-".join([case["optim"], *case.get("optim_args", {})])


class Stepper:
    """A model and its optimiser; on ranks that hold parts where it is `sharded`."""

    def __init__(self, case: dict[str, Any], sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = tiny_model(tie_word_embeddings=True)
        if sharded:
            wrapping.sharded(self.model, torch.device("cpu"))
        section = LearnerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=0, **case)
        self.stepper = optimiser.build_optimiser(self.model, section).stepper

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = wrapping.like(gradient, parameter)
        self.stepper.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: wrapping.whole(of).detach().clone() for name, of in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = wrapping.gathered(self.stepper.state_dict(), keep=True)
        return found

    def load(self, state: dict[str, Any]) -> None:
        self.stepper.load_state_dict(wrapping.shared_out(state, self.stepper.param_groups))


def difference(sharded: Stepper, alone: Stepper) -> float:
    right = alone.weights()
    return max(float((weight - right[name]).abs().max()) for name, weight in sharded.weights().items())


def try_one(case: dict[str, Any]) -> list[float]:
    """How far weights are from those of one process, after each of four steps; a new optimiser makes the last two."""
    sharded, alone = Stepper(case, sharded=True), Stepper(case, sharded=False)
    assert any(isinstance(parameter, DTensor) for parameter in sharded.model.parameters())
    apart = []
    for seed in range(4):
        if seed == 2:
            state, weights = sharded.state(), sharded.weights()
            sharded = Stepper(case, sharded=True)
            for name, parameter in sharded.model.named_parameters():
                parameter.data.copy_(wrapping.like(weights[name], parameter))
            sharded.load(state)
        sharded.step(seed)
        alone.step(seed)
        apart.append(difference(sharded, alone))
    return apart


def rank(number: int, store: str, pipe: int) -> None:
    answers = Connection(pipe)
    torch.set_num_threads(1)
    # Muon's products are in bfloat16, in which the order of a sum shows; here it is to be the only difference.
    setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # noqa: B010
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    for case in CASES:
        try:
            found: Any = try_one(case)
        except Exception:
            found = traceback.format_exc()
        if number == 0:
            answers.send((name_of(case), found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    store = str(tmp_path_factory.mktemp("store") / "store")
    processes = [
        start_function(["slipstream.learner.run"], rank, number, store, pipes=[theirs.fileno()]) for number in (0, 1)
    ]
    theirs.close()
    found = {}
    try:
        for _ in CASES:
            assert ours.poll(240), "the ranks do not answer"
            name, answer = ours.recv()
            found[name] = answer
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case["optim"] in SHARDED], ids=name_of)
def test_steps_are_those_of_one_process_over_a_checkpoint(tried: dict[str, Any], case: dict[str, Any]) -> None:
    apart = tried[name_of(case)]
    assert isinstance(apart, list), apart
    assert max(apart) < 1e-5


@pytest.mark.parametrize("case", [case for case in CASES if case["optim"] not in SHARDED], ids=name_of)
def test_what_is_refused_does_not_step(tried: dict[str, Any], case: dict[str, Any]) -> None:
    assert "DTensor" in tried[name_of(case)]


def test_every_optimiser_that_is_taken_is_tried() -> None:
    assert {case["optim"] for case in CASES} >= SHARDED
