"""Turns an image into what the model takes of it, with the model's own image processor, once.

The processor is transformers' on Pillow and numpy, so that a worker needs no torch. A family of models is an entry of
`FAMILIES`: how many tokens stand for an image, and how servers want its arrays.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.images import Image, digest, pack
from slipstream.rollout_worker.vision.image_items import encode_item
from slipstream.rollout_worker.vision.sources import ImageError, open_image

Arrays = Mapping[str, npt.NDArray[Any]]

# Pixels of the longer side, and JPEG's quality: about 2 kB.
_PREVIEW_SIDE, _PREVIEW_QUALITY = 112, 60


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image as the model sees it. It stands in a message's content part, under `image`.

    Attributes:
        token_id: The placeholder token; `wire.tokens` of them stand for the image.
        wire: As the group carries it.
        item: As servers take it, see `vision.image_items`.
        size: Width and height of the source, in pixels.
        preview: A small JPEG of it, as a `data:` address, for people who read the rollout.
    """

    token_id: int
    wire: Image
    item: str
    size: tuple[int, int]
    preview: str = ""

    def readable(self) -> dict[str, Any]:
        """Return it as conversations keep it, in place of its pixels."""
        width, height = self.size
        return {"hash": self.wire.hash, "width": width, "height": height, "tokens": self.wire.tokens} | (
            {"preview": self.preview} if self.preview else {}
        )

    def __repr__(self) -> str:
        return f"<image of {self.size[0]} x {self.size[1]} pixels>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Seen:
        return self


@dataclass(frozen=True, slots=True)
class Family:
    """How models of some types take images.

    Attributes:
        tokens: Maps an image's arrays, and the processor, to the number of its tokens.
        fields: The kind of field of each array, see `vision.image_items.encode_item`.
    """

    tokens: Callable[[Arrays, Any], int]
    fields: Mapping[str, str]


def _merged_patches(arrays: Arrays, processor: Any) -> int:
    return int(arrays["image_grid_thw"].prod()) // int(processor.merge_size) ** 2


_QWEN = Family(_merged_patches, {"pixel_values": "flat", "image_grid_thw": "batched"})

# By `model_type`.
FAMILIES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN)


class ImageProcessor:
    """Processes images for one model. Safe in several threads.

    Attributes:
        token_id: The placeholder token.
        max_per_episode: Images that a conversation may show.

    Raises:
        ConfigError: The model does not see, its family is not known, or Pillow or its processor is missing.
    """

    def __init__(self, config: RunConfig) -> None:
        self._limits = config.images
        self.max_per_episode = config.images.max_per_episode
        self._max_tokens = config.vllm.max_model_len
        facts = _facts(config)
        kind = facts.get("model_type")
        self.token_id: int = facts.get("image_token_id", facts.get("image_token_index", -1))
        if self.token_id < 0 or "vision_config" not in facts:
            raise ConfigError(
                f"images.enabled = true, and model.path = {config.model.path} is a {kind} without a part that sees: "
                f"choose one that sees, or set images.enabled = false"
            )
        if kind not in FAMILIES:
            raise ConfigError(
                f"images.enabled = true: how servers take images of model.path = {config.model.path}, a {kind}, is not "
                f"known; known are {', '.join(FAMILIES)}"
            )
        self._family = FAMILIES[kind]
        self._processor = _processor(config)

    def see(self, source: Any) -> Seen:
        """Open and process an image, of any form of `open_image`. Blocks. Raises `ImageError`."""
        if isinstance(source, Seen):
            return source
        image = open_image(source, self._limits)
        try:
            made = self._processor.preprocess(image, return_tensors="np")
        except Exception as error:  # transformers raises many types, such as for a line of one pixel
            what = str(error).strip().partition("\n")[0]
            raise ImageError(f"the model's processor refuses it ({what:.160}); scale or crop it") from None
        arrays = {name: np.ascontiguousarray(made[name]) for name in self._family.fields}
        tokens = self._family.tokens(arrays, self._processor)
        if not 0 < tokens < self._max_tokens:
            raise ImageError(
                f"it becomes {tokens} tokens, vllm.max_model_len = {self._max_tokens}: scale it down, or raise that"
            )
        wire = Image(digest(arrays), tokens, {name: pack(array) for name, array in arrays.items()})
        return Seen(self.token_id, wire, encode_item(arrays, self._family.fields), image.size, _preview(image))


def processor_of(config: RunConfig) -> ImageProcessor | None:
    """Return the run's image processor, made once; None if the run has no images. Raises `ConfigError`."""
    if not config.images.enabled:
        return None
    key = repr((config.model.path, config.model.revision, config.images, config.vllm.max_model_len))
    if key not in _made:
        _made.clear()
        _made[key] = ImageProcessor(config)
    return _made[key]


_made: dict[str, ImageProcessor] = {}


def _preview(image: Any) -> str:
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    small.save(file, "JPEG", quality=_PREVIEW_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _facts(config: RunConfig) -> dict[str, Any]:
    from transformers.utils import cached_file

    model = config.model
    try:
        found = cached_file(model.path, "config.json", revision=model.revision or "main")
        facts: dict[str, Any] = json.loads(Path(str(found)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {model.path}: its config.json cannot be read ({error:.200})") from None
    return facts


def _processor(config: RunConfig) -> Any:
    try:
        import PIL  # noqa: F401
        from transformers import AutoImageProcessor
    except ImportError:
        raise ConfigError(
            "images.enabled = true needs Pillow, which is not installed: pip install 'slipstream-rl[vision]'"
        ) from None
    model = config.model
    try:
        return AutoImageProcessor.from_pretrained(model.path, revision=model.revision or "main", backend="pil")
    except Exception as error:  # the type depends on what is missing or broken
        what = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"images.enabled = true: model.path = {model.path} has no image processor that can be loaded "
            f"({what:.200}); save its preprocessor_config.json there"
        ) from None
