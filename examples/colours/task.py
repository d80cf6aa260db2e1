"""Defines two tasks that need eyes: name a square's colour, in the prompt's image or in one that a tool returns."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

from slipstream import Task

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
}
SIDE = 48


def draw(colour: str, rng: random.Random) -> Image.Image:
    """Draw a square of a colour somewhere on a grey field, with noise."""
    picture = Image.new("RGB", (SIDE, SIDE), (rng.randint(150, 210),) * 3)
    pen = ImageDraw.Draw(picture)
    side = rng.randint(14, 24)
    left, top = rng.randint(0, SIDE - side), rng.randint(0, SIDE - side)
    shade = tuple(min(255, max(0, part + rng.randint(-15, 15))) for part in COLOURS[colour])
    pen.rectangle((left, top, left + side, top + side), fill=shade)
    return picture


def picture_of(box: int) -> tuple[str, Image.Image]:
    """Return the colour in a box, and its picture; a box always holds the same."""
    rng = random.Random(7_000_000 + box)
    colour = rng.choice(sorted(COLOURS))
    return colour, draw(colour, rng)


def open_box(number: int) -> list[dict[str, Any]]:
    """Open a box and look into it.

    Args:
        number: The box.
    """
    return [{"type": "image", "image": picture_of(number)[1]}]


def named(completions: list[list[dict[str, Any]]], colour: list[str], **_: Any) -> list[float]:
    """Return 1.0 for each completion whose last message is the colour alone, else 0.0."""
    return [float(completion[-1]["content"] == right) for completion, right in zip(completions, colour, strict=True)]


def shown_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts that show a square."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        colour = rng.choice(sorted(COLOURS))
        content = [{"type": "image", "image": draw(colour, rng)}, {"type": "text", "text": "Which colour?"}]
        found.append({"prompt": [{"role": "user", "content": content}], "colour": colour})
    return found


def boxed_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts that ask for the colour in a box."""
    rng = random.Random(seed)
    boxes = [rng.randint(0, 999) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"Which colour is in box {box}?"}], "colour": picture_of(box)[0]}
        for box in boxes
    ]


task = Task(dataset=shown_rows(2048, seed=1), rewards=[named])
boxes = Task(dataset=boxed_rows(2048, seed=1), tools=[open_box], rewards=[named])
