"""What a tool is: a schema that the policy is shown, and a call that gives text."""

from __future__ import annotations

from typing import Any, Protocol


class Tool(Protocol):
    """One tool, whatever is behind it: a function, a method of an environment, an MCP server."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that a chat template gets: `{"type": "function", "function": {"name", "description",
        "parameters"}}`."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """The result as text, for arguments that fit the schema. Raises `UserCodeError`."""
