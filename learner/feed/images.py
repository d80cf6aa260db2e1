"""Images of a step's groups, each unpacked once, and their places among token ids.

In a row, the placeholder tokens of image k are -1 - k. So sequences share a prefix only as far as they show the same
images, and a row says by itself where its images stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream.protocol.images import Image, digest, unpack
from slipstream.protocol.messages import Group, Segment


class RowImage(NamedTuple):
    """An image of a row.

    Attributes:
        tokens: Number of tokens that stand for it.
        inputs: Inputs of the network by name, each with the image's own as its first dimension.
    """

    tokens: int
    inputs: dict[str, torch.Tensor]


def unpacked(group: Group) -> dict[str, RowImage]:
    """Return a group's images by hash. Raises `ValueError` for one that is not as a worker makes it: a network would
    take its arrays as they come."""
    return {image.hash: _row_image(image) for image in _images(group)}


class StepImages:
    """Numbers the images of a step."""

    def __init__(self) -> None:
        self.images: dict[int, RowImage] = {}
        self._numbers: dict[str, int] = {}

    def token_ids(
        self, segment: Segment, group: Group, images: dict[str, RowImage]
    ) -> tuple[npt.NDArray[np.int32], dict[int, RowImage]]:
        """Return a segment's ids with -1 - k where image k stands, int32 [T], and its images by number.

        Args:
            images: The group's, as `unpacked` returned them.
        """
        if not segment.images:
            return segment.token_ids, {}
        ids, found = segment.token_ids.copy(), {}
        given = _images(group)
        for place in segment.images:
            hash = given[place.image].hash
            number = self._numbers.setdefault(hash, len(self._numbers))
            ids[place.start : place.start + images[hash].tokens] = -1 - number
            found[number] = images[hash]
        return ids, found


def _images(group: Group) -> list[Image]:
    return group.images or []


# Inputs of the networks that see, by name, with type and dimensions (`rollout_worker.vision.processor.FAMILIES`).
_INPUTS = {"pixel_values": ("float32", 2), "image_grid_thw": ("int64", 2)}


def _row_image(image: Image) -> RowImage:
    arrays = {name: unpack(array) for name, array in image.arrays.items()}
    if {name: (array.dtype.name, array.ndim) for name, array in arrays.items()} != _INPUTS:
        raise ValueError(f"an image has the arrays {sorted(arrays)}; needed are {sorted(_INPUTS)}")
    pixels, grid = arrays["pixel_values"], arrays["image_grid_thw"]
    patches = math.prod(map(int, grid[0])) if grid.shape == (1, 3) and grid.min() > 0 else 0
    merged = math.isqrt(patches // image.tokens)
    if len(pixels) != patches or merged**2 * image.tokens != patches or not np.isfinite(pixels).all():
        raise ValueError(f"an image of {image.tokens} tokens has the grid {grid.tolist()} and {pixels.shape} pixels")
    if any(int(side) % merged for side in grid[0, 1:]) or digest(arrays) != image.hash:
        raise ValueError(f"an image's arrays are not those of its hash {image.hash}")
    return RowImage(image.tokens, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


def joined(images: Iterable[RowImage]) -> dict[str, torch.Tensor]:
    """Return the inputs of several images, one behind the other."""
    every = list(images)
    return {name: torch.cat([image.inputs[name] for image in every]) for name in (every[0].inputs if every else ())}
