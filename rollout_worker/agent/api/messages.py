"""Reads a request's messages, makes them comparable and converts them for chat formats. Also defines errors in the form
of OpenAI's API.

Two messages are equal where the policy would read the same: role, text, reasoning, calls and the answered id are equal.
Null fields, fields that are never shown, and text split into parts make no difference. The policy's own answers are
recognised whatever clients make of the ids and the JSON of its calls, and whether or not they give back the white space
around its text, its text next to calls, and its reasoning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.tools.argument_text import short

INVALID, SERVER = "invalid_request_error", "server_error"

# Faults that one error names.
MAX_FAULTS = 32

MAX_MESSAGES = 4096

# Codes that agents branch on: the first is OpenAI's, the others are Slipstream's.
CONTEXT, TURNS, OVER = "context_length_exceeded", "turn_limit", "episode_over"

_ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of an assistant's message that neither templates nor this endpoint read.
_UNREAD = ("audio", "function_call")

# Names that clients and servers use for an assistant's reasoning; the first one that holds text counts.
_REASONING = ("reasoning_content", "reasoning")

# Types of content parts, and the fields that hold their texts.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a request. `param`: its place, such as messages[2].content."""

    param: str
    text: str
    code: str = "invalid_value"


@dataclass(slots=True)
class Faults:
    """All faults of a request.

    Attributes:
        wrong: What cannot be read or is not known.
        unfollowed: What can be read and is not followed, which `agent.unenforced` makes a fault or lets pass.
    """

    wrong: list[Fault] = field(default_factory=list)
    unfollowed: list[Fault] = field(default_factory=list)

    def add(self, param: str, text: str, code: str = "invalid_value") -> None:
        self.wrong.append(Fault(param, text, code))

    def add_unfollowed(self, param: str, text: str, code: str = "unsupported_value") -> None:
        self.unfollowed.append(Fault(param, text, code))


class ApiError(Exception):
    """A request that is not answered. Clients should not retry it, since the worker has retried already.

    Attributes:
        status: HTTP status.
        code: Code for programs.
        params: Place of each fault.
        kind: OpenAI's type of the error.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, params: Sequence[str] = (), kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.params = list(params)
        self.kind = kind

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's form, which has one `param`; `params` names all of them."""
        param = self.params[0] if self.params else None
        error = {"message": str(self), "type": self.kind, "param": param, "code": self.code}
        return {"error": error if len(self.params) < 2 else {**error, "params": self.params}}


def refusal(faults: Sequence[Fault]) -> ApiError:
    """Return one error, status 400, for all faults of a request. Of very many it names the first."""
    named = list(faults[:MAX_FAULTS])
    if len(faults) > MAX_FAULTS:
        named.append(Fault("others", f"{len(faults) - MAX_FAULTS} more"))
    message = "; ".join(f"{fault.param}: {fault.text}" for fault in named)
    return ApiError(400, message, faults[0].code, [fault.param for fault in named])


def over() -> ApiError:
    return ApiError(410, "the episode of this key is over: its agent has returned, raised or timed out", OVER)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in an assistant's message. `arguments`: text, usually JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as a client wrote it.

    Attributes:
        content: Its text; None where it has none.
        calls: Tool calls of an assistant's message.
        answers: Id of the call that a tool's message answers.
        reasoning: Reasoning of an assistant's message, if the client sent it.
    """

    role: str
    content: str | None = None
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    reasoning: str | None = None

    def message(self) -> Message:
        """Return the message as a chat format takes it; `shown_to_policy` makes a tool's."""
        message: Message = {"role": self.role, "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


def chained(before: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation, given the digest of all but its last message. Equal where the policy reads
    the same."""
    calls = [[call.id, call.name, call.arguments] for call in message.calls]
    return _digest(before, [message.role, message.content or "", message.answers, message.reasoning, calls])


def chained_answer(before: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation that ends in an answer of the policy. It is the same whatever a client makes
    of the answer; `repeats` tells whether it may be the answer."""
    calls = [[call.name, _same(call.arguments)] for call in message.calls]
    return _digest(before, ["answer", "" if calls else (message.content or "").strip(), calls])


def repeats(message: ChatMessage, answer: ChatMessage) -> bool:
    """Tell whether a message with the digest of an answer is that answer: its reasoning is as it was given or left out,
    its text is as it was given or without white space around it, or left out next to calls."""
    given, text = answer.content or "", message.content or ""
    is_text = (bool(answer.calls) and not text) or (text in given and text.strip() == given.strip())
    return is_text and message.reasoning in (None, answer.reasoning)


def read_text(content: Any, where: str, faults: Faults, parts: Mapping[str, str] = _TEXT_PARTS) -> str | None:
    """Return a text that is given as one or in parts; None if there is none.

    Args:
        where: Its place in the request.
        faults: Gets what is no text.
        parts: Types of parts, and the field of each that holds its text. Errors name the first one.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        faults.add(where, f"{short(content)}; give text, or a list of parts")
        return None
    texts = []
    for number, part in enumerate(content):
        part = part if isinstance(part, Mapping) else {}
        kind = part.get("type")
        text = part.get(parts[kind]) if isinstance(kind, str) and kind in parts else None
        if isinstance(text, str):
            texts.append(text)
        else:
            known = f"{{type: {next(iter(parts))}, text: ...}}"
            faults.add(f"{where}[{number}]", f"a part of type {short(kind)}; the policy reads text alone: {known}")
    return "".join(texts)


class MessageReader:
    """Collects the messages of a request.

    Attributes:
        messages: The messages so far.
        faults: What cannot be read.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.faults = Faults()
        self._places: list[str] = []

    def check_order(self, answers: str, earlier: Sequence[ChatMessage] = ()) -> None:
        """Check that tools' messages answer earlier calls, and that it is the policy's turn.

        Args:
            answers: The field of a tool's message that names the call.
            earlier: Messages that the conversation continues from.
        """
        if self.faults.wrong or not self.messages:
            return
        known = {call.id for each in earlier for call in each.calls}
        for each, where in zip(self.messages, self._places, strict=True):
            known.update(call.id for call in each.calls)
            if each.role == "tool" and each.answers not in known:
                text = f"{short(each.answers)}: no message before it has a call with this id"
                self.faults.add(f"{where}.{answers}", text)
        if self.messages[-1].role == "assistant":
            text = "the last message is an assistant's, and answers are never continued; end with a user's or a tool's"
            self.faults.add(f"{self._places[-1]}.role", text)

    def _listed(self, given: Any, name: str) -> list[tuple[str, Any]]:
        """Return the entries of a list, each with its place. `name`: the field that holds it."""
        if not isinstance(given, list) or not given:
            self.faults.add(name, "give a list with at least one entry", "invalid_type")
            return []
        if len(given) > MAX_MESSAGES:
            self.faults.add(name, f"{len(given)} of them; at most {MAX_MESSAGES} are read")
            return []
        return [(f"{name}[{number}]", each) for number, each in enumerate(given)]

    def _add(self, message: ChatMessage, where: str) -> None:
        self.messages.append(message)
        self._places.append(where)


class ChatReader(MessageReader):
    """Reads the messages of a request for chat completions."""

    def read(self, given: Any) -> None:
        """Read the field `messages`."""
        for where, message in self._listed(given, "messages"):
            self._message(message, where)
        self.check_order("tool_call_id")

    def _message(self, message: Any, where: str) -> None:
        if not isinstance(message, dict):
            self.faults.add(where, f"{short(message)} is no message; give an object with role and content")
            return
        role = message.get("role")
        if role not in _ROLES:
            self.faults.add(f"{where}.role", f"{short(role)}; give one of {', '.join(_ROLES)}")
            return
        content = read_text(message.get("content"), f"{where}.content", self.faults)
        for name in _UNREAD:
            if message.get(name):
                self.faults.add(f"{where}.{name}", "it is not known here; leave it out")
        answers = message.get("tool_call_id") if role == "tool" else None
        if role == "assistant":
            calls = tuple(self._calls(message.get("tool_calls"), f"{where}.tool_calls"))
            refused = message.get("refusal")
            content = refused if content is None and isinstance(refused, str) else content
            reasoning = next((text for name in _REASONING if isinstance(text := message.get(name), str)), None)
            self._add(ChatMessage(role, content, calls, reasoning=reasoning), where)
        elif role == "tool" and not isinstance(answers, str):
            self.faults.add(f"{where}.tool_call_id", f"{short(answers)}; give the id of the call that it answers")
        else:
            if message.get("content") is None:
                self.faults.add(f"{where}.content", f"a message of role {role} has text; give it")
            self._add(ChatMessage(role, content, answers=answers), where)

    def _calls(self, calls: Any, where: str) -> Iterator[Call]:
        if not isinstance(calls, list | None):
            self.faults.add(where, f"{short(calls)}; give a list of calls")
            return
        for number, call in enumerate(calls or ()):
            call = call if isinstance(call, Mapping) else {}
            function = each if isinstance(each := call.get("function"), Mapping) else {}
            id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
            if isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str):
                yield Call(id, name, arguments)
            else:
                text = "give {id, type: function, function: {name, arguments}}, all of them text"
                self.faults.add(f"{where}[{number}]", text)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODER = msgspec.json.Decoder(float_hook=_number)


def _digest(before: bytes, what: list[Any]) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(what), digest_size=16).digest()


def _same(arguments: str) -> Any:
    """Return a form that is equal for texts with the same JSON. Some clients write every number with a point."""
    try:
        return msgspec.json.encode(_DECODER.decode(arguments), order="sorted").decode()
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError, OverflowError):
        return arguments
