"""The interface of chat formats, and the check of a conversation before a format renders it.

One object turns messages into token ids, tells the ids between two turns, and turns a turn's ids into a message, for
one model and one set of tools, so that the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollout_worker.chat.parsers.base import Message, ParsedTurn


class PromptError(Exception):
    """A prompt that the format cannot render; the text says why."""


class ChatFormat(Protocol):
    """Translates between messages and token ids. Sampled ids are never rendered or tokenised again."""

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer; it and its template are part of the worker's fingerprint."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""

    @property
    def parses_by_user_code(self) -> bool:
        """Whether `parse` runs the user's code, and so has to be called behind the boundary (I9)."""

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the policy speaks.

        Text is taken as it is. A conversation that ends in an assistant's message is continued in that message. Used
        for an episode's first prompt, and for the whole conversation where `suffix_ids` gave None. Raises
        `PromptError`.
        """

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        """Return the prompt with what the run file puts before it, for people to read."""

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Return the ids from the end of a turn to the start of the next one, as the policy sees `messages` there.

        Args:
            prompt_ids: All ids before the turn.
            turn_ids: The turn, as it was sampled.
            messages: The messages between the two turns.

        Returns: The ids, or None where the format cannot tell them. The episode then goes on in a new segment, whose
            prompt is the whole conversation rendered anew and does not train.
        """

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        """Render a whole conversation, for the checks at the start only. Raises `PromptError`."""

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse the turn `turn_ids`, which was sampled after `prompt_ids`. Any ids can be parsed."""


_OPENING = ("system", "developer")

# Roles of OpenAI's API, and others that TRL's templates and renderers know.
ROLES = frozenset(
    [
        *(*_OPENING, "user", "assistant", "tool", "function"),
        *("ipython", "environment", "model", "chatbot", "latest_reminder", "tool_declare"),
    ]
)

_MUST_SPEAK = (*_OPENING, "user")


def _nothing(role: str) -> bool:
    return False


def checked(
    messages: Sequence[Message], parts: Sequence[str] = ("text",), knows: Callable[[str], bool] = _nothing
) -> list[Message]:
    """Check a conversation, and leave out the empty fields that a data set's columns give each message.

    Args:
        parts: Types of content parts that the format takes.
        knows: Whether the format has a role besides `ROLES`.

    Raises:
        PromptError: A template would leave something out, or write it as Python does.
    """
    conversation = [_message(number, message, parts, knows) for number, message in enumerate(messages)]
    first = next((message for message in conversation if message["role"] not in _OPENING), None)
    if first is not None and first["role"] == "tool":
        raise PromptError("the conversation begins with a tool's message; put the assistant's call before it")
    return conversation


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join parts of text."""
    return "".join(part["text"] for part in parts)


def _message(number: int, message: Any, parts: Sequence[str], knows: Callable[[str], bool]) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"{message!r:.80} is no message; give a dict with role and content")
    role, content = message.get("role"), message.get("content")
    where = f"message {number}"
    if not isinstance(role, str) or not (role in ROLES or knows(role)):
        raise PromptError(f"{where} has the role {role!r:.80}; give one of system, developer, user, assistant, tool")
    if content is None and role in _MUST_SPEAK:
        raise PromptError(f"{where}, of role {role!r}, has no content; give it text")
    if isinstance(content, list | tuple):
        for part in content:
            _check_part(f"{where}, of role {role!r},", part, parts)
    elif role != "tool" and not isinstance(content, str | None):
        raise PromptError(f"the content of {where} is {content!r:.80}; give text")
    kept = {key: value for key, value in message.items() if value is not None}
    if role != "assistant":
        return {"content": "", **kept}
    # Some templates recognise a turn that only calls tools by its null content.
    return {**kept, "content": None} if "content" in message and content is None else kept


def _check_part(where: str, part: Any, types: Sequence[str]) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in types:
        remedy = "; give reasoning as reasoning_content" if kind == "thinking" else ""
        raise PromptError(f"{where} holds a part of type {kind!r:.80}; only text can be rendered{remedy}")
    if not isinstance(part.get(kind), str):
        raise PromptError(f"{where} holds a part of type {kind!r} whose {kind!r} is {part.get(kind)!r:.80}; give text")
