"""Tools: their schemas, the check of a call's arguments, and the calls themselves.

Whatever goes wrong in a call becomes a tool message for the policy, `{"error": ...}`, and is counted; it never raises.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from protocol.config import ConfigError
from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.user_code import UserCode, UserCodeError

DEFAULT_TIMEOUT_S = 60.0

# A tool's name is part of a metric's: so many are counted by name, all others together.
MOST_COUNTED = 24
UNKNOWN, OTHER = "unknown", "other"
_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The tool message that answers a call. `counted_as`: the tool's name in metrics, `UNKNOWN` of a call that names no
    tool; `error`: what the tool's own code raised."""

    name: str
    content: str
    failed: bool
    counted_as: str = UNKNOWN
    error: UserCodeError | None = None
    call_id: str | None = None

    def message(self) -> dict[str, str]:
        """With the id of the call that it answers, if that had one."""
        answers = {} if self.call_id is None else {"tool_call_id": self.call_id}
        return {"role": "tool", "name": self.name, "content": self.content, **answers}


@dataclass(frozen=True, slots=True)
class _Tool:
    function: Callable[..., Any]
    validator: Draft202012Validator
    counted_as: str


class ToolBox:
    """The tools of an episode. Raises `ConfigError` for a function from which no schema can be made."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        code: UserCode | None = None,
    ) -> None:
        self._code = code or UserCode()
        self.schemas = [_schema(function) for function in functions]
        self._timeout_s = timeout_s
        self._tools: dict[str, _Tool] = {}
        for function, schema in zip(functions, self.schemas, strict=True):
            name = schema["function"]["name"]
            if name in self._tools:
                raise ConfigError(f"Task(tools=...): two tools are named {name!r}; rename one")
            counted_as = name[:_NAME_CHARACTERS] if len(self._tools) < MOST_COUNTED else OTHER
            validator = Draft202012Validator(_strict(schema["function"]["parameters"]))
            self._tools[name] = _Tool(function, validator, counted_as)

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolResult]:
        """The results of a turn's calls, in order; the calls run side by side."""
        if len(calls) == 1:
            return [await self._run(calls[0])]
        return list(await asyncio.gather(*(self._run(call) for call in calls)))

    async def _run(self, call: ToolCall | MalformedCall) -> ToolResult:
        if isinstance(call, MalformedCall):
            return _failure("tool_call", call.reason)
        if isinstance(call.arguments, str):
            return _failure(call.name, f"the arguments are not a JSON object: {call.arguments[:80]}")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return _failure(_encodable(call.name), f"there is no tool {call.name!r}; the tools are: {known}")
        problem = next(tool.validator.iter_errors(call.arguments), None)
        if problem is not None:
            where = "".join(f"{part}: " for part in problem.absolute_path)
            return _failure(call.name, f"bad arguments: {where}{problem.message}", tool.counted_as)
        try:
            content = await self._code.call(tool.function, as_text, self._timeout_s, **call.arguments)
            return ToolResult(call.name, content, failed=False, counted_as=tool.counted_as)
        except UserCodeError as error:
            return _failure(call.name, str(error), tool.counted_as, error)


def _failure(name: str, reason: str, counted_as: str = UNKNOWN, error: UserCodeError | None = None) -> ToolResult:
    content = _encodable(json.dumps({"error": reason}, ensure_ascii=False))
    return ToolResult(name, content, failed=True, counted_as=counted_as, error=error)


def as_text(result: object) -> str:
    """Text as it is, lists and dicts as JSON where possible, all else as Python writes it."""
    if isinstance(result, dict | list):
        try:
            return _encodable(json.dumps(result, ensure_ascii=False))
        except (TypeError, ValueError):
            pass
    return _encodable(result if isinstance(result, str) else str(result))


def _encodable(text: str) -> str:
    """`text` as a plain str; what UTF-8 cannot write, a lone surrogate, is replaced, as no tokenizer takes it."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)  # type: ignore[no-any-return]
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"Task(tools=...): the tool {name!r} cannot be described to the policy: {error}; give every parameter a "
            f"type hint, and the function a Google-style docstring with a line for each under 'Args:'"
        ) from None
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"Task(tools=...): {function!r} cannot be made into a tool ({error}); give a function with type hints"
        ) from None


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A function's parameters as strict JSON Schema: unknown names refused, `nullable` spelled out."""
    properties = {name: _with_null(value) for name, value in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "additionalProperties": False}


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """transformers marks optional types with OpenAPI's `nullable`, which JSON Schema does not know."""
    return {"anyOf": [schema, {"type": "null"}]} if schema.get("nullable") else schema
