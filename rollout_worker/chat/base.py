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
    """arguments: an object, or the text that the policy wrote where no object could be read from it: the tools read
    what can be read. id: the policy's, or as the notation asks for one; None where it knows none."""

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempted call that cannot be read; the policy is told the reason."""

    reason: str


UNCLOSED_THOUGHT = MalformedCall("the tool call stands inside reasoning that is not closed")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """text: the turn without the token that ended it; content: the text without the calls that could be read and
    without the reasoning; calls: in the order of the text, empty where none was attempted; reasoning: None where the
    notation has none, or leaves it in the content."""

    text: str
    content: str
    calls: list[ToolCall | MalformedCall]
    reasoning: str | None = None

    def message(self) -> Message:
        """The turn as an assistant's message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        functions = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({} if call.id is None else {"id": call.id}),
            }
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

    @property
    def parses_by_user_code(self) -> bool:
        """Whether `parse` runs code of the user's: then it is called behind the boundary (I9)."""

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the policy is to speak; text is taken as it is, and a conversation that
        ends in an assistant's message is continued in it. Raises `PromptError`.

        Used for an episode's first prompt, and for the whole conversation where `suffix_ids` gave None."""

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        """The prompt as `prompt_ids` takes it, with what the run file puts before it: for a person to read."""

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Ids from the end of a turn to the start of the next one: what the policy sees of the messages in between.

        The turn `turn_ids` was sampled after `prompt_ids`, which hold all that came before. None where the format
        cannot tell what would follow: the episode then goes on in a new segment, whose prompt is the whole conversation
        rendered anew and trains nothing.
        """

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        """A whole conversation as the format writes it, for the checks at the start: nothing sampled goes through it.
        Raises `PromptError`."""

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """The turn `turn_ids`, sampled after `prompt_ids`. Any ids can be parsed."""
