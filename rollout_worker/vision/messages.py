"""Finds images in prompts and conversations, and the places of their tokens.

Rows may have TRL's forms: content parts `{"type": "image", "image": ...}`, or a column `image` or `images` next to a
prompt, whose images then fill the parts that name none, stand at LLaVA's markers `<image>`, or before the first user's
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.vision.processor import ImageProcessor, Seen
from slipstream.rollout_worker.vision.sources import ImageError

# Types of content parts that hold an image: transformers' and OpenAI's.
PARTS = ("image", "image_url", "input_image")

COLUMNS = ("images", "image")

# Where an image stands in a text, in data sets made for LLaVA.
_MARKER = "<image>"
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff")


class Placed(NamedTuple):
    """An image, and the index of its first token in a segment."""

    image: Seen
    start: int

    def moved(self, by: int) -> Placed:
        return Placed(self.image, self.start + by)


def has_images(prompt: Any) -> bool:
    """Tell whether some message of a prompt has a part that is an image."""
    return not isinstance(prompt, str) and any(_is_image(part) for message in prompt for part in _parts(message))


def column_with_images(columns: Mapping[str, Any]) -> str | None:
    """Name the column that holds images in one of TRL's forms; None if there is none. A text is taken for an image only
    if it ends as an image file does: a column `image` may name a container."""
    for name in COLUMNS:
        given = columns.get(name)
        if any(map(_holds_image, given if isinstance(given, list | tuple) else [given])):
            return name
    return None


def _holds_image(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:image/") or value.lower().endswith(_ENDINGS)
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or _holds_image(value.get("path"))
    return isinstance(value, bytes) or type(value).__module__.startswith("PIL.")


def seen_prompt(prompt: Any, columns: Mapping[str, Any], processor: ImageProcessor | None) -> Any:
    """Return a row's prompt with every image opened and processed. Blocks.

    Args:
        prompt: Text or messages, as the row has it.
        columns: The row's other columns.
        processor: None returns the prompt as it is.

    Raises:
        ImageError: An image cannot be used, or images and parts do not match.
    """
    if processor is None:
        return prompt
    given = next((columns[name] for name in COLUMNS if columns.get(name) is not None), None)
    beside = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if isinstance(prompt, str):
        if beside:
            raise ImageError("the prompt is text, and images need a conversation: make it a list of messages")
        return prompt
    messages = [dict(message) for message in prompt]
    shown = sum(_is_image(part) for message in messages for part in _parts(message))
    _check_count(max(shown, len(beside)), processor)
    if beside and not any(_is_image(part) for message in messages for part in _parts(message)):
        messages = _with_places(messages, len(beside))
    waiting = iter(beside)
    found = [
        {**message, "content": [_seen(part, waiting, processor, f"message {number}") for part in _parts(message)]}
        if any(_is_image(part) for part in _parts(message))
        else message
        for number, message in enumerate(messages)
    ]
    if left := len(list(waiting)):
        raise ImageError(f"{left} of its {len(beside)} images have no part of type 'image' in the prompt")
    return found


def seen_parts(parts: Iterable[Any], processor: ImageProcessor, text: Callable[[str], str] = str) -> list[Any]:
    """Return content parts, as plain data, with every image opened and processed. Blocks.

    Args:
        text: Changes the texts.

    Raises:
        ImageError: An image cannot be used, or a part is neither text nor an image.
    """
    found, parts = [], list(parts)
    _check_count(sum(map(_is_image, parts)), processor)
    for number, part in enumerate(parts):
        if _is_image(part):
            found.append(_seen(part, iter(()), processor, f"part {number}"))
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": text(part["text"])})
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ImageError(f"part {number} is of type {kind!r:.80}; the policy takes text and images")
    return found


def _check_count(count: int, processor: ImageProcessor) -> None:
    """Raise `ImageError` for more images than an episode may show, before any is opened."""
    if count > processor.max_per_episode:
        raise ImageError(
            f"it shows {count} images, images.max_per_episode = {processor.max_per_episode}: show fewer, or raise that"
        )


def placeholder_text(messages: Iterable[Message], written: str) -> str | None:
    """Return where a text of a conversation has the text of a placeholder; None if none has."""
    for number, message in enumerate(messages):
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part.get("text") for part in _parts(message)]
        if any(isinstance(text, str) and written in text for text in texts):
            return f"message {number}"
    return None


def images_of(messages: str | Sequence[Message]) -> list[Seen]:
    """List the images of a conversation in their order."""
    if isinstance(messages, str):
        return []
    return [part["image"] for message in messages for part in _parts(message) if _is_image(part)]


def expanded(ids: list[int], images: Sequence[Seen], token: int) -> list[int]:
    """Return ids with each image's one placeholder `token` as many times as the image has tokens.

    Raises:
        ImageError: There are more or fewer placeholders than images.
    """
    if (count := ids.count(token)) != len(images):
        raise ImageError(
            f"it has {len(images)} images, and its template and texts write {count} placeholders: the text of a "
            f"placeholder may not stand in a message, and the template must write one for each image"
        )
    waiting, found = iter(images), list[int]()
    for each in ids:
        found += [token] * next(waiting).wire.tokens if each == token else [each]
    return found


def placed(ids: Sequence[int], images: Sequence[Seen], start: int = 0) -> list[Placed]:
    """Find the tokens of images in ids that `expanded` returned. `start`: index of the first id in its segment."""
    found, at = list[Placed](), 0
    for image in images:
        at = ids.index(image.token_id, at)
        found.append(Placed(image, start + at))
        at += image.wire.tokens
    return found


def _with_places(messages: list[Message], count: int) -> list[Message]:
    """Put parts for images in place of the markers in texts; without any, before the text of the first user's message.

    Raises:
        ImageError: There are more or fewer markers than images, or no user's message.
    """
    whole = [{**message, "content": list(_at_markers(message))} for message in messages]
    if marked := sum(_is_image(part) for message in whole for part in message["content"]):
        if marked != count:
            raise ImageError(
                f"its texts have {marked} markers {_MARKER} for {count} images: give as many of each, or no markers"
            )
        return [new if any(map(_is_image, new["content"])) else old for old, new in zip(messages, whole, strict=True)]
    for number, message in enumerate(messages):
        if message.get("role") == "user":
            content = message.get("content")
            text = [{"type": "text", "text": content}] if isinstance(content, str) else list(_parts(message))
            parts = [*({"type": "image"} for _ in range(count)), *text]
            return [*messages[:number], {**message, "content": parts}, *messages[number + 1 :]]
    raise ImageError("the row has images, and no user's message that could show them")


def _at_markers(message: Message) -> Iterator[Any]:
    """Yield a message's content as parts, each marker as a part for an image."""
    content = message.get("content")
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else _parts(message):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            yield part
            continue
        for place, piece in enumerate(text.split(_MARKER)):
            if place:
                yield {"type": "image"}
            if piece:
                yield {**part, "text": piece}


def _seen(part: Any, waiting: Iterator[Any], processor: ImageProcessor, where: str) -> Any:
    if not _is_image(part):
        return part
    names = (part["type"], "image", "image_url", "url", "path", "bytes", "data")
    source = next((part[name] for name in names if part.get(name) is not None), None)
    if source is None:
        source = next(waiting, None)
    if source is None:
        raise ImageError(
            f"{where} has a part of type {part['type']!r} without an image: put it there under 'image', or into the "
            f"row's column 'image' or 'images', one for each such part"
        )
    try:
        return {"type": "image", "image": processor.see(source)}
    except ImageError as error:
        raise ImageError(f"the image of {where}: {error}") from None


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS
