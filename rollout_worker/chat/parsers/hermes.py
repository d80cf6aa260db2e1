"""Reading `<tool_call>{json}</tool_call>` blocks out of a turn, telling a malformed call from no call.

The format is that of Hermes and Qwen: https://huggingface.co/docs/transformers/chat_extras
"""

from __future__ import annotations

import json
import re

from rollout_worker.chat.base import MalformedCall, ParsedTurn, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{_OPEN}(.*?)({_CLOSE}|(?={_OPEN})|\Z)", re.DOTALL)
_END_OF_THOUGHT = "</think>"


def parse(text: str) -> ParsedTurn:
    """A turn's text and the calls in it. What the policy only thought of is not a call."""
    thought, end, spoken = text.rpartition(_END_OF_THOUGHT)
    if _OPEN not in spoken and _CLOSE not in spoken:
        return ParsedTurn(text, text, [])
    calls: list[ToolCall | MalformedCall] = []

    def take(block: re.Match[str]) -> str:
        call = _read(block[1]) if block[2] == _CLOSE else MalformedCall(f"{_OPEN} is not closed by {_CLOSE}")
        calls.append(call)
        return "" if isinstance(call, ToolCall) else block[0]

    rest = _BLOCK.sub(take, spoken)
    if _CLOSE in _BLOCK.sub("", spoken):
        calls.append(MalformedCall(f"{_CLOSE} without {_OPEN} before it"))
    return ParsedTurn(text, (thought + end + rest).strip(), calls)


def _read(body: str) -> ToolCall | MalformedCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the tool call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('a tool call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return MalformedCall(f'"arguments" must be a JSON object, is {json.dumps(arguments)[:80]}')
    return ToolCall(value["name"], arguments)
