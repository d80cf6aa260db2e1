"""What a chat format is: messages to token ids, what is appended between two turns, and a turn's ids to a message.

One object does all three, for one model and one set of tools, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempted call that cannot be read; the policy is told the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """text: the turn without the token that ended it; content: the text without the calls that could be read; calls: in
    the order of the text, empty where none was attempted."""

    text: str
    content: str
    calls: list[ToolCall | MalformedCall]

    def message(self) -> Message:
        """The turn as an assistant's message."""
        message: Message = {"role": "assistant", "content": self.content}
        functions = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if isinstance(call, ToolCall)
        ]
        if functions:
            message["tool_calls"] = functions
        return message


class PromptError(Exception):
    """A prompt that the format cannot render; the text says why."""


class ChatFormat(Protocol):
    """Between messages and token ids. Sampled ids are never rendered or tokenised again."""

    @property
    def tokenizer(self) -> Any:
        """The model's, a transformers one; the worker's fingerprint is taken of it and its template."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of an episode's first prompt, up to where the policy is to speak; text is taken as it is. Raises
        `PromptError`."""

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Ids from the end of a turn to the start of the next one: what the policy sees of the messages in between.

        The turn `turn_ids` was sampled after `prompt_ids`, which hold all that came before. None where the format
        cannot tell what would follow: the episode then ends as `aborted`.
        """

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """The turn `turn_ids`, sampled after `prompt_ids`. Any ids can be parsed."""
