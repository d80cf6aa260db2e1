"""Images of rows become placeholder tokens and features, in TRL's forms and ours; what does not fit is told."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.images import unpack
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.group import of_prompt, transcript
from slipstream.rollout_worker.task.row_reader import plain_columns
from slipstream.rollout_worker.tools.base import as_content
from slipstream.rollout_worker.vision.messages import images_of, placed
from slipstream.rollout_worker.vision.processor import Seen, _made
from tests.kit import config
from tests.kit.seeing import build_seeing

RED, BLUE = Image.new("RGB", (48, 48), "red"), Image.new("RGB", (48, 96), "blue")
SAID = {"type": "text", "text": "Which colour?"}


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = build_seeing(tmp_path_factory.mktemp("seeing"))
    return config(model={"path": str(folder)}, images={"enabled": True, "max_per_episode": 3})


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def png_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_of(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(image)).decode()}"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


ROWS = {
    "parts": {"prompt": user(part(RED), part(BLUE), SAID)},
    "column": {"prompt": [{"role": "user", "content": "Which colour?"}], "images": [RED, BLUE]},
    "LLaVA's markers": {"prompt": [{"role": "user", "content": "<image>\n<image> Which?"}], "images": [RED, BLUE]},
    "parts that name none": {"prompt": user({"type": "image"}, {"type": "image"}, SAID), "images": [RED, BLUE]},
}


@pytest.mark.parametrize("form", ROWS)
async def test_each_image_has_its_tokens_in_order(run: RunConfig, form: str) -> None:
    chat = build_chat_format(run, [])
    prompt = plain_columns(ROWS[form], chat.images)["prompt"]
    ids = await chat.prompt_ids(prompt)
    first, second = placed(ids, images_of(prompt), start=100)
    assert (first.image.size, second.image.size) == ((48, 48), (48, 96))
    assert [each.image.wire.tokens for each in (first, second)] == [9, 18]
    token = first.image.token_id
    assert ids.count(token) == 27
    for image, start in (first, second):
        assert ids[start - 100 : start - 100 + image.wire.tokens] == [token] * image.wire.tokens
        arrays = {name: unpack(array) for name, array in image.wire.arrays.items()}
        assert arrays["pixel_values"].shape == (4 * image.wire.tokens, 3 * 2 * 8 * 8)
        assert arrays["image_grid_thw"].tolist() == [[1, image.size[1] // 8, image.size[0] // 8]]


async def test_a_tools_image_is_part_of_the_suffix(run: RunConfig) -> None:
    chat = build_chat_format(run, [])
    assert chat.images is not None
    seen: Seen = chat.images.see(RED)
    ids = await chat.suffix_ids([1], [2], [{"role": "user", "content": [part(seen), SAID]}])
    assert ids is not None
    assert ids.count(seen.token_id) == 9


def test_the_same_pixels_have_the_same_hash(run: RunConfig) -> None:
    chat = build_chat_format(run, [])
    assert chat.images is not None
    red, again, blue = (chat.images.see(image).wire.hash for image in (RED, RED.copy(), BLUE))
    assert red == again != blue


REFUSED = {
    "a placeholder in a text": (
        user(part(RED), {"type": "text", "text": "<|image_pad|>"}),
        "message 0 holds <.image",
    ),
    "an image to continue with": (
        [*user(SAID), {**user(part(RED))[0], "role": "assistant"}],
        "show the image in a user's",
    ),
    "a placeholder in place of a dropped image": (
        [{"role": "system", "content": [part(RED)]}, *user(part(BLUE), said("<|image_pad|>"))],
        "the text of message 1 holds",
    ),
    "a placeholder alone": (
        [{"role": "user", "content": "<|image_pad|>"}],
        "message 0 holds <.image",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_prompts_that_do_not_fit_their_images_are_refused(run: RunConfig, kind: str) -> None:
    prompt, said = REFUSED[kind]
    chat = build_chat_format(run, [])
    with pytest.raises(PromptError, match=said):
        await chat.prompt_ids(plain_columns({"prompt": prompt}, chat.images)["prompt"])


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"prompt": "Which?", "images": [RED]}, "images need a conversation"),
    "too many": ({"prompt": user(part(RED)), "images": [BLUE]}, "1 of its 1 images have no part"),
    "more than may be shown": ({"prompt": user(*[part(RED)] * 4)}, "it shows 4 images, images.max_per_episode = 3"),
    "too few": ({"prompt": user({"type": "image"})}, "without an image: put it there under 'image', or into the row's"),
    "markers": (
        {"prompt": [{"role": "user", "content": "<image><image>"}], "images": [RED]},
        "2 markers <image> for 1",
    ),
    "damaged": ({"prompt": user(part(b"\x89PNG"))}, "the image of message 0: it is damaged"),
    "a line": ({"prompt": user(part(Image.new("RGB", (900, 1))))}, "the model's processor refuses it"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_rows_whose_images_cannot_be_used_are_told(run: RunConfig, kind: str) -> None:
    row, said = UNUSABLE[kind]
    with pytest.raises(ValueError, match=said):
        plain_columns(row, build_chat_format(run, []).images)


def test_without_images_enabled_a_row_with_one_is_refused_with_the_setting() -> None:
    with pytest.raises(ValueError, match=r"images\.enabled = false: set it to true"):
        plain_columns({"prompt": user(part(RED))})
    for name, images in (("images", [RED]), ("image", "red.png"), ("image", {"bytes": b"x", "path": None})):
        with pytest.raises(ValueError, match=f"its column '{name}' holds an image, and images.enabled = false"):
            plain_columns({"prompt": "Which?", name: images})
    for other in ("docker.io/python:3.11", None, 7):
        assert plain_columns({"prompt": "Which?", "image": other})["prompt"] == "Which?"


def test_models_that_do_not_see_or_are_not_known_are_refused_at_the_start(run: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(run.model.path, tmp_path, dirs_exist_ok=True)
    facts = json.loads((tmp_path / "config.json").read_text())
    blind = {name: value for name, value in facts.items() if name != "vision_config"}
    for changed, said in ((blind, "choose one that sees"), ({**facts, "model_type": "other"}, "is not known")):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=said):
            build_chat_format(config(model={"path": str(tmp_path)}, images={"enabled": True}), [])
        _made.clear()


def test_a_conversation_keeps_an_images_hash_size_and_preview(run: RunConfig) -> None:
    """So that a person who reads the rollout sees what the policy saw; of many images, without the previews."""
    chat = build_chat_format(run, [])
    few = plain_columns({"prompt": user(part(RED), SAID)}, chat.images)["prompt"]
    (message,) = json.loads(transcript(of_prompt(few), []))
    shown, text = message["content"]
    image = images_of(few)[0]
    assert text == SAID
    assert (shown["image"]["hash"], shown["image"]["tokens"]) == (image.wire.hash, 9)
    assert (shown["image"]["width"], shown["image"]["height"]) == (48, 48)
    head, _, body = shown["image"]["preview"].partition(",")
    assert head == "data:image/jpeg;base64"
    opened = Image.open(io.BytesIO(base64.b64decode(body)))
    assert opened.getpixel((20, 20))[0] > 200
    assert len(body) < 4_000
    many = [{"role": "user", "content": [*few[0]["content"]] * 40}, *few]
    kept = json.loads(transcript(of_prompt(many), []))
    assert [len(message["content"]) for message in kept] == [80, 2]
    assert kept[0]["content"][0]["image"]["preview"] == ""
    assert kept[0]["content"][0]["image"]["hash"] == image.wire.hash


def test_images_beyond_what_may_be_shown_are_not_opened(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty of them took 4.5 GB before they were counted."""
    images = build_chat_format(run, []).images
    assert images is not None
    monkeypatch.setattr(type(images), "see", None)
    for many in ({"prompt": user(*[part(RED)] * 60)}, {"prompt": user(SAID), "images": [RED] * 60}):
        with pytest.raises(ValueError, match=r"it shows 60 images, images\.max_per_episode = 3"):
            plain_columns(many, images)
    with pytest.raises(ValueError, match="it shows 60 images"):
        as_content([RED] * 60, images)


GIVEN: list[Any] = [
    [RED],
    (RED, "see"),
    ["see", part(RED)],
    {"type": "input_image", "image_url": data_of(RED)},
    {"type": "image", "bytes": png_of(RED)},
    np.asarray(RED),
    type("Mine", (Image.Image,), {})()._new(RED.im),
]


@pytest.mark.parametrize("number", range(len(GIVEN)))
def test_a_tools_image_is_seen_in_every_form_that_rows_take(run: RunConfig, number: int) -> None:
    content = as_content(GIVEN[number], build_chat_format(run, []).images)
    assert [each["image"].size for each in content if each["type"] == "image"] == [RED.size]
    assert all(each["text"] == "see" for each in content if each["type"] == "text")


def test_lists_without_an_image_stay_text(run: RunConfig) -> None:
    images = build_chat_format(run, []).images
    for plain in (["a", "b"], [1, "a"], {"type": "house"}, [{"type": "text", "text": "a"}], np.zeros((2, 2), np.uint8)):
        assert as_content(plain, images) == as_content(plain, None)
