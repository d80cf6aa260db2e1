"""Defines the interface of chat formats, and checks a conversation before a format renders it.

A chat format belongs to one model and one set of tools. One object does all three translations: messages to token ids,
messages between two turns to the ids between them, and a turn's ids to a message. So the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from slipstream.rollout_worker.chat.parsers.base import Message, ParsedTurn
from slipstream.rollout_worker.vision.messages import PARTS as IMAGE_PARTS
from slipstream.rollout_worker.vision.processor import ImageProcessor, Seen

# Roles of the messages that a conversation may begin with.
OPENING = ("system", "developer")

# Data sets use the roles of OpenAI's API and others that TRL's templates and renderers know.
ROLES = frozenset(
    [
        *(*OPENING, "user", "assistant", "tool", "function"),
        *("ipython", "environment", "model", "chatbot", "latest_reminder", "tool_declare"),
    ]
)

_MUST_SPEAK = (*OPENING, "user")


class PromptError(Exception):
    """Raised for a prompt that the format cannot render. The text says why."""


class ChatFormat(Protocol):
    """Translates between messages and token ids. It never renders or tokenises sampled ids again."""

    @property
    def tokenizer(self) -> Any:
        """Return the model's transformers tokenizer. It and its template are part of the worker's fingerprint."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Return the ids that end a turn."""

    @property
    def images(self) -> ImageProcessor | None:
        """Return what opens images for the prompts of this format; None if it renders text alone."""

    @property
    def parses_by_user_code(self) -> bool:
        """Return whether `parse` runs the user's code. If so, call it behind the boundary around user code (I9)."""

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to the point where the policy speaks.

        The worker calls this for an episode's first prompt. It also calls it for the whole conversation where
        `suffix_ids` returned None.

        Args:
            prompt: Text, which is used as it is, or messages. If the last message is the assistant's, the policy
                continues that message.

        Returns:
            The prompt's token ids.

        Raises:
            PromptError: The format cannot render the prompt.
        """

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        """Return the prompt for people to read, with any system prompt that the run file puts before it."""

    def changes(self) -> list[str]:
        """Say which messages the format shows in another form, or not at all, for people to read."""

    def shows_system(self) -> bool:
        """Return whether the format shows a system message."""

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Return the ids from the end of a turn to the start of the next one: `messages` as the policy sees them.

        Args:
            prompt_ids: All token ids before the turn.
            turn_ids: The token ids of the turn, as sampled.
            messages: The messages between the two turns.

        Returns:
            The ids, or None if the format does not know them. After None the episode continues in a new segment. The
            prompt of that segment is the whole conversation, rendered again, and does not train.
        """

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        """Render a whole conversation. Episodes never call this; the start checks do.

        Raises:
            PromptError: The format cannot render the conversation.
        """

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse the turn `turn_ids`, which was sampled after `prompt_ids`. It accepts any ids."""


def _nothing(role: str) -> bool:
    return False


def checked(
    messages: Sequence[Message], parts: Sequence[str] = ("text",), knows: Callable[[str], bool] = _nothing
) -> list[Message]:
    """Check a conversation, and write it in one form: without the empty fields that a data set's columns give each
    message, with calls that have no arguments as {}, and with the results of a turn in the order of its calls.

    Args:
        messages: The conversation.
        parts: Types of content parts that the format accepts.
        knows: Returns whether the format accepts a role that is not in `ROLES`.

    Returns:
        The messages in this form.

    Raises:
        PromptError: A template would leave something out, or write it in Python's notation.
    """
    conversation = [_message(number, message, parts, knows) for number, message in enumerate(messages)]
    first = next((message for message in conversation if message["role"] not in OPENING), None)
    if first is not None and first["role"] == "tool":
        raise PromptError("the conversation begins with a tool's message; put the assistant's call before it")
    return _with_results_in_order(conversation)


def _with_results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Put the results that follow a turn in the order of its calls, as many templates pair them by their place.

    Results stay as they are where the id of one is missing or unknown, and where one has an image, as images are listed
    in the order of the given messages.
    """
    ordered: list[Message] = []
    places: dict[Any, int] = {}
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        part = list(run)
        if is_tool and all(message.get("tool_call_id") in [*places] and not _shows_image(message) for message in part):
            part.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += part
        calls = part[-1].get("tool_calls") or ()
        places = {call["id"]: place for place, call in enumerate(calls) if isinstance(call.get("id"), str)}
    return ordered


def _shows_image(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list | tuple) and any(part.get("type") == "image" for part in content)


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the texts of content parts."""
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
    if kept.get("function_call"):
        raise PromptError(f"{where} has a function_call, which chat formats leave out; give it as tool_calls")
    if calls := kept.pop("tool_calls", None):
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise PromptError(f"the tool_calls of {where} are {calls!r:.80}; give a list of calls")
        kept["tool_calls"] = [_call(call) for call in calls]
        for call in kept["tool_calls"]:
            function = call.get("function") or call
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise PromptError(f"a call of {where} has no name: {call!r:.80}; give function.name")
    if not isinstance(kept.get("tool_call_id"), str | int | None):
        raise PromptError(f"the tool_call_id of {where} is {kept['tool_call_id']!r:.80}; give the call's id")
    if role != "assistant":
        return {"content": "", **kept}
    # Keep null content: some templates recognise a turn that only calls tools by it.
    return {**kept, "content": None} if "content" in message and content is None else kept


def _check_part(where: str, part: Any, types: Sequence[str]) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in types:
        remedy = "; give reasoning as reasoning_content" if kind == "thinking" else ""
        if kind in IMAGE_PARTS:
            remedy = "; images need images.enabled = true, and a model that sees"
        raise PromptError(f"{where} holds a part of type {kind!r:.80}; only text can be rendered{remedy}")
    if kind == "image":
        if not isinstance(part.get(kind), Seen):
            raise PromptError(f"{where} holds a part of type 'image' without an image")
        return
    if not isinstance(part.get(kind), str):
        raise PromptError(f"{where} holds a part of type {kind!r} whose {kind!r} is {part.get(kind)!r:.80}; give text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with {} where it has no arguments."""
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function)}
    given = call.get("arguments", {})
    is_nothing = given is None or (isinstance(given, str) and given.strip() in ("", "null"))
    return {**call, "arguments": {}} if is_nothing else dict(call)
