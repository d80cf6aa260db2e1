"""Cutting what a tool answers before it is tokenised for the policy: one long page must not end an episode, and the
special tokens in it forge no turn.

A result of at most as many bytes as tokens are allowed has no more tokens than that, and is not looked at. Of a longer
one the middle is left out: first by characters, so that never more is tokenised than could fit, then by tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rollout_worker.chat.base import ChatFormat
from rollout_worker.markup import markup_of
from rollout_worker.tools.base import ToolResult
from rollout_worker.user_code import in_thread
from rollout_worker.user_code.texts import without_middle

# Of one token, in text as tools write it: spaces in long rows are a token for many.
_MOST_CHARACTERS_PER_TOKEN = 8

# A little less than what the last try would have kept, so that the next one fits.
_MARGIN = 0.97

_TRIES = 8

CountTokens = Callable[[str], Awaitable[int]]


async def cut(text: str, max_tokens: int, count: CountTokens) -> str:
    """`text` in at most `max_tokens` tokens by `count`: the middle is left out, with a note of how many characters
    those were. Where so few are allowed that the note alone has more, the beginning as far as it fits."""
    if _is_short(text, max_tokens):
        return text
    size = min(len(text), max_tokens * _MOST_CHARACTERS_PER_TOKEN)
    for _ in range(_TRIES):
        shorter = without_middle(text, size)
        tokens = await count(shorter)
        if tokens <= max_tokens:
            return shorter
        size = int(size * _MARGIN * max_tokens / tokens)
        if size < 2:
            break
    return text[: max_tokens // 4]  # a character has at most four bytes, and a byte is at most a token


async def for_policy(results: list[ToolResult], max_tokens: int, chat: ChatFormat) -> list[ToolResult]:
    """Each as the policy may read it: cut, and without special tokens."""
    markup = markup_of(chat.tokenizer)
    short = await cut_results(results, max_tokens, chat)
    broken = [markup.broken_in(result) for result in short]
    # What is broken has more tokens than it had; what was not is the same object.
    return [
        after if after is before else (await cut_results([after], max_tokens, chat))[0]
        for before, after in zip(short, broken, strict=True)
    ]


def told_of_defused(whose: str) -> str:
    """The trouble of an answer in which `for_policy` broke special tokens; `whose`: the tool's, or environment's."""
    return (
        f"{whose}: an answer held the text of special tokens, such as <|im_end|>; a space was put into each, so that "
        f"it cannot speak as another"
    )


async def cut_results(results: list[ToolResult], max_tokens: int, chat: ChatFormat) -> list[ToolResult]:
    """Each with its content cut, as the format's tokenizer counts."""
    return [
        result
        if _is_short(result.content, max_tokens)
        else replace(result, content=await cut(result.content, max_tokens, token_counter(chat.tokenizer)))
        for result in results
    ]


def token_counter(tokenizer: Any) -> CountTokens:
    """Counts with a transformers tokenizer, in a thread."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode(text: str) -> int:
        if backend is None:
            return len(tokenizer.encode(text, add_special_tokens=False))
        # Of the backend's functions this one lets go of the interpreter lock.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding.ids)

    async def count(text: str) -> int:
        return int(await in_thread(encode, text=text))

    return count


def _is_short(text: str, max_tokens: int) -> bool:
    return len(text) <= max_tokens and len(text.encode()) <= max_tokens
