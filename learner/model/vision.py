"""Rows with images: whole sequences in batches through all of the network but its output layer.

The network itself embeds the images and counts positions (M-RoPE), so any model of transformers that sees is computed
as its authors do. A row says where its images stand (`learner.feed.images`); a placeholder token that the policy
sampled itself is a token like others, as it is for servers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from slipstream.learner.attention import layouts, paths
from slipstream.learner.feed.images import RowImage, joined
from slipstream.learner.feed.packing import PackedRow, Sample, pack_row
from slipstream.protocol.config import ConfigError

# Types of tokens as transformers numbers them: text 0, images 1.
_TYPES = ("mm_token_type_ids", "token_type_ids")


def states(network: Any, row: PackedRow, one_batch: bool, choosing: layouts.Choosing, **more: Any) -> layouts.States:
    """Run the network over a row with images.

    Args:
        one_batch, choosing: As for `layouts.states`.
        **more: Further arguments of the network.
    """

    def run(batch: paths.PathBatch) -> Any:
        slots = batch.tokens.view(batch.count, batch.length)
        # What pads a sequence repeats the row's first token, which may be an image's.
        pads = (slots == 0) & (torch.arange(batch.length, device=slots.device) > 0)
        ids = row.input_ids[0][slots].masked_fill(pads, 0)
        return _run(network.base_model, network.config, ids, row.images, **more)

    return layouts.in_batches(layouts.sequences(row, one_batch), choosing, run)


def _run(base: Any, config: Any, ids: torch.Tensor, images: dict[int, RowImage], **more: Any) -> Any:
    """Return the network's output for whole sequences.

    Args:
        ids: int64 [B, T], -1 - k where image k stands.
    """
    shown = ids < 0
    token = placeholder(config)
    tokens = torch.where(shown, token, ids)
    inputs = joined(_in_order(ids[shown].tolist(), images))
    if inputs:
        types = shown.to(torch.int64)
        inputs |= {name: types for name in _TYPES if name in inspect.signature(base.forward).parameters}
    with _only_given(base, tokens, shown, token):
        return base(input_ids=tokens, use_cache=False, **inputs, **more)


def placeholder(config: Any) -> int:
    """Return the id of the token that stands for images."""
    return int(getattr(config, "image_token_id", getattr(config, "image_token_index", -1)))


def _in_order(numbers: list[int], images: dict[int, RowImage]) -> Iterator[RowImage]:
    """Yield the images of a batch. `numbers`: -1 - k for each token of image k, sequence by sequence."""
    at = 0
    while at < len(numbers):
        image = images[-1 - numbers[at]]
        yield image
        at += image.tokens


@contextmanager
def _only_given(base: Any, tokens: torch.Tensor, shown: torch.Tensor, token: int) -> Iterator[None]:
    """Let the network put images at the places `shown` alone, where the policy has sampled placeholders besides."""
    if not bool(((tokens == token) & ~shown).any()):
        yield
        return
    of_network = base.get_placeholder_mask
    others = torch.where(shown, tokens, (token + 1) % 2)  # any id that is no placeholder

    def mask(input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        return of_network(others, *args, **named)

    base.get_placeholder_mask = mask
    try:
        yield
    finally:
        del base.get_placeholder_mask


# Nats, mean over a sequence's tokens, as for text (`slipstream.learner.model.build`).
_TOLERANCE, _TOLERANCE_OF_16_BITS = 2e-3, 0.2

# Tokens before and after the image of each made-up sequence, and the image's height and width in merged patches.
_SHAPES = ((3, 5, (2, 2)), (3, 7, (2, 3)), (6, 4, (2, 2)))


@torch.no_grad()
def check(policy: Any) -> None:
    """Raise `ConfigError` if sequences with images that share a row are not scored as the whole network scores each
    alone.

    Images are made up for networks whose vision config says how patches are cut; others are refused.
    """
    network = policy.model
    config = network.config
    vision = getattr(config, "vision_config", None)
    needed = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    sees = placeholder(config) >= 0 and hasattr(network.base_model, "get_placeholder_mask")
    if not sees or not all(hasattr(vision, name) for name in needed):
        raise ConfigError(
            f"images.enabled = true: the learner does not know how {type(network).__name__} takes images: choose a "
            f"model of Qwen's that sees, or set images.enabled = false"
        )
    random = torch.Generator().manual_seed(0)
    samples, alone = [], []
    for number, (before, after, size) in enumerate(_SHAPES):
        image = _made_up(vision, size, random)
        text = torch.randint(policy.vocabulary_size, (before + after,), generator=random)
        text[text == placeholder(config)] = 0
        ids = torch.cat([text[:before], torch.full((image.tokens,), -1 - number), text[before:]])
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[-after + 1 :] = 1
        nothing = np.zeros_like(weights)
        samples.append(
            Sample(
                *(ids.numpy().astype(np.int32), nothing, weights, nothing.astype(np.int32), weights > 0, number),
                images={number: image},
            )
        )
        alone.append(_alone(network, ids.to(policy.device), image)[-after:])
    row = pack_row(samples).to(policy.device)
    scores = policy.at(row, 1.0).logprobs
    apart = max(float((scores[row.rollout == i] - of[1:]).abs().mean()) for i, of in enumerate(alone))
    exact = policy.precision.compute in (torch.float32, torch.float64)
    if not apart <= (_TOLERANCE if exact else _TOLERANCE_OF_16_BITS):
        raise ConfigError(
            f"images.enabled = true: {type(network).__name__} scores sequences with images {apart:.3g} nats a token "
            f"off where they stand in a row, compared with alone: choose another model, or set images.enabled = false"
        )


def _made_up(vision: Any, size: tuple[int, int], random: torch.Generator) -> RowImage:
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    height, width = (merge * side for side in size)
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(height * width, values, generator=random)
    return RowImage(size[0] * size[1], {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})


def _alone(network: Any, ids: torch.Tensor, image: RowImage) -> torch.Tensor:
    """Return the log-prob of each token of a sequence by the network's own forward pass, float32 [T]; 0 at first."""
    shown = (ids < 0)[None]
    tokens = ids.masked_fill(ids < 0, placeholder(network.config))[None]
    inputs = {name: value.to(ids.device) for name, value in image.inputs.items()}
    logits = network(input_ids=tokens, mm_token_type_ids=shown.to(torch.int64), use_cache=False, **inputs).logits
    logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1, device=ids.device), logprobs])
