"""Cutting what a tool answers before it is tokenised for the policy: one long page must not end an episode, and the
special tokens in it forge no turn.

A result of at most as many bytes as tokens are allowed has no more tokens than that, and is not looked at. Of a longer
one the middle is left out: first by characters, so that never more is tokenised than could fit, then by tokens.

The chat markup in what tools answer, broken before it is tokenised: a page that holds a special token's text, such
as `<|im_end|>`, would end the tool's message and speak on as whom it likes.

A space is put behind the first character of each such text: the policy can still read it, and no tokenizer makes a
special token of it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rollout_worker.chat.base import ChatFormat
from rollout_worker.tools.base import ToolResult
from rollout_worker.user_code import in_thread
from rollout_worker.user_code.values import without_middle

# Of the added tokens that are not special, those of chats; others, such as Gemma's <table>, are what pages are made of.
_OF_CHATS = re.compile(r"</?(think|tools?|tool_\w+|function\w*)>|<[|｜].*[|｜]>|\[/?[A-Z_]+\]")


class Markup:
    """The texts of a tokenizer's special tokens. `tokens`: as they are written."""

    def __init__(self, tokens: Collection[str]) -> None:
        # A word would be broken wherever it stands; one character cannot be.
        self._tokens = {token for token in tokens if len(token) > 1 and not token.isalnum() and not token.isspace()}
        self._lengths = sorted({len(token) for token in self._tokens})
        # Not one pattern of all tokens: models have thousands.
        self._first = re.compile("|".join(sorted({re.escape(token[0]) for token in self._tokens})) or r"(?!)")

    def broken(self, text: str) -> str:
        """`text`, with each of the tokens in it broken."""
        return self._first.sub(lambda found: found[0] + " " if self._begins(text, found.start()) else found[0], text)

    def broken_in(self, result: ToolResult) -> ToolResult:
        """The result itself where it has none of the tokens. Only in what a tool answered are they told as defused:
        a call's name and id are the policy's own, and so is what it is told of a call that went wrong."""
        id = None if result.call_id is None else self.broken(result.call_id)
        content, name = self.broken(result.content), self.broken(result.name)
        if (content, name, id) == (result.content, result.name, result.call_id):
            return result
        forged = result.answered and content != result.content
        return replace(result, content=content, name=name, call_id=id, defused=forged)

    def _begins(self, text: str, at: int) -> bool:
        return any(text[at : at + length] in self._tokens for length in self._lengths)


@lru_cache(maxsize=4)
def markup_of(tokenizer: Any) -> Markup:
    """That of a transformers tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return Markup({token.content for token in added if token.special or _OF_CHATS.fullmatch(token.content)})


# Of one token, in text as tools write it: spaces in long rows are a token for many.
_MAX_CHARACTERS_PER_TOKEN = 8

# A little less than what the last try would have kept, so that the next one fits.
_MARGIN = 0.97

_TRIES = 8

CountTokens = Callable[[str], Awaitable[int]]


async def cut(text: str, max_tokens: int, count: CountTokens) -> str:
    """`text` in at most `max_tokens` tokens by `count`: the middle is left out, with a note of how many characters
    those were. Where so few are allowed that the note alone has more, the beginning as far as it fits."""
    if _is_short(text, max_tokens):
        return text
    size = min(len(text), max_tokens * _MAX_CHARACTERS_PER_TOKEN)
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
