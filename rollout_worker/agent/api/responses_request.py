"""Reads requests for responses (`/v1/responses`): their items as messages, their parameters as those of chats.

The items of one turn (reasoning, text, calls) are one message, as the policy sampled them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from slipstream.rollout_worker.agent.api.messages import Call, ChatMessage, Faults, MessageReader, read_text
from slipstream.rollout_worker.agent.api.request import Asked, Reading, read_parameters
from slipstream.rollout_worker.tools.argument_text import short

# What a request may ask to be included. What is about tools that are not here changes nothing.
_LOGPROBS = "message.output_text.logprobs"

_READ = frozenset(
    {
        *("input", "instructions", "previous_response_id", "max_output_tokens", "text", "reasoning", "store"),
        *("include", "truncation", "background", "tools", "tool_choice", "max_tool_calls"),
    }
)

# Parameters that are never honoured, and the remedy.
_REFUSED: Mapping[str, str] = {
    "conversation": "no conversations are kept here; give previous_response_id, or the whole input",
    "prompt": "no prompts are kept here; give input",
    "context_management": "nothing is cut here; cut the input yourself",
    "messages": "chats have it: give input",
    "response_format": "chats have it: give text.format",
    "reasoning_effort": "chats have it: give reasoning.effort",
    "max_tokens": "chats have it: give max_output_tokens",
    "max_completion_tokens": "chats have it: give max_output_tokens",
    "n": "a response is one answer; ask again for another",
    "logprobs": "chats have it: give include = [message.output_text.logprobs]",
}

_OF_CHATS: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}

_INPUT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
_REASONING_PARTS = {"reasoning_text": "text", "text": "text"}
_ROLES = ("system", "developer", "user")
# Fields of a tool that are not shown to the policy, as templates show any other.
_UNSHOWN = ("allowed_callers", "defer_loading", "output_schema")


def read_response_parameters(given: Mapping[str, Any], reading: Reading, faults: Faults) -> Asked:
    """Read everything but the conversation. `faults`: its own. Raises `ApiError`, which names all faults."""
    chat: dict[str, Any] = {"model": given.get("model")}
    for name, value in given.items():
        if name in _REFUSED:
            faults.add(name, _REFUSED[name], "unsupported_parameter")
        elif name not in _READ:
            chat[name] = value
    if (most := given.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if _all(given.get("include", []), str, "include", "give a list of texts", faults):
        chat["logprobs"] = _LOGPROBS in given.get("include", [])
    if given.get("background", False) is not False:
        faults.add("background", "a response is waited for; leave it out", "unsupported_value")
    if not isinstance(given.get("truncation", ""), str):
        faults.add("truncation", f"{short(given['truncation'])}; give auto or disabled", "invalid_type")
    elif given.get("truncation", "disabled") != "disabled":
        faults.add_unfollowed("truncation", "nothing is cut; cut the input in the agent")
    if not isinstance(given.get("store", True), bool):
        faults.add("store", f"{short(given['store'])}; give true or false", "invalid_type")
    chat |= _forms(given, faults)
    if (tools := given.get("tools")) is not None:
        chat["tools"] = list(_tools(tools, faults)) if isinstance(tools, list) else tools
    if (choice := given.get("tool_choice")) is not None:
        named = isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
    return read_parameters(
        chat,
        reading,
        faults,
        lambda param: _OF_CHATS.get(param, param.replace(".function", "")),
    )


def _forms(given: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """Return what `text` and `reasoning` ask for, in the words of chats."""
    text, reasoning = given.get("text", {}), given.get("reasoning", {})
    for name, value in (("text", text), ("reasoning", reasoning)):
        if not isinstance(value, dict):
            faults.add(name, f"{short(value)}; give an object", "invalid_type")
            return {}
    found: dict[str, Any] = {"reasoning_effort": reasoning.get("effort"), "verbosity": text.get("verbosity")}
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            kept = "reasoning is given as it was sampled, not as a summary; leave it out"
            faults.add_unfollowed(f"reasoning.{name}", kept)
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {name: value for name, value in {**found, "response_format": form}.items() if value is not None}


def _tools(tools: list[Any], faults: Faults) -> Iterator[dict[str, Any]]:
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            text = f"{short(kind)}: only functions are called, by the agent; give {{type: function, name: ...}}"
            faults.add(f"{where}.type", text, "unsupported_value")
            continue
        for name, value in tool.items():
            if name in _UNSHOWN and value:
                text = "the policy is shown names, descriptions and parameters; leave it out"
                faults.add_unfollowed(f"{where}.{name}", text)
        shown = {name: value for name, value in tool.items() if name not in ("type", *_UNSHOWN)}
        yield {"type": "function", "function": shown}


def _all(values: Any, kind: type, name: str, remedy: str, faults: Faults) -> bool:
    if isinstance(values, list) and all(isinstance(value, kind) for value in values):
        return True
    faults.add(name, f"{short(values)}; {remedy}", "invalid_type")
    return False


class InputReader(MessageReader):
    """Reads the items of a request as messages.

    Args:
        items: The items of the episode's responses by id, for references.
    """

    def __init__(self, items: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._items = items

    def read(self, given: Any) -> None:
        """Read the field `input`."""
        if isinstance(given, str):
            self._add(ChatMessage("user", given), "input")
        else:
            for where, item in self._listed(given, "input"):
                self._item(item, where)

    def _item(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            self.faults.add(where, f"{short(item)} is no item; give an object with a type")
            return
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference" or (kind is None and set(item) == {"id"}):
            found = self._items.get(item["id"]) if isinstance(item.get("id"), str) else None
            if found is None:
                text = f"{short(item.get('id'))}: no response of this episode has an item with this id; give the item"
                self.faults.add(f"{where}.id", text)
            else:
                self._item(found, where)
        elif kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        else:
            text = f"an item of type {short(kind)}; the policy reads messages, reasoning, function_call and its output"
            self.faults.add(f"{where}.type", text)

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, place = item.get("role"), f"{where}.content"
        content = read_text(item.get("content"), place, self.faults, _INPUT_PARTS)
        if role == "assistant":
            turn = self._turn(where)
            self.messages[-1] = replace(turn, content=_joined(turn.content, content or ""))
        elif role not in _ROLES:
            self.faults.add(f"{where}.role", f"{short(role)}; give one of {', '.join(_ROLES)}, assistant")
        elif content is None:
            self.faults.add(place, f"a message of role {role} has text; give it")
        else:
            self._add(ChatMessage(role, content), where)

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        content = item.get("content")
        if not content and isinstance(id := item.get("id"), str):  # some clients send the id back without the text
            content = self._items.get(id, {}).get("content")
        text = read_text(content, f"{where}.content", self.faults, _REASONING_PARTS)
        turn = self._turn(where)
        self.messages[-1] = replace(turn, reasoning=_joined(turn.reasoning, text) if text else turn.reasoning)

    def _call(self, item: dict[str, Any], where: str) -> None:
        id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
        if not isinstance(id, str) or not isinstance(name, str) or not isinstance(arguments, str):
            self.faults.add(where, "give {type: function_call, call_id, name, arguments}, all of them text")
            return
        turn = self._turn(where, is_call=True)
        self.messages[-1] = replace(turn, calls=(*turn.calls, Call(id, name, arguments)))

    def _output(self, item: dict[str, Any], where: str) -> None:
        output = read_text(item.get("output"), f"{where}.output", self.faults, _INPUT_PARTS)
        answers = item.get("call_id")
        if not isinstance(answers, str) or output is None:
            self.faults.add(where, "give {type: function_call_output, call_id, output}, both of them text")
            return
        # It belongs to its call, whatever clients write between the two. A call of an earlier response is before all.
        called = (n for n, each in enumerate(self.messages) if answers in [call.id for call in each.calls])
        place = max(called, default=-1) + 1
        while place < len(self.messages) and self.messages[place].role == "tool":
            place += 1
        self.messages.insert(place, ChatMessage("tool", output, answers=answers))
        self._places.insert(place, where)

    def _turn(self, where: str, is_call: bool = False) -> ChatMessage:
        """Return the assistant's message that an item belongs to: the last one, or a new one. While calls wait for
        their outputs, items belong to the message of the calls, in whatever order clients write them."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or not (is_call or last.calls or last.content is None):
            self._add(ChatMessage("assistant"), where)
        return self.messages[-1]


def _joined(before: str | None, text: str) -> str:
    return "\n\n".join(part for part in (before, text) if part)


def instructions_of(given: Mapping[str, Any], faults: Faults) -> list[ChatMessage]:
    """Return the system message of a request, if it has instructions."""
    text = given.get("instructions")
    if text is None:
        return []
    if not isinstance(text, str):
        faults.add("instructions", f"{short(text)}; give text", "invalid_type")
        return []
    return [ChatMessage("system", text)]
