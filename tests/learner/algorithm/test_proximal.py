from __future__ import annotations

import pytest
import torch

from slipstream.learner.algorithm.corrections import PROXIMALS, ProximalInputs
from slipstream.learner.training.passes import PreviousWeights
from slipstream.protocol.config import LearnerSection
from tests.kit.config import config

INPUTS = ProximalInputs(
    behaviour=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
    logprobs=torch.tensor([-2.0, -2.0, -2.0, -2.0]),
    previous=torch.tensor([-1.9, -1.8, -1.7, -1.6]),
    staleness=torch.tensor([0, 1, 2, 4], dtype=torch.int32),
)


def test_the_run_file_offers_every_way() -> None:
    assert set(PROXIMALS) == set(LearnerSection.model_fields["proximal"].annotation.__args__)  # type: ignore[union-attr]


def test_recomputed_is_the_policy_that_trains_without_a_copy() -> None:
    assert PROXIMALS["recomputed"](INPUTS) is INPUTS.logprobs


def test_last_step_is_the_policy_before_it_and_before_the_first_one_the_policy_itself() -> None:
    assert PROXIMALS["last_step"](INPUTS) is INPUTS.previous
    first = ProximalInputs(INPUTS.behaviour, INPUTS.logprobs, None, INPUTS.staleness)
    assert PROXIMALS["last_step"](first) is INPUTS.logprobs


def test_interpolated_is_one_version_behind_the_policy() -> None:
    """A token of d versions stands 1 / d of the way back to its sampler; one of 0 or 1 versions is the sampler's."""
    expected = torch.tensor([-1.0, -1.0, -1.5, -1.75])
    assert torch.equal(PROXIMALS["interpolated"](INPUTS), expected)


def test_interpolated_is_refused_where_it_could_only_be_the_sampler() -> None:
    settings = {"correction": "decoupled", "proximal": "interpolated"}
    assert config(learner=settings).learner.proximal == "interpolated"
    with pytest.raises(ValueError, match=r"queue.max_staleness = 1: .* learner.correction = decoupled would never do"):
        config(learner=settings, queue={"max_staleness": 1})


def test_previous_weights_are_those_before_the_last_step_and_the_model_gets_its_own_back() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    weight = model.weight
    previous = PreviousWeights(model.parameters())
    assert not previous.known
    for step in range(1, 4):
        weight.data.fill_(step)
        previous.keep()
        weight.data.fill_(step + 1)
        place = weight.data_ptr()
        with previous.in_place():
            assert model.weight is weight
            assert weight.item() == step
        assert weight.item() == step + 1
        assert weight.data_ptr() == place


def test_the_model_gets_its_weights_back_after_an_error_too() -> None:
    model = torch.nn.Linear(1, 1)
    previous = PreviousWeights(model.parameters())
    model.weight.data.fill_(1)
    previous.keep()
    model.weight.data.fill_(2)
    with pytest.raises(RuntimeError, match="out of memory"), previous.in_place():
        raise RuntimeError("out of memory")
    assert model.weight.item() == 2


def test_frozen_weights_are_not_copied() -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    previous = PreviousWeights(model.parameters())
    previous.keep()
    model.weight.data.fill_(5)
    with previous.in_place():
        assert (model.weight == 5).all()
