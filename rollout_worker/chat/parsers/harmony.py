"""OpenAI's harmony: a message on the analysis channel is reasoning, one to `functions.name` a call, others content.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall, ParsedTurn, ToolCall
from rollout_worker.chat.parsers.base import Before, Call, Calls, Unreadable, no_more, read_json
from rollout_worker.chat.parsers.blocks import Block, blocks, said_header

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]{1,256})")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


def parse(text: str, before: Before) -> ParsedTurn:
    calls: Calls = []
    thoughts: list[str] = []
    content: list[str] = []
    for block in blocks(said_header(before.said) + text):
        if (recipient := _RECIPIENT.search(block.header)) is not None:
            calls.append(call := _call(recipient[1], block))
            if isinstance(call, MalformedCall):
                content.append(block.body)
        elif _ANALYSIS.search(block.header) is not None:
            thoughts.append(block.body)
        else:
            content.append(block.body)
    if not calls and not thoughts and "<|" not in text:
        return ParsedTurn(text, text, [])
    return ParsedTurn(
        text, "\n\n".join(filter(None, content)).strip(), no_more(calls), "\n\n".join(thoughts).strip() or None
    )


def _call(name: str, block: Block) -> Call:
    try:
        value, end = read_json(block.body, 0)
    except Unreadable as error:
        return MalformedCall(f"the arguments of {name} are not valid JSON: {error}")
    if block.body[end:].strip():
        return MalformedCall(f"after the arguments of {name} stands {block.body[end:].strip()[:40]!r}")
    if not isinstance(value, dict | str):
        return MalformedCall(f"the arguments of {name} must be a JSON object")
    return ToolCall(name, value)
