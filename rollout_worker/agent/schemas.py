"""The tools that a request names, as a chat format takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_worker.agent.errors import Fault
from rollout_worker.tools.base import NAME

# OpenAI's bound.
MOST_TOOLS = 128
_MOST_BYTES = 256 * 1024
_STRICT = (
    "the policy's arguments cannot be held to the schema, as it would change what the policy samples; give false, and "
    "check them in the agent"
)


def read_tools(tools: Any, faults: list[Fault]) -> list[dict[str, Any]]:
    """The functions' schemas; what is wrong with them is added to `faults`."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        faults.append(Fault("tools", "give a list of tools", "invalid_type"))
        return []
    if len(tools) > MOST_TOOLS:
        faults.append(Fault("tools", f"{len(tools)} of them; at most {MOST_TOOLS} are shown"))
        return []
    names: set[str] = set()
    read = [_read(tool, f"tools[{number}]", names, faults) for number, tool in enumerate(tools)]
    schemas = [schema for schema in read if schema is not None]
    if len(msgspec.json.encode(schemas)) > _MOST_BYTES:
        faults.append(Fault("tools", f"their schemas are more than {_MOST_BYTES} bytes; shorten them"))
    return schemas


def digest(tools: Sequence[dict[str, Any]]) -> bytes:
    """Equal for equal lists of schemas, in the same order: a prompt shows them so."""
    return hashlib.blake2b(msgspec.json.encode(tools), digest_size=16).digest()


def _read(tool: Any, where: str, names: set[str], faults: list[Fault]) -> dict[str, Any] | None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        faults.append(Fault(where, "only tools of type function are known: {type, function: {name, ...}}"))
        return None
    function = {key: value for key, value in tool["function"].items() if value is not None}
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        faults.append(Fault(f"{where}.function.name", "give 1 to 128 ASCII letters, digits, _, - and dots"))
        return None
    if name in names:
        faults.append(Fault(f"{where}.function.name", f"two tools are named {name!r}; rename one"))
    names.add(name)
    if not isinstance(description, str):
        faults.append(Fault(f"{where}.function.description", "give text", "invalid_type"))
    if not isinstance(function.get("parameters", {}), dict):
        faults.append(Fault(f"{where}.function.parameters", "give a JSON schema", "invalid_type"))
    if function.pop("strict", False) is not False:
        faults.append(Fault(f"{where}.function.strict", _STRICT, "unsupported_value"))
    empty = {"type": "object", "properties": {}}
    # Templates write all that a function has, in its order.
    function = {"description": description, **function, "parameters": function.get("parameters") or empty}
    return {"type": "function", "function": {"name": name, **function}}
