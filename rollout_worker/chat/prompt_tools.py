"""Writes tools, calls and results as plain messages, for templates that know no tools (`chat.tools = "prompt"`).

The tools are described in the system message, in the words of Qwen2.5's template. Calls are written in the Hermes
notation, in the assistant's content. Results are a user's message. So a template needs only the roles system, user and
assistant. Where it has no system message, its text begins the first user's message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.rollout_worker.chat.base import OPENING, text_of
from slipstream.rollout_worker.chat.parsers.base import Message

NOTATION = "hermes"

_DESCRIPTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_SYSTEM, _USER = "slipstream7f3asystem", "slipstream7f3auser"


@dataclass(frozen=True, slots=True)
class PromptTools:
    """Rewrites conversations for one template.

    Attributes:
        has_system: The template shows a system message.
        default_system: The system message that the template writes if a conversation has none.
    """

    has_system: bool
    default_system: str

    @classmethod
    def of(cls, render: Callable[[Sequence[Message]], str]) -> PromptTools:
        """Find out how a template handles the system message.

        Args:
            render: Renders a conversation with the template. It returns an empty text if the template refuses it.

        Returns:
            The rewriting for this template.
        """
        user: Message = {"role": "user", "content": _USER}
        with_one = render([{"role": "system", "content": _SYSTEM}, user])
        if _SYSTEM not in with_one:
            return cls(has_system=False, default_system="")
        (before, _, after), without = with_one.partition(_SYSTEM), render([user])
        fits = without.startswith(before) and without.endswith(after) and len(without) > len(before) + len(after)
        return cls(True, without[len(before) : len(without) - len(after)] if fits else "")

    def __call__(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """Rewrite a conversation.

        Args:
            messages: The conversation. Arguments of calls are objects.
            tools: JSON schemas of the tools; None to describe none.

        Returns:
            Messages of the roles that the template knows.
        """
        written: list[Message] = []
        answers = False
        for message in messages:
            if message.get("role") == "tool":
                parts = _response(message.get("content"))
                if answers:
                    written[-1]["content"] += [_part("\n"), *parts]
                else:
                    written.append({"role": "user", "content": parts})
            else:
                written.append(_with_calls(message) if message.get("tool_calls") else message)
            answers = message.get("role") == "tool"
        return self._with_system(written, tools)

    def _with_system(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        has_one = bool(messages) and messages[0].get("role") in OPENING
        system = messages[0] if has_one else {"role": "system", "content": self.default_system if tools else ""}
        rest = messages[has_one:]
        text = "\n\n".join(part for part in (_text_of(system["content"]), _description(tools)) if part)
        if self.has_system:
            return [{**system, "content": text}, *rest] if has_one or text else rest
        if not text:
            return rest
        at = next((place for place, message in enumerate(rest) if message.get("role") == "user"), None)
        if at is None:
            return [{"role": "user", "content": text}, *rest]
        return [*rest[:at], {**rest[at], "content": _after(text, rest[at]["content"])}, *rest[at + 1 :]]


def _description(tools: Sequence[dict[str, Any]] | None) -> str:
    return _DESCRIPTION.format(schemas="\n".join(map(_json, tools))) if tools else ""


def _with_calls(message: Message) -> Message:
    said, functions = _text_of(message.get("content")), [call["function"] for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    written = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([said, *written] if said else written)}


def _response(content: Any) -> list[Message]:
    text = content if isinstance(content, str) else _json(content)
    parts = content if isinstance(content, list | tuple) else [_part(text)]
    return [_part("<tool_response>\n"), *parts, _part("\n</tool_response>")]


def _after(text: str, content: Any) -> Any:
    return f"{text}\n\n{content}" if isinstance(content, str) else [_part(f"{text}\n\n"), *content]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else text_of(content or ())


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
