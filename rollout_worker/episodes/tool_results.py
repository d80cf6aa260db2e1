"""Makes tool results fit for the policy: cut to a number of tokens, and without the text of special tokens.

One long page must not end an episode. A result with no more bytes than it may have tokens is passed on as it is. The
middle of a longer one is left out: first by characters, so that no more is tokenised than could fit, then by tokens.

A page that holds the text of a special token, such as `<|im_end|>`, could end the tool's message and speak as anybody.
A space after the first character of each such text keeps it readable, and no tokenizer makes a special token of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.tools.base import Content, ToolResult
from slipstream.rollout_worker.user_code.values import without_middle

# Added tokens that are not special but mark up chats. Others, such as Gemma's <table>, are ordinary in pages.
_OF_CHATS = re.compile(r"</?(think|tools?|tool_\w+|function\w*)>|<[|｜].*[|｜]>|\[/?[A-Z_]+\]")

# Characters of one token in text as tools write it: long rows of spaces are one token.
_MAX_CHARACTERS_PER_TOKEN = 8

# Keeps a little less than the estimate, so that the next try fits.
_MARGIN = 0.97

_TRIES = 8


class Markup:
    """Breaks the texts of special tokens. `tokens`: these texts."""

    def __init__(self, tokens: Collection[str]) -> None:
        # A plain word is left out because it would be broken in any text, and a single character cannot be broken.
        self._tokens = {token for token in tokens if len(token) > 1 and not token.isalnum() and not token.isspace()}
        self._lengths = sorted({len(token) for token in self._tokens})
        # One pattern of all tokens would be slow: models have thousands.
        self._first = re.compile("|".join(sorted({re.escape(token[0]) for token in self._tokens})) or r"(?!)")

    def broken(self, text: str) -> str:
        """Return the text with each special token in it broken."""
        return self._first.sub(lambda found: found[0] + " " if self._begins(text, found.start()) else found[0], text)

    def broken_everywhere(self, value: Any) -> Any:
        """Return a JSON value, such as a tool's schema, with each special token in its texts broken."""
        if isinstance(value, Mapping):
            return {self.broken_everywhere(key): self.broken_everywhere(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken_everywhere(each) for each in value]
        return self.broken(value) if isinstance(value, str) else value

    def broken_in(self, result: ToolResult) -> ToolResult:
        """Return the result with special tokens broken; the same object where there are none. Only tokens in a tool's
        own answer count as defused: a call's name, its id and the text of an error come from the policy."""
        id = None if result.call_id is None else self.broken(result.call_id)
        content, name = texts_changed(result.content, self.broken), self.broken(result.name)
        if (content, name, id) == (result.content, result.name, result.call_id):
            return result
        forged = result.answered and content != result.content
        return replace(result, content=content, name=name, call_id=id, defused=forged)

    def _begins(self, text: str, at: int) -> bool:
        return any(text[at : at + length] in self._tokens for length in self._lengths)


@lru_cache(maxsize=4)
def markup_of(tokenizer: Any) -> Markup:
    """Return the markup of a transformers tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return Markup({token.content for token in added if token.special or _OF_CHATS.fullmatch(token.content)})


CountTokens = Callable[[str], Awaitable[int]]


async def cut(text: str, max_tokens: int, count: CountTokens) -> str:
    """Cut a text to at most `max_tokens` tokens, as `count` counts them.

    A note with the number of characters stands for the middle that is left out. Where the note alone would be too long,
    only the beginning of the text is kept.
    """
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
    """Return the results as the policy may read them: cut, and with special tokens broken."""
    markup = markup_of(chat.tokenizer)
    readable = []
    for result in results:
        short = await cut_result(result, max_tokens, chat)
        broken = markup.broken_in(short)
        # A broken text has more tokens than before. A text without special tokens is the same object.
        readable.append(short if broken is short else await cut_result(broken, max_tokens, chat))
    return readable


def describe_defused(source: str) -> str:
    """Return the notice about an answer in which `for_policy` broke special tokens. `source`: the tool or
    environment."""
    return (
        f"{source}: an answer held the text of special tokens, such as <|im_end|>; a space was put into each, so that "
        f"it cannot speak as another"
    )


def texts_changed(content: Content, change: Callable[[str], str]) -> Content:
    """Return content with each text changed; images stay."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]


async def cut_result(result: ToolResult, max_tokens: int, chat: ChatFormat) -> ToolResult:
    """Cut each text of a result."""
    texts = [result.content] if isinstance(result.content, str) else [part.get("text", "") for part in result.content]
    if all(_is_short(text, max_tokens) for text in texts):
        return result
    count = token_counter(chat.tokenizer)
    shorter = iter([text if _is_short(text, max_tokens) else await cut(text, max_tokens, count) for text in texts])
    if isinstance(result.content, str):
        return replace(result, content=next(shorter))
    parts = [(part, next(shorter)) for part in result.content]
    return replace(result, content=[{**part, "text": text} if part["type"] == "text" else part for part, text in parts])


def token_counter(tokenizer: Any) -> CountTokens:
    """Return a function that counts tokens with a transformers tokenizer, in a thread."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode(text: str) -> int:
        if backend is None:
            return len(tokenizer.encode(text, add_special_tokens=False))
        # The only function of the backend that releases the interpreter lock.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding.ids)

    async def count(text: str) -> int:
        return int(await asyncio.to_thread(encode, text=text))

    return count


def _is_short(text: str, max_tokens: int) -> bool:
    return len(text) <= max_tokens and len(text.encode()) <= max_tokens
