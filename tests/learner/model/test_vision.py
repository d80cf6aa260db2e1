"""Sequences with images are scored as the whole network scores each alone, however they stand in a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.feed.images import RowImage, StepImages, unpacked
from slipstream.learner.feed.packing import PackedRow, RankRows, Sample, pack
from slipstream.learner.model import vision
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.ranks.messages import decode_message, encode_message
from slipstream.protocol.config import ConfigError, ModelSection
from slipstream.protocol.images import Image, ImagePlace, digest
from slipstream.protocol.images import pack as packed
from tests.kit import group
from tests.kit.seeing import build_seeing

SCORING = Scoring(1.0, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_seeing(tmp_path_factory.mktemp("seeing"))


def load(folder: Path, **model: bool) -> Policy:
    return load_policy(str(folder), ModelSection(path=str(folder), **model), SCORING, longest=200, images=True)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


def image(number: int, height: int = 4) -> RowImage:
    pixels = torch.randn(4 * height, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(number))
    return RowImage(height, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, 4]])})


def sample(ids: list[int], rollout: int, images: dict[int, RowImage], trained: int = 3) -> Sample:
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[-trained:] = 1
    nothing = np.zeros_like(weights)
    return Sample(
        *(np.array(ids, np.int32), nothing, weights, nothing.astype(np.int32), weights > 0, rollout), images=images
    )


def alone(policy: Policy, of: Sample) -> torch.Tensor:
    """Log-probs of the trained tokens by the network's own forward pass."""
    ids = torch.from_numpy(of.token_ids.astype(np.int64))[None]
    token = vision.placeholder(policy.model.config)
    inputs = [of.images[-1 - number] for number in dict.fromkeys(ids[ids < 0].tolist())]
    given = {name: torch.cat([each.inputs[name] for each in inputs]) for name in inputs[0].inputs}
    tokens = ids.masked_fill(ids < 0, token)
    with torch.no_grad():
        logits = policy.model(input_ids=tokens, mm_token_type_ids=(ids < 0).long(), **given).logits[0, :-1]
    found = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return found[torch.from_numpy(of.weights[1:]) > 0]


def rows_of(samples: list[Sample]) -> list[PackedRow]:
    return pack(samples, 200, branches=False)


ONE, TWO = image(1), image(2, height=8)
SHOWS = {
    "one": sample([30, -1, -1, -1, -1, 31, 32, 33, 34], 0, {0: ONE}),
    "another in its place": sample([30, *[-2] * 8, 31, 32, 33, 34], 1, {1: TWO}),
    "two": sample([30, 31, *[-2] * 8, 32, *[-1] * 4, 33, 34, 35], 2, {0: ONE, 1: TWO}),
    "at first": sample([*[-1] * 4, 33, 34, 35], 3, {0: ONE}),
}


def test_sequences_with_images_are_scored_as_each_alone(policy: Policy) -> None:
    (row,) = rows_of([*SHOWS.values()])
    scores = policy(row).logprobs.detach()
    for number, of in enumerate(SHOWS.values()):
        torch.testing.assert_close(scores[row.rollout == number], alone(policy, of), atol=1e-5, rtol=0)


def test_an_image_matters_and_a_prefix_is_shared_only_with_the_same_images(policy: Policy) -> None:
    same = sample([30, -1, -1, -1, -1, 31, 32, 33, 34], 0, {0: ONE})
    other = sample([30, -2, -2, -2, -2, 31, 32, 33, 34], 1, {1: image(3)})
    (row,) = pack([same, other], 200, branches=True)
    assert row.tokens == 1 + 2 * 7  # the last token is only predicted
    scores = policy(row).logprobs.detach()
    apart = scores[row.rollout == 0] - scores[row.rollout == 1]
    assert float(apart.abs().max()) > 1e-3
    for number, of in enumerate((same, other)):
        torch.testing.assert_close(scores[row.rollout == number], alone(policy, of), atol=1e-5, rtol=0)


def test_a_placeholder_that_the_policy_sampled_is_a_token_like_others(policy: Policy) -> None:
    token = vision.placeholder(policy.model.config)
    with_it = sample([30, *[-1] * 4, 31, token, 33, token], 0, {0: ONE})
    before = sample([30, *[-1] * 4, 31, 40], 0, {0: ONE}, trained=1)
    (row,), (of_before,) = rows_of([with_it]), rows_of([before])
    found = policy(row).logprobs.detach()
    assert torch.isfinite(found).all()
    # What stands before it is scored as without it.
    scored = policy(replace(of_before, targets=torch.tensor([token]))).logprobs.detach()
    torch.testing.assert_close(found[:1], scored, atol=1e-5, rtol=0)


def test_the_tower_is_frozen_unless_it_is_to_train(folder: Path, policy: Policy) -> None:
    seeing = load(folder, train_vision=True)
    (row,) = rows_of([SHOWS["one"]])
    for of, trains in ((policy, False), (seeing, True)):
        of.zero_grad()
        of(row).logprobs.sum().backward()
        tower = [parameter.grad is not None for name, parameter in of.model.named_parameters() if "visual" in name]
        assert tower
        assert all(given is trains for given in tower)
        published = [name for name, _ in of.named_weights()]
        assert any("visual" in name for name in published) is trains


def test_a_row_goes_to_another_rank_with_its_images(policy: Policy) -> None:
    (row,) = rows_of([SHOWS["two"]])
    sent = RankRows([row], _Nothing(), False).plain()
    back = decode_message(encode_message({**sent, "rollouts": {}}))["rows"][0]
    images = {number: RowImage(*each) for number, each in back["images"].items()}
    again = PackedRow(**{**back, "images": images})
    torch.testing.assert_close(policy(again).logprobs, policy(row).logprobs)


class _Nothing:
    turns = None


ARRAYS = {
    "pixel_values": np.arange(32, dtype=np.float32).reshape(8, 4),
    "image_grid_thw": np.array([[1, 2, 4]]),
}


def carried(tokens: int = 2, hash: str | None = None, **changed: Any) -> Image:
    arrays = {name: array for name, array in (ARRAYS | changed).items() if array is not None}
    return Image(hash or digest(arrays), tokens, {name: packed(array) for name, array in arrays.items()})


def test_images_of_a_group_are_numbered_once_in_a_step() -> None:
    given = group()
    given.images = [carried()]
    segment = given.rollouts[0].segments[0]
    segment.images = [ImagePlace(0, 0)]
    step = StepImages()
    for _ in range(2):
        ids, images = step.token_ids(segment, given, unpacked(given))
        assert ids[:2].tolist() == [-1, -1]
        np.testing.assert_array_equal(images[0].inputs["pixel_values"].numpy(), ARRAYS["pixel_values"])
    assert segment.token_ids[0] >= 0


NOT_NUMBERS = ARRAYS["pixel_values"].copy()
NOT_NUMBERS[3, 2] = np.nan
FORGED = {
    "no arrays": Image("a", 2, {}),
    "no grid": carried(image_grid_thw=None),
    "an argument of the network": carried(attention_mask=np.zeros((1, 2), np.float32)),
    "other tokens": carried(tokens=1),
    "more tokens than patches": carried(tokens=9),
    "a grid of nothing": carried(image_grid_thw=np.array([[1, 0, 4]])),
    "a grid below nothing": carried(image_grid_thw=np.array([[-1, -2, 4]])),
    "two grids": carried(image_grid_thw=np.array([[1, 2, 2], [1, 2, 2]])),
    "an odd grid": carried(image_grid_thw=np.array([[1, 1, 8]])),
    "fewer pixels": carried(pixel_values=ARRAYS["pixel_values"][:6]),
    "bytes": carried(pixel_values=ARRAYS["pixel_values"].astype(np.uint8)),
    "not numbers": carried(pixel_values=NOT_NUMBERS),
    "another's hash": carried(hash="0" * 32),
}


@pytest.mark.parametrize("kind", FORGED)
def test_i8_an_image_that_no_worker_makes_reaches_no_network(kind: str) -> None:
    given = group()
    given.images = [FORGED[kind]]
    with pytest.raises(ValueError, match="an image"):
        unpacked(given)


def test_a_model_that_does_not_see_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"images\.enabled = true: the learner does not know how"):
        load(model_path)
