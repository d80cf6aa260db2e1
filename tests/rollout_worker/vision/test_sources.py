"""Every form of image that users give is opened; whatever else comes is an `ImageError` with its remedy."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.protocol.config import ImagesSection
from slipstream.rollout_worker.vision.sources import ImageError, open_image

LIMITS = ImagesSection()
RED = Image.new("RGB", (8, 6), "red")


def encoded(image: Image.Image = RED, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with little behind it."""
    chunks = []
    for name, body in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))):
        chunks.append(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


TEXT = base64.b64encode(encoded()).decode()
FORMS: dict[str, Any] = {
    "pil": RED,
    "bytes": encoded(),
    "base64": TEXT,
    "data": f"data:image/png;base64,{TEXT}",
    "openai": {"url": f"data:image/png;base64,{TEXT}"},
    "part": {"type": "image", "image": RED},
    "struct of a data set": {"bytes": encoded(), "path": None},
    "array": np.asarray(RED),
    "grey": Image.new("L", (8, 6)),
    "palette": RED.convert("P"),
    "transparent": Image.new("RGBA", (8, 6), (0, 0, 0, 0)),
    "jpeg": encoded(kind="JPEG"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_opened(form: str) -> None:
    image = open_image(FORMS[form], LIMITS)
    assert (image.mode, image.size) == ("RGB", (8, 6))


def test_a_path_is_opened(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded())
    for path in (tmp_path / "red.png", str(tmp_path / "red.png"), f"file://{tmp_path}/red.png"):
        assert open_image(path, LIMITS).size == (8, 6)


def test_transparent_places_are_white() -> None:
    assert open_image(FORMS["transparent"], LIMITS).getpixel((0, 0)) == (255, 255, 255)


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["image"] = HOLDS_ITSELF

WRONG: dict[str, tuple[Any, str]] = {
    "truncated": (encoded(Image.effect_noise((64, 64), 90))[:1500], "give a whole image"),
    "no image": (b"no image at all", "damaged, or of a kind that is not read: give a whole PNG"),
    "a mapping that holds itself": (HOLDS_ITSELF, "it is a dict; give a path, bytes or a PIL image"),
    "wide array": (np.zeros((4, 4), np.uint16), "an array of type u2; give one of uint8"),
    "fractions": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "of mode F, from 1 to 1; scale them"),
    "beyond 16 bits": (encoded(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF"), "from 70000 to 70000"),
    "bomb": (claiming(60_000, 60_000), "than images.max_pixels = 16777216: scale it down"),
    "large": (claiming(6_000, 6_000), "6000 x 6000 pixels, images.max_pixels = 16777216"),
    "empty": (claiming(0, 0), "it is damaged"),
    "animated": (encoded(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 6), "blue")]), "animated"),
    "address": ("https://example.com/a.png", "images.urls = false: set it to true"),
    "no file": ("/no/such/file.png", "there is no file '/no/such/file.png'"),
    "number": (3, "it is a int; give a path, bytes or a PIL image"),
    "empty mapping": ({"caption": "x"}, "a mapping with ['caption']"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "of a kind that is not read"),
    "array of floats": (np.zeros((2, 2, 3)), "an array of type f8"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_used_is_told_with_its_remedy(kind: str) -> None:
    source, said = WRONG[kind]
    tracemalloc.start()
    try:
        with pytest.raises(ImageError) as told:
            open_image(source, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_an_address_that_does_not_answer_is_told_as_such() -> None:
    with pytest.raises(ImageError, match=r"127\.0\.0\.1:1/a\.png cannot be fetched \(.*refused.*\); give an address"):
        open_image("http://127.0.0.1:1/a.png", ImagesSection(urls=True))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_to_eight(kind: str) -> None:
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    opened = open_image(encoded(Image.fromarray(ramp), kind), LIMITS)
    assert (np.asarray(opened)[..., 0] == np.arange(256).reshape(16, 16)).all()


def test_a_file_of_the_kernel_without_an_end_does_not_hold_a_worker() -> None:
    with pytest.raises(ImageError):
        open_image("/proc/kmsg", LIMITS)


def test_an_open_image_that_episodes_share_is_the_same_for_each(tmp_path: Path) -> None:
    """Pillow reads a file's rows when they are asked for: two threads would each get some."""
    noise = Image.effect_noise((300, 300), 90)
    noise.save(tmp_path / "noise.png")
    right = np.asarray(noise.convert("RGB"))
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            shared = Image.open(tmp_path / "noise.png")
            found = threads.map(lambda image: np.asarray(open_image(image, LIMITS)), [shared] * 8)
            assert all((each == right).all() for each in found)
    frames = Image.open(io.BytesIO(WRONG["animated"][0]))
    with pytest.raises(ImageError, match="animated"):
        open_image(frames, LIMITS)
    assert frames.tell() == 0


def test_texts_that_name_an_image_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "a square.png"
    file.write_bytes(encoded(RED))
    for source in (file.as_uri(), f"file://localhost{file.as_uri()[7:]}", base64.encodebytes(encoded(RED)).decode()):
        assert open_image(source, LIMITS).size == RED.size
