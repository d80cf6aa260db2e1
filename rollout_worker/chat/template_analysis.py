"""Finds out how a chat template writes a turn, and renders messages in the form that the template accepts.

It finds the token that ends a turn, the text that follows it, the place where the policy speaks, and the form of
reasoning. A template says nothing about itself, so every answer comes from made-up conversations. The made-up turn
holds real tool calls, one for each tool message that follows, because templates take a tool's name and a call's id
from there.

Templates differ in the input that they accept: arguments as an object or as JSON text, reasoning under one of three
names, calls with ids or without. Messages here are OpenAI's, with `reasoning_content`. `Rendering` converts them. The
form that a template needs is found by trying.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from jinja2 import TemplateError

from slipstream.rollout_worker.chat.base import text_of
from slipstream.rollout_worker.chat.parsers.base import OPENS_THOUGHT, REASONING_FIELDS, Message, Thought

# A template may raise any of these for messages that it does not accept.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)

# No template contains these words, and neither trimming nor quoting changes them.
_ASKED, _SAID, _ARGUED, _ANSWERED, _THOUGHT = (
    f"slipstream{word}7f3a" for word in ("asked", "said", "argued", "answered", "thought")
)

# Stands for the field of reasoning in templates that read it from a block of the content, as Mistral's do.
_BLOCK = "a thinking block of the content"

USER: Message = {"role": "user", "content": _ASKED}

_OPENS = re.compile(r"((?:<[^<>\s]+>|\[[A-Z_]+\])[A-Za-z]*)\s*\Z")

_CLOSES = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")


_OWN_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders messages with a tokenizer's chat template, in the form that the template accepts.

    Attributes:
        tokenizer: A transformers tokenizer with a chat template.
        tools: JSON schemas of the tools, or None.
        variables: The run file's variables for the template.
        content_as_parts: Give text as a list of one part, as templates of vision models want it. Several text parts
            are always joined first.
        arguments_as_text: Give a call's arguments as JSON text.
        reasoning_field: Field from which the template reads reasoning, or `_BLOCK`. None if it reads none.
        own_ids: Replace ids of calls that are not nine letters and digits, as templates of Mistral refuse others.
        tools_as_text: Rewrites a conversation and the tools as messages without either, for a template that knows no
            tools. None for templates that get the tools.
    """

    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    content_as_parts: bool = False
    arguments_as_text: bool = False
    reasoning_field: str | None = None
    own_ids: bool = False
    tools_as_text: Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], list[Message]] | None = None

    def __call__(
        self, messages: Sequence[Message], generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        """Render a conversation.

        Args:
            messages: The conversation.
            generation_prompt: Whether to ask for a turn at the end.
            continue_final_message: Whether to leave the last message open. No generation prompt is added then.

        Returns:
            The conversation's text.

        Raises:
            TemplateError, TypeError, ValueError, KeyError, AttributeError: The template refuses the messages. The
                first of these is jinja2's.
        """
        return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            self._as_wanted(messages),
            tools=None if self.tools_as_text is not None else self.tools,
            tokenize=False,
            add_generation_prompt=generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **self.variables,
        )

    def but(self, **changes: Any) -> Rendering:
        return replace(self, **changes)

    def _as_wanted(self, messages: Sequence[Message]) -> list[Message]:
        wanted = []
        open_ids: list[str] = []  # ids of calls that no message has answered yet
        renamed: dict[Any, str] = {}
        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise ValueError(f"a message is a dict with a role and content, not {message!r:.80}")
            if message.get("role") == "assistant":
                given = [call.get("id") for call in message.get("tool_calls") or []]
                message = self._assistant(message, number)
                open_ids = [call["id"] for call in message.get("tool_calls") or []]
                renamed.update(zip(given, open_ids, strict=True))
            elif message.get("role") == "tool":
                answers = message.get("tool_call_id")
                if answers is None:
                    message = {**message, "tool_call_id": open_ids.pop(0) if open_ids else call_id(number)}
                elif (answers := renamed.get(answers, answers)) in open_ids:
                    open_ids.remove(answers)
                    message = {**message, "tool_call_id": answers}
            wanted.append(message)
        if self.tools_as_text is not None:
            wanted = self.tools_as_text(wanted, self.tools)
        return [self._content(message) for message in wanted]

    def _content(self, message: Message) -> Message:
        if isinstance(parts := message.get("content"), list | tuple):
            shows = any(part.get("type") in ("image", "thinking") for part in parts)
            message = {**message, "content": _without_pixels(parts) if shows else text_of(parts)}
        if self.content_as_parts and isinstance(text := message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": text}]}
        return message

    def _assistant(self, message: Message, number: int) -> Message:
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
        if reasoning is not None:
            message = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
            if self.reasoning_field == _BLOCK:
                content = message.get("content") or []
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message["content"] = [{"type": "thinking", "thinking": reasoning}, *parts]
            elif self.reasoning_field is not None:
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
            arguments = as_object(arguments)
        id = call.get("id") or otherwise
        id = otherwise if self.own_ids and not _OWN_ID.fullmatch(str(id)) else id
        return {"type": "function", "id": id, "function": {**function, "arguments": arguments}}


def _without_pixels(parts: Sequence[Message]) -> list[Message]:
    return [{"type": "image"} if part.get("type") == "image" else part for part in parts]


def call_id(number: int, place: int = 0) -> str:
    """Make an id for a call that has none. It has nine letters and digits, as Mistral's templates demand."""
    return f"call{number % 1000:03d}{place % 100:02d}"


def as_object(arguments: str) -> Any:
    """Parse JSON arguments. Text that is not an object stays text, because the template may write it as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


class Unfit(Exception):
    """Raised for a template that cannot be used with tools. The text says why."""


@dataclass(frozen=True, slots=True)
class Following:
    """Holds the text that follows a turn.

    Attributes:
        text: The text. It begins with the token that ends the turn.
        end: Text of that token.
    """

    text: str
    end: str


def following(rendering: Rendering, stops: Sequence[str], messages: Sequence[Message]) -> Following | None:
    """Find the text that the template writes from the end of a turn on.

    Args:
        rendering: The template's rendering.
        stops: Texts of the tokens that end a turn.
        messages: The messages that follow the turn.

    Returns:
        The text, or None if the template ends a turn with none of the `stops` or refuses the messages.
    """
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
    """Return made-up turns that may come before the messages, best first, each with the last word in it."""
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
        "id": answer.get("tool_call_id") or call_id(number + 2),  # must match the id that `Rendering` makes
        "function": {"name": answer.get("name") or "tool", "arguments": {}},
    }


def _from_stop(text: str, at: int, stops: Sequence[str]) -> Following | None:
    found = min(((place, stop) for stop in stops if (place := text.find(stop, at)) >= 0), default=None)
    return None if found is None else Following(text[found[0] :], found[1])


def taking_text(rendering: Rendering) -> Rendering:
    """Return the rendering with text in the form that the template accepts: as it is, or as a part."""
    parts = rendering.but(content_as_parts=True)
    shown = (_ASKED in rendered(each, [USER]) for each in (rendering, parts))
    return parts if list(shown) == [False, True] else rendering


def checked_rendering(rendering: Rendering, stops: Sequence[str]) -> Rendering:
    """Return the rendering with arguments in the form that the template accepts.

    Args:
        rendering: The template's rendering.
        stops: Texts of the tokens that end a turn.

    Returns:
        The rendering that shows a tool message after a turn with a call.

    Raises:
        Unfit: The template refuses tool messages, leaves them out, or ends a turn with none of the `stops`.
    """
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    turns = _turns_before([answer])
    why = ""
    for turn, last_word in turns:
        refused = told = ""
        for as_parts, as_text in product(dict.fromkeys((rendering.content_as_parts, True)), (False, True)):
            tried = rendering.but(arguments_as_text=as_text, content_as_parts=as_parts)
            try:
                text = tried([USER, turn, answer])
            except REFUSALS as error:
                if as_parts == rendering.content_as_parts:
                    refused = refused or f"it refuses a tool message ({error})"
                continue
            at = text.find(last_word)
            if at < 0:
                continue
            after = _from_stop(text, at + len(last_word), stops)
            answered = text.find(_ANSWERED)
            if answered < 0:
                told = told or "it leaves out tool messages"
            elif after is None or _ANSWERED not in after.text:
                told = told or f"it ends a turn with none of the stop tokens {list(stops)}"
            elif as_parts and _ASKED not in text:
                continue
            else:
                return tried
        why = why or told or refused
    raise Unfit(why or "it leaves out what the assistant says")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Describes how a template handles reasoning.

    Attributes:
        field: Field from which the template reads reasoning, or `_BLOCK`. None if it reads none.
        thought: The form in which reasoning is written.
        in_cycle: Reasoning stays where tool messages follow.
        across: Reasoning stays where a user's message follows.
    """

    field: str | None
    thought: Thought
    in_cycle: bool
    across: bool


def reasoning_of(rendering: Rendering, with_calls: bool) -> Reasoning:
    """Find out how the template writes reasoning.

    Args:
        rendering: The template's rendering.
        with_calls: Whether the template gets tools. Some templates write reasoning only next to calls.

    Returns:
        The findings.
    """
    opened = opened_by_prompt(rendering)
    turn = {"role": "assistant", "content": _SAID, REASONING_FIELDS[0]: _THOUGHT}
    for name in (*REASONING_FIELDS, _BLOCK):
        tried = rendering.but(reasoning_field=name)
        text = rendered(tried, [USER, turn], generation_prompt=False)
        if _THOUGHT not in text and with_calls:  # some templates write it only next to calls
            text = rendered(tried, _cycle())
        if _THOUGHT not in text:
            continue
        tags = _tags_of_thought(text)
        if tags is None and name == _BLOCK:  # the template writes a list as it is
            continue
        thought = tags or Thought(separate=True)
        in_cycle = _THOUGHT in rendered(tried, _cycle())
        across = _THOUGHT in rendered(tried, [USER, turn, USER])
        return Reasoning(name, thought, in_cycle, across)
    return Reasoning(None, Thought(separate=opened), in_cycle=False, across=False)


def opened_by_prompt(rendering: Rendering) -> bool:
    """Return whether the template opens a thought where it asks the policy to speak."""
    return rendered(rendering, [USER]).rstrip().endswith(OPENS_THOUGHT)


def _cycle() -> list[Message]:
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    ((turn, _), *_) = _turns_before([answer])
    return [USER, {**turn, REASONING_FIELDS[0]: _THOUGHT}, answer]


def _tags_of_thought(text: str) -> Thought | None:
    """Return the form in which `text` writes reasoning; None if no tags stand around it."""
    at = text.index(_THOUGHT)
    opens, closes = _OPENS.search(text[max(0, at - 200) : at]), _CLOSES.match(text, at + len(_THOUGHT))
    if opens is None or closes is None:
        return None
    return Thought(opens[1], closes[1], separate=True)


def places_to_speak(rendering: Rendering, opening: str) -> list[str]:
    """Return the texts right before a turn, after a user's message and after a tool's.

    A thought that the template opens there is left out.
    """
    answer: Message = {"role": "tool", "name": "tool", "content": _ANSWERED}
    ends = []
    for messages, word in (([USER], _ASKED), ([USER, _turns_before([answer])[0][0], answer], _ANSWERED)):
        text = rendered(rendering, messages)
        end = text[text.rfind(word) + len(word) :].partition(opening)[0] if word in text else ""
        if end.strip() and end not in ends:
            ends.append(end)
    return ends


def rendered(rendering: Rendering, messages: Sequence[Message], generation_prompt: bool = True) -> str:
    """Render the text. It is empty if the template refuses the messages."""
    try:
        return rendering(messages, generation_prompt)
    except REFUSALS:
        return ""
