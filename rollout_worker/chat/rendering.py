"""A tokenizer's chat template as a function of messages, which are put as the template wants them.

Templates differ in what they take: arguments as an object or as JSON text, reasoning under one of three names, calls
with ids or without. Messages here are OpenAI's, with `reasoning_content`; what a template asks for is told by trying.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_worker.chat.base import Message
from rollout_worker.chat.conversation import text_of

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Rendering:
    """content_as_parts: text, which parts are joined to, is a list of one part, as templates of models that see want
    it; arguments_as_text: a call's arguments are JSON text; reasoning_field: what the template reads reasoning from,
    None where it reads none; variables: the run file's, for the template."""

    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    content_as_parts: bool = False
    arguments_as_text: bool = False
    reasoning_field: str | None = None

    def __call__(
        self, messages: Sequence[Message], generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        """The conversation's text. Raises what a template raises: jinja2's `TemplateError`, `TypeError`, `ValueError`,
        `KeyError`, `AttributeError`."""
        return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            self._as_wanted(messages),
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **self.variables,
        )

    def but(self, **changes: Any) -> Rendering:
        return replace(self, **changes)

    def _as_wanted(self, messages: Sequence[Message]) -> list[Message]:
        wanted = []
        open_ids: list[str] = []  # of calls that no message has answered yet
        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise ValueError(f"a message is a dict with a role and content, not {message!r:.80}")
            if message.get("role") == "assistant":
                message = self._assistant(message, number)
                open_ids = [call["id"] for call in message.get("tool_calls") or []]
            elif message.get("role") == "tool":
                answers = message.get("tool_call_id")
                if answers is None:
                    message = {**message, "tool_call_id": open_ids.pop(0) if open_ids else call_id(number)}
                elif answers in open_ids:
                    open_ids.remove(answers)
            if isinstance(parts := message.get("content"), list | tuple):
                message = {**message, "content": text_of(parts)}
            if self.content_as_parts and isinstance(text := message.get("content"), str):
                message = {**message, "content": [{"type": "text", "text": text}]}
            wanted.append(message)
        return wanted

    def _assistant(self, message: Message, number: int) -> Message:
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
        if reasoning is not None:
            message = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
            if self.reasoning_field is not None:
                message[self.reasoning_field] = reasoning
        if message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            message = {**message, "tool_calls": [self._call(call, call_id(number, place)) for place, call in calls]}
        return message

    def _call(self, call: Any, otherwise: str) -> dict[str, Any]:
        function = dict(call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call})
        arguments = function.get("arguments", {})
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            arguments = _as_object(arguments)
        return {"type": "function", "id": call.get("id") or otherwise, "function": {**function, "arguments": arguments}}


def call_id(number: int, place: int = 0) -> str:
    """An id of nine letters and digits, as Mistral's templates demand, for a call that has none."""
    return f"call{number % 1000:03d}{place % 100:02d}"


def _as_object(arguments: str) -> Any:
    """Text that is no object stays text: the template may write it as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
