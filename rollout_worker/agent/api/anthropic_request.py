"""Reads requests for Anthropic's messages (`/v1/messages`) as messages and parameters of chats.

A user's message of tool results and text becomes the tools' messages and the user's. An assistant's thinking, text and
tool use are one message, as the policy sampled them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from slipstream.rollout_worker.agent.api.messages import Call, ChatMessage, Faults, MessageReader, read_text
from slipstream.rollout_worker.agent.api.request import READ_PARAMETERS, Asked, Reading, read_parameters
from slipstream.rollout_worker.tools.argument_text import short
from slipstream.rollout_worker.user_code.values import encodable

# The key of a tool's input that holds arguments which are no JSON object, as Anthropic's API has it.
INVALID_JSON = "INVALID_JSON"

_READ = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking"),
        *("output_config", "output_format"),
    }
)

# Labels, and hints about price, speed and caches: they do not change an answer.
_HARMLESS = frozenset(
    {"cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics", "betas"}
)

_REFUSED: Mapping[str, str] = {
    "container": "nothing is run here; leave it out",
    "mcp_servers": "only the agent calls tools; give the servers' tools as tools",
    "context_management": "nothing is cut here; cut the messages yourself",
}

_OF_CHATS: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

# Fields of a tool that are not shown to the policy, and those of them that would change what it may do.
_UNSHOWN = ("type", "cache_control", "eager_input_streaming")
_UNFOLLOWED = ("allowed_callers", "defer_loading", "input_examples")


def read_message_parameters(given: Mapping[str, Any], reading: Reading, faults: Faults) -> Asked:
    """Read everything but the conversation. `faults`: its own. Raises `ApiError`, which names all faults."""
    chat: dict[str, Any] = {"model": given.get("model"), "stream": given.get("stream", False)}
    for name, value in given.items():
        if name in _REFUSED:
            faults.add(name, _REFUSED[name], "unsupported_parameter")
        elif name in READ_PARAMETERS and name not in _READ:
            faults.add(name, "chats have it; leave it out", "unknown_parameter")
        elif name not in _READ and name not in _HARMLESS:
            chat[name] = value
    chat["max_completion_tokens"] = given.get("max_tokens")
    chat["stop"] = given.get("stop_sequences")
    thinking = given.get("thinking", {"type": "disabled"})
    if thinking != {"type": "disabled"}:
        text = "the policy thinks as it does; leave it out, or set chat.chat_template_kwargs in the run file"
        faults.add_unfollowed("thinking", text)
    output = given.get("output_config", {})
    if not isinstance(output, dict):
        faults.add("output_config", f"{short(output)}; give an object", "invalid_type")
        output = {}
    chat["reasoning_effort"] = output.get("effort")
    form = output.get("format", given.get("output_format"))
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    chat["response_format"] = form
    if (tools := given.get("tools")) is not None:
        chat["tools"] = list(_tools(tools, faults)) if isinstance(tools, list) else tools
    chat |= _choice(given.get("tool_choice", {"type": "auto"}), faults)
    return read_parameters(
        chat,
        reading,
        faults,
        lambda param: _OF_CHATS.get(
            param, param.replace(".function.parameters", ".input_schema").replace(".function", "")
        ),
    )


def _choice(choice: Any, faults: Faults) -> dict[str, Any]:
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": None}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        faults.add("tool_choice", f"{short(choice)}; give {{type: auto}}, any, none or tool")
        return {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": kinds[kind] or named, **alone}


def _tools(tools: list[Any], faults: Faults) -> Iterator[dict[str, Any]]:
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind not in (None, "custom") or not isinstance(tool, dict):
            text = f"{short(kind)}: only the agent's own tools are called; give {{name, description, input_schema}}"
            faults.add(f"{where}.type", text, "unsupported_value")
            continue
        for name in _UNFOLLOWED:
            if tool.get(name):
                text = "the policy is shown names, descriptions and schemas; leave it out"
                faults.add_unfollowed(f"{where}.{name}", text)
        function = {name: value for name, value in tool.items() if name not in (*_UNSHOWN, *_UNFOLLOWED)}
        if "input_schema" in function:
            function["parameters"] = function.pop("input_schema")
        yield {"type": "function", "function": function}


class BlockReader(MessageReader):
    """Reads the messages of a request, block by block."""

    def read(self, given: Any) -> None:
        """Read the field `messages`."""
        for where, message in self._listed(given, "messages"):
            self._message(message, where)
        self.check_order("tool_use_id")

    def system(self, given: Any) -> list[ChatMessage]:
        """Return the system message of a request, if it has one."""
        text = read_text(given, "system", self.faults)
        return [] if text is None else [ChatMessage("system", text)]

    def _message(self, message: Any, where: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            text = f"{short(role)}; give one of user, assistant" if isinstance(message, dict) else "give an object"
            self.faults.add(f"{where}.role", text)
            return
        content = message.get("content")
        if isinstance(content, str):
            self._add(ChatMessage(role, content), where)
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            self.faults.add(f"{where}.content", f"{short(content)}; give text, or a list of blocks")
        elif role == "assistant":
            self._answer(content, where)
        else:
            self._blocks(role, content, where)

    def _blocks(self, role: str, blocks: list[dict[str, Any]], where: str) -> None:
        """Read a message whose blocks are text, or results of tools."""
        texts: list[str] = []

        def spoken() -> None:
            if texts:
                self._add(ChatMessage(role, "".join(texts)), where)
                texts.clear()

        for number, block in enumerate(blocks):
            place = f"{where}.content[{number}]"
            if block.get("type") == "tool_result" and role == "user":
                spoken()
                content = read_text(block.get("content"), f"{place}.content", self.faults)
                if block.get("is_error") is True:  # as a failure of a task's tool is shown
                    content = encodable(json.dumps({"error": content or "the call failed"}, ensure_ascii=False))
                answers = block.get("tool_use_id")
                if isinstance(answers, str):
                    self._add(ChatMessage("tool", content or "", answers=answers), place)
                else:
                    self.faults.add(f"{place}.tool_use_id", f"{short(answers)}; give the id of the tool use it answers")
            else:
                texts.append(read_text([block], f"{where}.content", self.faults) or "")
        spoken()
        if not blocks:
            self.faults.add(f"{where}.content", f"a message of role {role} has text; give it")

    def _answer(self, blocks: list[dict[str, Any]], where: str) -> None:
        """Read an assistant's message."""
        thoughts, texts, calls = list[str](), list[str](), list[Call]()
        for number, block in enumerate(blocks):
            place, kind = f"{where}.content[{number}]", block.get("type")
            if kind == "thinking":
                thought = block.get("thinking")
                if not isinstance(thought, str):
                    self.faults.add(f"{place}.thinking", f"{short(thought)}; give text")
                thoughts.append(str(thought))
            elif kind == "tool_use":
                id, name, given = block.get("id"), block.get("name"), block.get("input")
                if isinstance(id, str) and isinstance(name, str) and isinstance(given, dict):
                    calls.append(Call(id, name, _arguments(given)))
                else:
                    self.faults.add(place, "give {type: tool_use, id, name, input}; the input is an object")
            elif kind != "redacted_thinking":  # which no policy here writes
                texts.append(read_text([block], f"{where}.content", self.faults) or "")
        reasoning = "\n\n".join(thoughts) if any(thoughts) else None
        content = "".join(texts) if texts else None
        self._add(ChatMessage("assistant", content, tuple(calls), reasoning=reasoning), where)


def _arguments(given: dict[str, Any]) -> str:
    """Return arguments as the text that they were before `input_of`."""
    text = given.get(INVALID_JSON)
    return text if isinstance(text, str) and len(given) == 1 else msgspec.json.encode(given).decode()


def input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}
