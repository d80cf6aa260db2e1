"""The tokenizer's own `response_template`, which says how its model's turns are read.

https://huggingface.co/docs/transformers/main/en/chat_response_parsing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_worker.chat.base import MalformedCall, ParsedTurn
from rollout_worker.chat.parsers.base import Before, Call, call_of
from rollout_worker.chat.rendering import REASONING_FIELDS


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """`end`: the token that ends a turn, which the template may ask for; `tools`: by whose schemas values are read."""

    tokenizer: Any
    tools: Sequence[dict[str, Any]]
    end: str

    def __call__(self, text: str, before: Before) -> ParsedTurn:
        try:
            parsed = self.tokenizer.parse_response(text + self.end, prefix=before.tail, tools=list(self.tools))
            turn = _turn(text, parsed)
        except Exception as error:  # the template's expressions on sampled text: anything
            first = str(error).strip().partition("\n")[0]
            return ParsedTurn(text, text, [MalformedCall(f"the turn cannot be read: {first[:200]}")])
        return turn


def _turn(text: str, parsed: Any) -> ParsedTurn:
    if not isinstance(parsed, Mapping):
        return ParsedTurn(text, text, [])
    calls = [_call(call) for call in parsed.get("tool_calls") or []]
    reasoning = next((parsed[name] for name in REASONING_FIELDS if parsed.get(name)), None)
    if not calls and reasoning is None:
        return ParsedTurn(text, text, [])
    content = parsed.get("content") or ""
    return ParsedTurn(text, content if isinstance(content, str) else str(content), calls, reasoning)


def _call(call: Any) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    return call_of(function)
