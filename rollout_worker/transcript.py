"""A conversation as UTF-8 JSON for a person to read: the prompt's messages and those after it, within a bound.

What a message may hold is the user's and the policy's: whatever it is, JSON comes out and nothing is raised (I9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_worker.chat.base import Message
from rollout_worker.user_code.texts import without_middle

MAX_BYTES = 64 * 1024
# Of one text. A byte of a message may take six in JSON.
MAX_TEXT = 8 * 1024

_encoder = json.JSONEncoder(ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")


def of_prompt(prompt: str | Sequence[Message]) -> list[bytes]:
    """Each message of a prompt; a text is one of role `prompt`."""
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    return [_as_json(message) for message in messages]


def transcript(prompt: Sequence[bytes], messages: Iterable[Message]) -> bytes:
    """A prompt, as `of_prompt` gives it, and the messages after it: a JSON list of at most `MAX_BYTES`. A longer
    conversation keeps its beginning and its end, with a message of role `note` in between."""
    pieces = [*prompt, *map(_as_json, messages)]
    if sum(map(len, pieces)) + len(pieces) + 1 > MAX_BYTES:
        pieces = _shortened(pieces)
    return b"[" + b",".join(pieces) + b"]"


def _as_json(message: Mapping[str, Any]) -> bytes:
    """A lone surrogate becomes a question mark, a number that JSON lacks null, an object the name of its type."""
    try:
        content = message.get("content")
        if isinstance(content, str) and len(content) > MAX_TEXT:
            message = {**message, "content": without_middle(content, MAX_TEXT)}
        text = _encoder.encode({**message})
        if "NaN" in text or "Infinity" in text:
            text = _encoder.encode(json.loads(text, parse_constant=lambda name: None))
    except Exception as error:
        text = _note(f"a message that cannot be written as JSON ({type(error).__name__})")
    return text.encode("utf-8", "replace")


def _shortened(pieces: list[bytes]) -> list[bytes]:
    room = MAX_BYTES // 2 - 128
    head = _fitting(pieces, room)
    tail = _fitting(reversed(pieces[len(head) :]), room)
    note = _note(f"{len(pieces) - len(head) - len(tail)} messages left out")
    return [*head, note.encode(), *reversed(tail)]


def _fitting(pieces: Iterable[bytes], room: int) -> list[bytes]:
    """As many of the first pieces as there is room for."""
    fitting: list[bytes] = []
    for piece in pieces:
        room -= len(piece) + 1
        if room < 0:
            break
        fitting.append(piece)
    return fitting


def _note(text: str) -> str:
    return json.dumps({"role": "note", "content": text})
