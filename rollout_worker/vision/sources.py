"""Opens images as users and tools give them: a path, bytes, a PIL image, base64 data, an address.

Whatever they hold, opening them raises `ImageError` alone, in bounded time and memory: the size is read from the header
and checked before any pixel is decoded. Opening blocks, so it runs where user code runs.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import sys
import time
import urllib.request
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from http.client import HTTPException
from threading import Lock
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from slipstream.protocol.config import ImagesSection

# Bytes of an encoded image, and seconds that a server may take for each part of it.
MAX_FILE_BYTES = 64 * 1024**2
_FETCH_S = 20.0
# Seconds for the whole of it, and bytes of a part.
_WHOLE_S = 60.0
_CHUNK = 1 << 20

# Longest name of a file; longer text is base64.
_MAX_PATH = 4096

# What is decoded. The others of Pillow run programs (EPS), or are old code for old formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


# Mappings that an image may stand in, one in another.
_MAX_DEPTH = 4

# An open image that several episodes share is read from one file: two threads would get a mixture of rows.
_one_at_a_time = Lock()

# The greatest value of pixels that have more than eight bits, for white.
_WHITE = 65535


class ImageError(ValueError):
    """Raised for an image that cannot be used. The text says why, and what to change."""


def is_picture(value: Any) -> bool:
    """Return whether a value is an image by its type: Pillow's, or an array of uint8 with a channel for each colour."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return True
    array: Any = getattr(value, "__array_interface__", None)
    if not isinstance(array, dict) or array.get("typestr") != "|u1":
        return False
    return len(array["shape"]) == 3 and array["shape"][-1] in (3, 4)


def open_image(source: Any, limits: ImagesSection) -> Any:
    """Return an image as a PIL image of mode RGB; transparent places are white.

    Args:
        source: A path, bytes, an open PIL image, base64 text or a `data:` address, an http(s) address if `images.urls`
            allows it, an array [height, width, channels] of uint8, or a mapping that holds one of these under `image`,
            `url`, `path` or `bytes`.

    Raises:
        ImageError: It is none of these, or no image that can be used.
    """
    from PIL import Image, UnidentifiedImageError

    for _ in range(_MAX_DEPTH):
        if isinstance(source, Mapping):
            source = _inner(source)
    given = isinstance(source, Image.Image)
    try:
        with _one_at_a_time if given else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about sizes and old palettes
            image = source if given else _opened(source, limits)
            _check_size(image, limits)
            return _as_rgb(image)
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(
            f"it has far more pixels than images.max_pixels = {limits.max_pixels}: scale it down"
        ) from None
    except MemoryError:
        raise ImageError("it does not fit into memory; give a smaller image") from None
    except UnidentifiedImageError:
        raise ImageError(f"it is damaged, or of a kind that is not read: give a whole {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow raises many types for damaged files
        what = str(error).strip().partition("\n")[0] or "no reason"
        raise ImageError(f"it cannot be decoded ({type(error).__name__}: {what:.120}); give a whole image") from None


def _inner(source: Mapping[str, Any]) -> Any:
    """Return the image in a part of a message, in OpenAI's `image_url`, or in a data set's struct of bytes and path."""
    for name in ("image", "image_url", "bytes", "url", "path", "data"):
        value = source.get(name)
        if value is not None:
            return value
    raise ImageError(f"it is a mapping with {sorted(map(str, source))[:6]}; give one with 'image', 'url' or 'bytes'")


def _opened(source: Any, limits: ImagesSection) -> Any:
    from PIL import Image

    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif isinstance(source, str | os.PathLike):
        data = _read(os.fspath(source), limits)
    elif hasattr(source, "__array_interface__"):
        if (kind := source.__array_interface__["typestr"][1:]) not in ("u1", "b1"):
            raise ImageError(f"it is an array of type {kind}; give one of uint8, from 0 to 255")
        return Image.fromarray(source)
    else:
        raise ImageError(f"it is a {type(source).__name__}; give a path, bytes or a PIL image")
    if len(data) > MAX_FILE_BYTES:
        raise ImageError(f"it has {len(data)} bytes; at most {MAX_FILE_BYTES} are read: give a smaller one")
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _read(name: str | bytes, limits: ImagesSection) -> bytes:
    name = os.fsdecode(name)
    scheme = name[:64].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return _fetched(name, limits)
    if scheme == "data":
        head, _, body = name.partition(",")
        return _decoded(body) if head.endswith(";base64") else unquote_to_bytes(body)
    path = unquote(name[7:].removeprefix("localhost")) if scheme == "file" and name[5:7] == "//" else name
    if len(path) <= _MAX_PATH and os.path.isfile(path):
        # Files of the kernel may have no end, or none yet.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(MAX_FILE_BYTES + 1) or b""
    try:
        return _decoded(name)
    except ImageError:
        raise ImageError(f"there is no file {name[:120]!r}; give a path that this worker can read") from None


def _decoded(text: str) -> bytes:
    if len(text) > 2 * MAX_FILE_BYTES:
        raise ImageError(f"it has {len(text)} characters of base64; give a smaller image")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("its base64 cannot be read; encode the image's bytes with base64.b64encode") from None


def _fetched(address: str, limits: ImagesSection) -> bytes:
    if not limits.urls:
        raise ImageError(f"{address[:120]} is an address, and images.urls = false: set it to true, or give the bytes")
    try:
        data, until = b"", time.monotonic() + _WHOLE_S
        with urllib.request.urlopen(address, timeout=_FETCH_S) as answer:
            while len(data) <= MAX_FILE_BYTES and (more := answer.read1(_CHUNK)):
                data += more
                if time.monotonic() > until:
                    raise TimeoutError(f"{len(data)} bytes in {_WHOLE_S:g} s")
        return data
    except (OSError, HTTPException, ValueError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ImageError(
            f"{address[:120]} cannot be fetched ({why:.120}); give an address that answers, or the bytes"
        ) from None


def _check_size(image: Any, limits: ImagesSection) -> None:
    width, height = image.size
    if width * height > limits.max_pixels or not width * height:
        raise ImageError(
            f"it has {width} x {height} pixels, images.max_pixels = {limits.max_pixels}: scale it down, or raise that"
        )
    at = image.tell()
    try:
        image.seek(1)
    except EOFError:
        return
    finally:
        image.seek(at)
    raise ImageError("it is animated, or has several pages; give one of its frames")


def _as_rgb(image: Any) -> Any:
    """Return the image in RGB, turned as its camera was held."""
    from PIL import Image, ImageOps

    image.load()
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith(("I", "F")):
        turned = _as_grey(turned)
    if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
        turned = turned.convert("RGBA")
        behind = Image.new("RGBA", turned.size, "white")
        turned = Image.alpha_composite(behind, turned)
    return turned.convert("RGB")


def _as_grey(image: Any) -> Any:
    """Scale pixels of 16 bits to 8. Raises `ImageError` for pixels of other ranges, whose white nothing tells."""
    from PIL import Image

    low, high = image.getextrema()
    if image.mode == "F" or low < 0 or high > _WHITE:
        raise ImageError(
            f"its pixels are of mode {image.mode}, from {low:g} to {high:g}; scale them to 8 bits, from 0 to 255"
        )
    wide = image.convert("I")
    return Image.fromarray((np.asarray(wide) // 257).astype(np.uint8))
