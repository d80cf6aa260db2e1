"""Holds an answer to one call of a tool, where the chat format writes a call's arguments as JSON between two texts.

The server masks the vocabulary; the segment carries the masks, so that the learner scores the distribution that was
sampled (`rollout.top_k`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.protocol.config.sections.sampling import StructuredOutputs
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.format_check import turn_begins, turn_ends
from slipstream.rollout_worker.chat.parsers.base import ToolCall

# No template contains this word.
_WORD = "slipstream7f3a"
_ARGUMENTS = re.compile(r"\{\s*\"" + _WORD + r"\"\s*:\s*1\s*\}")
_USER = {"role": "user", "content": "Call it."}

# The texts before and after the arguments of a call.
Frame = tuple[str, str]


async def frame_of(chat: ChatFormat, name: str) -> Frame | None:
    """Return the texts around the arguments of a call of this tool; None if the format does not write JSON there, or
    does not read back what stands between them."""
    function = {"name": name, "arguments": {_WORD: 1}}
    call = {"content": "", "tool_calls": [{"type": "function", "id": "call00000", "function": function}]}
    try:
        prompt, bare = [await chat.render_ids([_USER], generation) for generation in (True, False)]
        turns = [
            _turn(chat, prompt, bare, await chat.render_ids([_USER, {"role": "assistant", **answer}], False))
            for answer in (call, {"content": _WORD})
        ]
    except PromptError:
        return None
    text, other = turns
    found = None if text is None else _ARGUMENTS.search(text)
    if text is None or found is None:
        return None
    before, after = text[: found.start()].lstrip(), text[found.end() :].rstrip()
    # What stands in front of every answer, such as an empty block of reasoning, belongs to no call.
    before = before.removeprefix((other or "").partition(_WORD)[0].lstrip())
    written = chat.tokenizer.encode(f'{before}{{"{_WORD}": 1}}{after}', add_special_tokens=False)
    parsed = chat.parse(prompt, written)
    match parsed.calls:
        case [ToolCall(name=called, arguments=arguments)] if (called, arguments) == (name, {_WORD: 1}):
            return before, after
    return None


def _turn(chat: ChatFormat, prompt: list[int], bare: list[int], whole: list[int]) -> str | None:
    """Return the text of the answer at the end of a conversation; None if it cannot be told from what surrounds it.

    Args:
        prompt: Ids of the conversation without it, and with what asks for an answer.
        bare: The same, and without that.
        whole: Ids of the conversation.
    """
    begin = turn_begins(chat, prompt, bare, whole)
    end = turn_ends(chat, whole, begin or 0)
    if begin is None or end is None:
        return None
    turn = [token for token in whole[begin:end] if token not in chat.stop_token_ids]
    text: str = chat.tokenizer.decode(turn, skip_special_tokens=False)
    return text


def one_call(frames: Mapping[str, Frame], schemas: Sequence[dict[str, Any]]) -> StructuredOutputs:
    """Return what holds an answer to one call of one of these tools.

    Args:
        frames: The texts around the arguments, by the tool's name.
        schemas: The request's tools.
    """
    tags = [
        {
            "type": "tag",
            "begin": frames[function["name"]][0],
            "content": {"type": "json_schema", "json_schema": function["parameters"]},
            "end": frames[function["name"]][1],
        }
        for function in (schema["function"] for schema in schemas)
        if function["name"] in frames
    ]
    form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "",
        "at_least_one": True,
        "stop_after_first": True,
    }
    return StructuredOutputs(structural_tag=msgspec.json.encode({"type": "structural_tag", "format": form}).decode())
