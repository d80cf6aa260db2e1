"""Finds out which messages a chat format shows, and writes conversations so that it shows all of them.

Formats accept messages that they render to nothing: of a role that they do not know, a second system message, the
second of two calls in one turn. So each role and place is tried once, when a conversation first has it, with words that
no format contains. What is not shown is written in a form that is, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from slipstream.rollout_worker.chat.base import OPENING, PromptError
from slipstream.rollout_worker.chat.parsers.base import REASONING_FIELDS, Message

# Renders a conversation and asks for a turn. None where the format refuses the conversation.
Render = Callable[[Sequence[Message]], str | None]

# The tool that made-up conversations call.
TRIED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "slipstream_tool",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}

# Neither trimming nor quoting changes these words.
_ASKED, _TRIED, _OTHER, _KEY, _LATER, _FIRST = (
    f"slipstream{word}7f3a" for word in ("asked", "tried", "other", "key", "later", "first")
)

_USER: Message = {"role": "user", "content": _ASKED}

# What a person may write in place of a role that is not shown.
_IN_PLACE = {
    "function": "give it the role 'tool', after the assistant's call",
    "ipython": "give it the role 'tool', after the assistant's call",
    "environment": "give it the role 'tool', after the assistant's call",
    "model": "give it the role 'assistant'",
    "chatbot": "give it the role 'assistant'",
    "tool": "put the assistant's call before it",
    "system": "put its text into the first system message, or into a user's",
    "developer": "put its text into the first system message, or into a user's",
}

_OR = "or name a template that shows it with chat.template = file.jinja"


class ShownMessages:
    """Writes conversations for one chat format.

    Args:
        render: Renders made-up conversations. With tools they call `TRIED_TOOL`.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, tuple[str, ...] | None], bool | None] = {}

    def __call__(self, messages: Sequence[Message], previous: str | None = None) -> list[Message]:
        """Write a conversation, or what follows a turn.

        Args:
            messages: The messages.
            previous: Role of the message before them; None where the conversation begins.

        Returns:
            Messages of which the format shows all.

        Raises:
            PromptError: The format accepts a message and shows nothing of it.
        """
        written: list[Message] = []
        for number, message in enumerate(messages):
            role = message.get("role")
            if role == "tool":
                message = self._result(message)
            if role == "user" and self._shows(role, ()) is False:
                raise PromptError(
                    f"message {number} has the role 'user', of which the chat format shows nothing: {_OR[3:]}"
                )
            answers = role == "tool" and (not written or _is_answered(written[-1]))
            if answers or role in ("user", "assistant") or not message.get("content"):
                written.append(message)
            else:
                self._place(number, message, written, previous)
        return list(self._one_by_one(written)) if any(message.get("tool_calls") for message in written) else written

    def changes(self) -> list[str]:
        """Say what the format shows in another form, or not at all."""
        told = [*self._changed_roles()]
        if self._shows("calls") is not True:
            return [*told, "no tool calls"]
        if (parallel := self._shows("parallel")) is not True:
            split = self._shows("one by one")
            told += (
                ["calls of one turn as turns of one call each"] if split else ["no second call"] * (parallel is False)
            )
        if self._shows("beside") is not True and self._shows("before"):
            told.append("text next to a call as its own turn")
        return told

    def _changed_roles(self) -> Iterator[str]:
        if self.shows_system() is not True:
            yield "no system message"
            return
        if self._shows("developer", ()) is not True:
            yield "a developer's message as the system's"
        if self._shows("system", ("system",)) is not True:
            yield "further system messages within the first"
        if self._shows("system", ("system", "assistant")) is not True:
            yield "no system message after a turn"

    def shows_system(self) -> bool | None:
        """Return whether the format shows a system message at the beginning; None where it refuses one."""
        return self._shows("system", ())

    def _place(self, number: int, message: Message, written: list[Message], previous: str | None) -> None:
        """Append a message of another role than user, assistant and tool, or join it to the one before."""
        role: str = message["role"]
        before = _before(written, previous)
        for known_as in (role, "system") if role in OPENING else (role,):
            if self._shows(known_as, before):
                written.append({**message, "role": known_as})
                return
        if written and role in OPENING and before[-1] in OPENING:
            written[-1] = {**written[-1], "content": _joined(written[-1]["content"], message["content"])}
        elif self._shows(role, before) is None:  # the format says itself why it refuses it
            written.append(message)
        else:
            where = f"after one of role {before[-1]!r}" if before else "at the beginning"
            remedy = _IN_PLACE.get(role, "put its text into a user's message")
            raise PromptError(
                f"message {number} has the role {role!r}, and the chat format shows nothing of such a message {where}: "
                f"{remedy}, {_OR}"
            )

    def _result(self, message: Message) -> Message:
        """Return a tool's message with its content as JSON text, unless it is text or the format writes objects so."""
        content = message.get("content")
        if content is None or isinstance(content, str | list | tuple):
            return message
        if isinstance(content, Mapping) and self._shows("object"):
            return message
        return {**message, "content": json.dumps(content, ensure_ascii=False, default=str)}

    def _one_by_one(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield a turn with calls as several turns where the format shows no second call, or no text next to one."""
        rest = list(messages)
        while rest:
            message = rest.pop(0)
            calls = message.get("tool_calls") if message.get("role") == "assistant" else None
            if not calls:
                yield message
                continue
            self._must_show("calls", "a turn that calls a tool, and its result", "give the task tools")
            if message.get("content") is None and self._shows("null" if "content" in message else "bare") is not True:
                message = {**message, "content": ""}
            if message.get("content") and self._shows("beside") is not True:
                if self._shows("before"):
                    yield {key: value for key, value in message.items() if key != "tool_calls"}
                    message = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
                    message["content"] = ""
                else:
                    self._must_show("beside", "text next to a tool call", "leave out the text")
            answers = []
            while rest and rest[0].get("role") == "tool":
                answers.append(rest.pop(0))
            if len(calls) > 1 and self._shows("parallel") is not True:
                if self._shows("one by one") and len(answers) == len(calls):
                    for place, (call, answer) in enumerate(zip(calls, answers, strict=True)):
                        begun = message if place == 0 else {"role": "assistant", "content": ""}
                        yield {**begun, "tool_calls": [call]}
                        yield answer
                    continue
                self._must_show("parallel", "a second tool call in one turn", "give each call its own turn")
            yield message
            yield from answers

    def _must_show(self, what: str, named: str, remedy: str) -> None:
        """Raise `PromptError` if the format accepts `what` and shows nothing of it."""
        if self._shows(what) is False:
            raise PromptError(f"the conversation has {named}, of which the chat format shows nothing: {remedy}, {_OR}")

    def _shows(self, what: str, before: tuple[str, ...] | None = None) -> bool | None:
        """Return whether the format shows a message; None where it refuses one.

        Args:
            what: A name in `_turns`; with `before` a role.
            before: The result of `_before`.
        """
        place = what, before
        if place not in self._known:
            messages, words = _turns(what) if before is None else _of_role(what, before)
            text = self._render(messages)
            found = None if text is None else all(word in text for word in words)
            if found and before is None:  # some formats leave it out as soon as another turn follows
                later = self._render([*messages, {"role": "assistant", "content": _LATER}, _USER])
                found = later is None or all(word in later for word in words)
            self._known[place] = found and not (what == "object" and _is_python(text or ""))
        return self._known[place]


def _before(written: Sequence[Message], previous: str | None) -> tuple[str, ...]:
    """Return the roles before a message that decide whether it is shown: the system's, and the last one.

    A later system message may take the place of an earlier one.
    """
    roles = tuple(message["role"] for message in written) or ((previous,) if previous else ())
    opening = tuple(takewhile(lambda role: role in OPENING, roles))
    if previous is None and len(opening) == len(roles):
        return opening
    later = ("user", "system") if not opening and any(role in OPENING for role in roles) else ()
    return (*opening, *later, roles[-1])


def _is_answered(message: Message) -> bool:
    """Return whether a tool's message may follow."""
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _of_role(role: str, before: tuple[str, ...]) -> tuple[list[Message], list[str]]:
    """Return a conversation with a message of `role` after those of the roles `before`, and the words to look for."""
    message = {"role": role, "content": _TRIED}
    opening = list(takewhile(lambda each: each in OPENING, before))
    earlier = [{"role": each, "content": f"{_FIRST}{place}"} for place, each in enumerate(opening)]
    if len(opening) == len(before):
        return [*earlier, message, _USER], [_TRIED, _ASKED, *(str(each["content"]) for each in earlier)]
    if before[:-1] == ("user", "system"):
        earlier = [_USER, {"role": "system", "content": _FIRST}]
    words = [_TRIED, *(str(each["content"]) for each in earlier if each is not _USER)]
    last = before[-1]
    if last == "user":
        return [*earlier, _USER, message], words
    if last == "tool":
        return [*earlier, _USER, _calls(_OTHER), _answer(0, _KEY), message], words
    return [*earlier, _USER, {"role": last, "content": _OTHER}, message, _USER], words


def _turns(what: str) -> tuple[list[Message], list[str]]:
    """Return a conversation with calls of one kind, and the words to look for."""
    called, answered = _calls(_TRIED), _answer(0, _OTHER)
    if what == "calls":
        return [_USER, called, answered], [_TRIED, _OTHER]
    if what == "object":
        return [_USER, called, _answer(0, {"none": None, _KEY: _OTHER, "true": True})], [_KEY, _OTHER]
    if what == "parallel":
        return [_USER, _calls(_ASKED, _TRIED), _answer(0, "x"), _answer(1, _OTHER)], [_TRIED, _OTHER]
    if what == "one by one":
        second = _calls(_OTHER, first=1)
        return [_USER, called, _answer(0, "x"), second, _answer(1, _KEY)], [_TRIED, _OTHER, _KEY]
    if what == "null":
        return [_USER, {**called, "content": None}, answered], [_TRIED, _OTHER]
    if what == "bare":
        return [_USER, {key: value for key, value in called.items() if key != "content"}, answered], [_TRIED, _OTHER]
    if what == "beside":
        return [_USER, {**called, "content": _KEY}, answered], [_KEY, _TRIED]
    if what == "before":
        return [_USER, {"role": "assistant", "content": _KEY}, called, answered], [_KEY, _TRIED, _OTHER]
    raise ValueError(f"{what!r} is no kind of turn")


def _calls(*words: str, first: int = 0) -> Message:
    calls = [
        {"type": "function", "id": _id(place), "function": {"name": "slipstream_tool", "arguments": {"word": word}}}
        for place, word in enumerate(words, start=first)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _answer(place: int, content: Any) -> Message:
    return {"role": "tool", "name": "slipstream_tool", "tool_call_id": _id(place), "content": content}


def _id(place: int) -> str:
    return f"slipcall{place}"


def _is_python(text: str) -> bool:
    """Return whether the object of `_turns("object")` stands there in Python's notation."""
    written = text[max(0, text.find(_KEY) - 40) : text.find(_OTHER) + 60]
    return "None" in written or "True" in written


def _joined(one: Any, other: Any) -> Any:
    """Join the contents of two messages, each text or a list of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (one, other)]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
