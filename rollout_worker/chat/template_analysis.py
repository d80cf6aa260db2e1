"""How a chat template writes a turn: what ends it, what follows it, where the policy speaks, how it thinks.

All of it is told from made-up conversations, as a template says nothing about itself. The made-up turn holds real tool
calls, one for each tool message that follows: templates take a tool's name and a call's id from there.

A tokenizer's chat template as a function of messages, which are put as the template wants them.

Templates differ in what they take: arguments as an object or as JSON text, reasoning under one of three names, calls
with ids or without. Messages here are OpenAI's, with `reasoning_content`; what a template asks for is told by trying.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from rollout_worker.chat.base import text_of
from rollout_worker.chat.parsers.base import OPENS_THOUGHT, REASONING_FIELDS, Message, Thought


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


# What a template may raise of messages that it does not take.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)

# Words that stand in no template, and that trimming and quoting leave as they are.
_ASKED, _SAID, _ARGUED, _ANSWERED, _THOUGHT = (
    f"slipstream{word}7f3a" for word in ("asked", "said", "argued", "answered", "thought")
)

USER: Message = {"role": "user", "content": _ASKED}

_OPENS = re.compile(r"((?:<[^<>\s]+>|\[[A-Z_]+\])[A-Za-z]*)\s*\Z")

_CLOSES = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")


class Unfit(Exception):
    """A template that cannot be used with tools; the text says why."""


@dataclass(frozen=True, slots=True)
class Following:
    """What follows a turn's text: `text` begins with the token that ends the turn, whose text is `end`."""

    text: str
    end: str


def following(rendering: Rendering, stops: Sequence[str], messages: Sequence[Message]) -> Following | None:
    """What the template writes from the end of a turn on, when these messages follow it. None where it ends a turn with
    none of the `stops`, or refuses the messages."""
    for turn, last_word in _turns_before(messages):
        try:
            text = rendering([USER, turn, *messages])
        except REFUSALS:
            continue
        at = text.find(last_word)
        if at >= 0 and (found := _from_stop(text, at + len(last_word), stops)) is not None:
            return found
    return None


def _turns_before(messages: Sequence[Message]) -> list[tuple[Message, str]]:
    """Turns that may come before the messages, best first, each with the last word in it."""
    plain = ({"role": "assistant", "content": _SAID}, _SAID)
    answers = [message for message in messages if message.get("role") == "tool"]
    if not answers:
        return [plain]
    calls = [_call(answer, number) for number, answer in enumerate(answers)]
    calls[-1]["function"]["arguments"] = {"query": _ARGUED}
    several = ({"role": "assistant", "content": "", "tool_calls": calls}, _ARGUED)
    one = ({"role": "assistant", "content": "", "tool_calls": calls[-1:]}, _ARGUED)
    return [several, one, plain] if len(calls) > 1 else [several, plain]


def _call(answer: Message, number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "id": answer.get("tool_call_id") or call_id(number + 2),  # as `Rendering` numbers what has none
        "function": {"name": answer.get("name") or "tool", "arguments": {}},
    }


def _from_stop(text: str, at: int, stops: Sequence[str]) -> Following | None:
    found = min(((place, stop) for stop in stops if (place := text.find(stop, at)) >= 0), default=None)
    return None if found is None else Following(text[found[0] :], found[1])


def taking_text(rendering: Rendering) -> Rendering:
    """The rendering, with text as the template takes it: as it is, or as a part."""
    parts = rendering.but(content_as_parts=True)
    shown = (_ASKED in _rendered(each, [USER]) for each in (rendering, parts))
    return parts if list(shown) == [False, True] else rendering


def checked_rendering(rendering: Rendering, stops: Sequence[str]) -> Rendering:
    """The rendering, with arguments as the template takes them. Raises `Unfit` if it takes no tool messages, or leaves
    them out."""
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    turns = _turns_before([answer])
    why = ""
    for turn, last_word in turns:
        for as_text in (False, True):
            tried = rendering.but(arguments_as_text=as_text)
            try:
                text = tried([USER, turn, answer])
            except REFUSALS as error:
                why = why or f"it refuses a tool message ({error})"
                continue
            at = text.find(last_word)
            if at < 0:
                continue
            after = _from_stop(text, at + len(last_word), stops)
            answered = text.find(_ANSWERED)
            if answered < 0:
                why = "it leaves out tool messages"
            elif after is None or _ANSWERED not in after.text:
                why = f"it ends a turn with none of the stop tokens {list(stops)}"
            else:
                return tried
    raise Unfit(why or "it leaves out what the assistant says")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """field: under which name the template takes it, None if it takes none; thought: how it is written; in_cycle: it
    stays where tool messages follow; across: it stays where a user's message follows."""

    field: str | None
    thought: Thought
    in_cycle: bool
    across: bool


def reasoning_of(rendering: Rendering, with_calls: bool) -> Reasoning:
    """How the template writes reasoning. `with_calls`: it takes tools."""
    opened = opened_by_prompt(rendering)
    for name in REASONING_FIELDS:
        turn = {"role": "assistant", "content": _SAID, name: _THOUGHT}
        tried = rendering.but(reasoning_field=name)
        text = _rendered(tried, [USER, turn], generation_prompt=False)
        if _THOUGHT not in text and with_calls:  # some write it only beside calls
            text = _rendered(tried, _cycle(name))
        if _THOUGHT not in text:
            continue
        thought = _thought(text)
        in_cycle = _THOUGHT in _rendered(tried, _cycle(name))
        across = _THOUGHT in _rendered(tried, [USER, turn, USER])
        return Reasoning(name, thought, in_cycle, across)
    return Reasoning(None, Thought(told=opened), in_cycle=False, across=False)


def opened_by_prompt(rendering: Rendering, opening: str = OPENS_THOUGHT) -> bool:
    """Does the template open a thought where it asks the policy to speak?"""
    return _rendered(rendering, [USER]).rstrip().endswith(opening)


def _cycle(name: str) -> list[Message]:
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    ((turn, _), *_) = _turns_before([answer])
    return [USER, {**turn, name: _THOUGHT}, answer]


def _thought(text: str) -> Thought:
    at = text.index(_THOUGHT)
    opens, closes = _OPENS.search(text[max(0, at - 200) : at]), _CLOSES.match(text, at + len(_THOUGHT))
    if opens is None or closes is None:
        return Thought(told=True)
    return Thought(opens[1], closes[1], told=True)


def places_to_speak(rendering: Rendering, opening: str) -> list[str]:
    """What stands right before a turn, after a user's message and after a tool's, without a thought that it opens."""
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    ends = []
    for messages, word in (([USER], _ASKED), ([USER, _turns_before([answer])[0][0], answer], _ANSWERED)):
        text = _rendered(rendering, messages)
        end = text[text.rfind(word) + len(word) :].partition(opening)[0] if word in text else ""
        if end.strip() and end not in ends:
            ends.append(end)
    return ends


def _rendered(rendering: Rendering, messages: Sequence[Message], generation_prompt: bool = True) -> str:
    """The text, empty where the template refuses the messages."""
    try:
        return rendering(messages, generation_prompt)
    except REFUSALS:
        return ""
