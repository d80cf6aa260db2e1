"""A turn that is several messages, each with a header that says to whom it is: what harmony and ATEM have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# A header is short; a longer one is text.
_HEADER = re.compile(r"(?:<\|start\|>)?([^<]{0,300}(?:<\|(?:channel|constrain)\|>[^<]{0,300}){0,3})<\|message\|>")
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|eom|eot|call|return)\|>|(?=<\|start\|>)")


@dataclass(frozen=True, slots=True)
class Block:
    """closed: it is followed by a tag that ends it."""

    header: str
    body: str
    closed: bool


def blocks(text: str) -> Iterator[Block]:
    """The messages of a turn; text without a header is one with an empty header."""
    at = 0
    while at < len(text):
        header = _HEADER.match(text, at)
        begin = at if header is None else header.end()
        end = _END.search(text, begin)
        if end is not None and end.end() == at:  # a start tag without a header
            end = _END.search(text, at + 1)
        body = text[begin : len(text) if end is None else end.start()]
        yield Block("" if header is None else header[1], body, end is not None)
        if end is None:
            return
        at = end.end()


def said_header(said: str) -> str:
    """The header that the prompt wrote, without what of the body it wrote too."""
    body = said.rfind(_MESSAGE)
    return said if body < 0 else said[: body + len(_MESSAGE)]
