"""Images of a step's groups, each unpacked once, and their places among token ids.

In a row, the placeholder tokens of image k are -1 - k. So sequences share a prefix only as far as they show the same
images, and a row says by itself where its images stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from protocol.images import Image, unpack
from protocol.messages import Group, Segment


class RowImage(NamedTuple):
    """An image of a row.

    Attributes:
        tokens: Number of tokens that stand for it.
        inputs: Inputs of the network by name, each with the image's own as its first dimension.
    """

    tokens: int
    inputs: dict[str, torch.Tensor]


def unpacked(group: Group) -> dict[str, RowImage]:
    """Return a group's images by hash. Raises `ValueError` for one that cannot be unpacked."""
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


def _row_image(image: Image) -> RowImage:
    return RowImage(
        image.tokens, {name: torch.from_numpy(unpack(array).copy()) for name, array in image.arrays.items()}
    )


def joined(images: Iterable[RowImage]) -> dict[str, torch.Tensor]:
    """Return the inputs of several images, one behind the other."""
    every = list(images)
    return {name: torch.cat([image.inputs[name] for image in every]) for name in (every[0].inputs if every else ())}
