"""The chat markup in what tools answer, broken before it is tokenised: a page that holds a special token's text, such
as `<|im_end|>`, would end the tool's message and speak on as whom it likes.

A space is put behind the first character of each such text: the policy can still read it, and no tokenizer makes a
special token of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rollout_worker.tools.base import ToolResult

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
