"""Uses the `renderers` library as a chat format. The library knows a model family's notation at the level of ids.

Sampled ids are never rendered: the library appends to them, or refuses. It recognises a special token by its id. So a
tag that the policy or a tool only wrote as text is not a call.

`RendererTokenizer` gives the library a transformers tokenizer without the detours of transformers' own calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.rollout_worker.chat.base import PromptError, checked
from slipstream.rollout_worker.chat.parsers.base import UNCLOSED_THOUGHT, MalformedCall, Message, ParsedTurn, ToolCall
from slipstream.rollout_worker.chat.shown_messages import TRIED_TOOL, ShownMessages
from slipstream.rollout_worker.chat.shown_tools import shown_tools

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall


# Longer texts would block the event loop: a text of this length takes about 1 ms. They go through the one function of
# the backend that releases the interpreter lock.
INLINE_CHARACTERS = 2048

# A template may put up to this many tokens after a message's text to close the message.
_MAX_CLOSING = 16

# These renderers of renderers 0.1.12 leave out the line end after a sampled </assistant>. They write both if the turn
# comes to them without its end.
_CLOSES_ITSELF = ("laguna-xs.2", "laguna-m.1")

_PARTS = ("text", "thinking")

_REASONS = {
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call names no function",
    "malformed_structure": "the tool call is not written as tool calls are written here",
}

_RAW_CHARACTERS = 80

_PROBE = "So"

_QUESTION = {"role": "user", "content": _PROBE}

_END_OF_THOUGHT = "</think"

# Stands for the format's own tools.
_OWN = object()


class RendererTokenizer:
    """Implements `renderers.base.Tokenizer` on a fast tokenizer's backend.

    The backend takes a third of the time and is safe in several threads. A slow tokenizer is used as it is.

    Args:
        tokenizer: A transformers tokenizer.
        name: The model's name. Some renderers tell variants of a family apart by it.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.chat_template = tokenizer.chat_template
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]
        if len(text) < INLINE_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids  # type: ignore[no-any-return]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        decoder = self._tokenizer if self._backend is None else self._backend
        return decoder.decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]


_Result = TypeVar("_Result")


class RendererFormat:
    """Uses one renderer for one tokenizer and one set of tools.

    Args:
        tokenizer: A transformers tokenizer.
        renderer_config: One of `renderers.RendererConfig`.
        tools: JSON schemas of the tools.
        name: The model's name. Some renderers tell variants of a family apart by it.

    Raises:
        Exception: The library's own, where renderer, tokenizer and tools do not fit together.
    """

    images = None

    def __init__(self, tokenizer: Any, renderer_config: Any, tools: Sequence[dict[str, Any]], name: str = "") -> None:
        from renderers import create_renderer

        self.tokenizer = tokenizer
        self._ids = RendererTokenizer(tokenizer, name)
        self._renderer = create_renderer(self._ids, renderer_config)
        self._tools: Any = shown_tools(tools, self._tried_tools) if tools else None
        self._tools_size = len(json.dumps(self._tools))
        self.stop_token_ids = sorted(self._renderer.get_stop_token_ids())
        self._stops = frozenset(self.stop_token_ids)
        self.parses_by_user_code = renderer_config.name == "custom"
        self._closes_itself = renderer_config.name in _CLOSES_ITSELF
        self._shown_messages = ShownMessages(self._tried)
        self._tags = self._thinks_in_tags()

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Render messages with the renderer, or encode text as it is, with the tokenizer's special tokens."""
        if isinstance(prompt, str):
            return await self._run(len(prompt), partial(self._ids.encode, prompt, add_special_tokens=True))
        messages = self._checked(prompt)
        continued = bool(messages) and messages[-1].get("role") == "assistant"
        render = partial(self._continued, messages) if continued else partial(self._render, messages, True)
        return await self._run(self._tools_size + _size(messages), render)

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        return prompt

    def changes(self) -> list[str]:
        return self._shown_messages.changes()

    def shows_system(self) -> bool:
        return bool(self._shown_messages.shows_system())

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        given = self._checked(messages)
        return await self._run(self._tools_size + _size(given), partial(self._render, given, generation_prompt))

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Return the ids between two turns, or None if the library cannot prove them.

        One such case is a turn that stopped inside its reasoning.
        """
        try:
            shown = self._shown_messages(messages, previous="assistant")
        except PromptError:
            return None
        bridge = partial(self._bridge, list(prompt_ids), list(turn_ids), shown)
        return await self._run(_size(messages), bridge)

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse a turn into reasoning, content and calls.

        The prompt shows whether it opened the reasoning, and so where content begins. A call that cannot be read stays
        in the content. Without tools no call can be read. A call inside the reasoning is not a call.
        """
        ids = list(turn_ids)
        text = self._ids.decode(ids[:-1] if ids and ids[-1] in self._stops else ids)
        try:
            turn = self._renderer.parse_response(ids, tools=self._tools, prompt_ids=list(prompt_ids))
            thought = self._thought(ids, turn) if self._tags and turn.reasoning_content is not None else []
        except Exception as error:  # on hostile text it raises the JSON parser's exceptions
            reason = f"the turn cannot be read ({type(error).__name__})"
            return ParsedTurn(text, text, [MalformedCall(reason)] if self._tools else [])
        spoken = turn.tool_calls[len(thought) :]
        calls = [*thought, *(_read(call) for call in spoken)]
        unread = [
            self._written(ids, call)
            for call, read in zip(spoken, calls[len(thought) :], strict=True)
            if not self._tools or isinstance(read, MalformedCall)
        ]
        spoken_text = turn.content.strip() if turn.tool_calls else turn.content
        content = "\n".join(piece for piece in (spoken_text, *unread) if piece)
        reasoning = None if turn.reasoning_content is None else turn.reasoning_content.strip("\n")
        attempts = [call for call in calls if call is not None] if self._tools else []
        return ParsedTurn(text, content, attempts, reasoning)

    def _thought(self, ids: list[int], turn: ParsedResponse) -> list[MalformedCall | None]:
        """Judge the first calls of a turn, those that stand inside the reasoning.

        Some renderers let a call end the reasoning.

        Returns:
            One entry per call inside the reasoning. None means that the reasoning continued after the call, so the
            policy only thought of it. Otherwise the entry says that the reasoning is not closed.
        """
        fates: list[MalformedCall | None] = []
        for call in turn.tool_calls:
            if call.token_span is None:
                break
            start, end = call.token_span
            if _END_OF_THOUGHT in self._ids.decode(ids[:start]):
                break
            went_on = _END_OF_THOUGHT in self._ids.decode(ids[end:])
            fates.append(None if went_on else UNCLOSED_THOUGHT)
        return fates

    def _thinks_in_tags(self) -> bool:
        thoughtful = {"role": "assistant", "content": _PROBE, "reasoning_content": _PROBE}
        try:
            return _END_OF_THOUGHT in self._ids.decode(self._render([_QUESTION, thoughtful], False))
        except PromptError:
            return False

    async def _run(self, characters: int, work: Callable[[], _Result]) -> _Result:
        """Run `work`, in a thread if it handles many characters, because it would block the event loop.

        Args:
            characters: Approximate number of characters to tokenise.
            work: The function to run. Its exceptions propagate.

        Returns:
            The result of `work`.
        """
        if characters < INLINE_CHARACTERS:
            return work()
        result: _Result = await asyncio.to_thread(work)
        return result

    def _checked(self, messages: Sequence[Message]) -> list[Message]:
        # The user's own renderer may have its own roles.
        conversation = checked(messages, _PARTS, knows=lambda role: self.parses_by_user_code)
        return [{**message, "content": message.get("content") or ""} for message in self._shown_messages(conversation)]

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """Render a made-up conversation; None if the library refuses it."""
        try:
            return self._ids.decode(self._render(messages, True, [TRIED_TOOL] if self._tools else None))
        except PromptError:
            return None

    def _tried_tools(self, tools: Sequence[dict[str, Any]]) -> str | None:
        """Render made-up tools; None if the library refuses them."""
        try:
            return self._ids.decode(self._render([_QUESTION], True, list(tools)))
        except PromptError:
            return None

    def _render(self, messages: Sequence[Message], generation_prompt: bool, tools: Any = _OWN) -> list[int]:
        """Render messages, with the format's own tools or others. Raises `PromptError`."""
        tools = self._tools if tools is _OWN else tools
        try:
            ids = self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=generation_prompt)
        except Exception as error:  # the type depends on the content of the messages
            raise PromptError(f"{type(error).__name__}: {error}") from error
        return list(ids)

    def _continued(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation that ends inside its last message, an assistant's, without the ids that close it."""
        begun = _text(messages[-1].get("content"))
        if messages[-1].get("tool_calls"):
            raise PromptError("it ends in an assistant's message with tool calls, which cannot be continued")
        if not begun.strip():
            return self._render(messages[:-1], True)
        ids = self._render(messages, False)
        window = len(begun.encode("utf-8", "replace")) + _MAX_CLOSING
        for text in (begun, begun.rstrip()):  # many templates strip the text
            for end in range(len(ids), max(0, len(ids) - _MAX_CLOSING), -1):
                if self._ids.decode(ids[max(0, end - window) : end]).endswith(text):
                    return self._going_on(ids[:end], text)
        raise PromptError(f"{_cannot_continue(begun)} in a way that cannot be cut where the message ends")

    def _going_on(self, ids: list[int], text: str) -> list[int]:
        """Return `ids` if text sampled after them is read as the message's content.

        Raises:
            PromptError: The text would be read as reasoning.
        """
        turn = self.parse(ids, [*self._ids.encode(_PROBE), self.stop_token_ids[0]])
        if turn.content.strip() != _PROBE:
            raise PromptError(f"{_cannot_continue(text)}, and would read on as reasoning; switch thinking off")
        return ids

    def _bridge(self, prompt_ids: list[int], turn_ids: list[int], messages: list[Message]) -> list[int] | None:
        before = prompt_ids + turn_ids
        turns = [turn_ids]
        if self._closes_itself and turn_ids[-1:] and turn_ids[-1] in self._stops:
            turns.insert(0, turn_ids[:-1])
        for turn in turns:
            try:
                bridged: Any = self._renderer.bridge_to_next_turn(prompt_ids, turn, messages, tools=self._tools)
            except Exception:  # the type depends on the sampled ids; the suffix is then unknown
                return None
            if bridged is not None and bridged.token_ids[: len(before)] == before:
                return bridged.token_ids[len(before) :]  # type: ignore[no-any-return]
        return None

    def _written(self, ids: list[int], call: ParsedToolCall) -> str:
        """Return a call as the policy wrote it. The text includes the tags if the library gives their position."""
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return self._ids.decode(ids[start:end])


def _cannot_continue(text: str) -> str:
    return f"it ends in an assistant's message ({text[:_RAW_CHARACTERS]!r}), which the renderer writes"


def _read(call: ParsedToolCall) -> ToolCall | MalformedCall:
    """Read one of the library's calls.

    Arguments that are not JSON are passed on as text, because the tools read as much of it as they can. An unknown
    name is passed on too, because the tools answer with the names that exist.
    """
    readable = call.status not in _REASONS or (call.status == "invalid_json" and call.arguments)
    if readable and call.name and isinstance(call.name, str):
        return ToolCall(call.name, _arguments(call.arguments), call.id)
    reason = _REASONS.get(call.status, _REASONS["missing_name"])
    return MalformedCall(f"{reason}: {call.raw.strip()[:_RAW_CHARACTERS]}")


def _arguments(arguments: Any) -> dict[str, Any] | str:
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict | str) else json.dumps(arguments, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _size(messages: Sequence[Message]) -> int:
    """Estimate the number of characters to tokenise."""
    return sum(len(str(message.get("content", ""))) + len(str(message.get("tool_calls", ""))) for message in messages)
