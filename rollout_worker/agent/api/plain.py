"""Reads requests for plain completions, which give a prompt as text or token ids, and writes their answers.

Programs that render their own prompts ask in this way. The parameters are those of chat completions, without tools.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.api.messages import ApiError, Faults
from slipstream.rollout_worker.agent.api.request import Asked, Reading, as_object, read_parameters

_OF_CHATS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "response_format")
_FLAGS = {"echo": False, "return_token_ids": False, "add_special_tokens": True, "skip_special_tokens": True}


@dataclass(frozen=True, slots=True)
class PlainAsked:
    """A checked request.

    Attributes:
        prompt: Text, or token ids.
        asked: What it has in common with a request for a chat.
        ids: Whether the answer has token ids (vLLM's return_token_ids).
        special: Whether a prompt of text gets the tokenizer's special tokens, as with vLLM.
        skip_special: Whether the answer's text is without special tokens.
    """

    prompt: str | list[int]
    asked: Asked
    ids: bool
    special: bool
    skip_special: bool


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """One answer: its text, token ids and their log-probs, and the text of each token, empty if not asked for."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[str]
    finish_reason: str


def read_plain(body: Any, reading: Reading) -> PlainAsked:
    """Read a body, decoded from JSON. Raises `ApiError`, which names all faults."""
    given, faults = as_object(body), Faults()
    for name in _OF_CHATS:
        if given.pop(name, None) is not None:
            faults.add(name, "it is not known here; chats have it: ask /v1/chat/completions")
    prompt = _prompt(given.pop("prompt", None), faults)
    flags = {name: given.pop(name, default) for name, default in _FLAGS.items()}
    for name, value in flags.items():
        if not isinstance(value, bool):
            faults.add(name, "give true or false", "invalid_type")
    if flags["echo"] is True:
        faults.add("echo", "the prompt is not sent back; leave it out", "unsupported_value")
    if given.pop("best_of", given.get("n", 1)) != given.get("n", 1):
        faults.add("best_of", "every answer is trained; give n alone", "unsupported_value")
    logprobs = given.pop("logprobs", None)
    if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
        faults.add("logprobs", "only the sampled tokens' are known: give 0, or leave it out")
    asked = read_parameters({**given, "logprobs": logprobs is not None}, reading, faults)
    return PlainAsked(
        prompt, asked, flags["return_token_ids"], flags["add_special_tokens"], flags["skip_special_tokens"]
    )


def _prompt(given: Any, faults: Faults) -> str | list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    is_ids = isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)
    if given and (isinstance(given, str) or is_ids):
        found: str | list[int] = given
        return found
    faults.add("prompt", "give text, or a list of token ids; one prompt a request, not empty")
    return ""


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raise `ApiError` for ids that the tokenizer does not have, as vLLM would."""
    if max(ids) >= vocabulary:
        raise ApiError(400, f"prompt: the token id {max(ids)}; there are {vocabulary}", "invalid_value", ["prompt"])


def encoded(name: str, prompt: Sequence[int], choices: Sequence[PlainChoice], asked: PlainAsked) -> bytes:
    """Return the body of an answer, as vLLM writes it."""
    sampled = sum(len(choice.ids) for choice in choices)
    return msgspec.json.encode(
        {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": SERVED_MODEL_NAME,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": _logprobs(choice) if asked.asked.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    **({"token_ids": choice.ids, "prompt_token_ids": prompt} if asked.ids else {}),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
        }
    )


def _logprobs(choice: PlainChoice) -> dict[str, Any]:
    offsets, at = [], 0
    for token in choice.tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": choice.tokens,
        "token_logprobs": choice.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }
