"""Reads conversations to learn from, and renders them as episodes would have recorded them.

Prompts, turns and the ids between two turns are asked of the chat format as `episodes.runner` asks for them. So token
ids and loss masks are those that RL has for the same conversation, also where a new segment opens.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.protocol.config import ConfigError, Finding, RunConfig
from slipstream.protocol.demonstrations import Demonstration, TaughtSegment
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError, text_of
from slipstream.rollout_worker.chat.parsers.base import REASONING_FIELDS, Message
from slipstream.rollout_worker.chat.tokenizer import load_tokenizer
from slipstream.rollout_worker.data.files import load_data_files
from slipstream.rollout_worker.episodes.limits import EpisodeLimits, size_fault
from slipstream.rollout_worker.episodes.source import SourceContext
from slipstream.rollout_worker.episodes.tool_results import cut, markup_of, token_counter
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.tools.base import as_text
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCode

# Rows that a warning names.
MAX_NAMED = 5

_FORM = "give messages, or prompt and completion, as lists of {'role': ..., 'content': ...}"
_USER: Message = {"role": "user", "content": "."}


class Unusable(ValueError):
    """A row cannot be learnt from. The text says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row of the data.

    Attributes:
        messages: All of them.
        given: Number of the first messages that are a prompt: turns among them are not learnt.
        tools: JSON schemas of the tools that it shows; None for the task's.
    """

    messages: list[Message]
    given: int = 0
    tools: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Conversation:
        """Read a row with `messages`, or with `prompt` and `completion`, and with `tools` or without.

        Raises:
            Unusable: It has none of these, or has them in another form.
        """
        parts = [row.get("messages")] if row.get("messages") is not None else [row.get("prompt"), row.get("completion")]
        for part in parts:
            if not isinstance(part, list) or not all(isinstance(message, Mapping) for message in part):
                shown = (
                    f"it has the columns {', '.join(row)}" if part is None else f"{part!r:.80} is no list of messages"
                )
                raise Unusable(f"{shown}; {_FORM}")
        given = len(parts[0] or ()) if len(parts) == 2 else 0
        messages = [dict(message) for part in parts for message in part or ()]
        try:
            json.dumps(messages, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise Unusable(
                f"a text holds {half!a}, half of a character, which no tokenizer takes; take it out"
            ) from None
        return cls(messages, given, _tools_of(row.get("tools")))


def _tools_of(given: Any) -> list[dict[str, Any]] | None:
    """Read the column of tools, which data sets may hold as JSON text. Raises `Unusable`."""
    try:
        tools = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        tools = given
    if tools is not None and not (isinstance(tools, list) and all(_name_of(tool) for tool in tools)):
        raise Unusable(f"its tools are {given!r:.80}; give a list of JSON schemas, or leave them out for the task's")
    if isinstance(tools, list) and not isinstance(given, str):
        tools = _without_nulls(tools)
    return tools and [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _without_nulls(schema: Any) -> Any:
    """Return a tool's schema without null, with which a table fills up schemas that differ in their keys."""
    if isinstance(schema, list):
        return [_without_nulls(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: _without_nulls(part) for name, part in schema.items() if part is not None}


def _name_of(tool: Any) -> str | None:
    """Return the name of a tool's schema, or of a call; None if it has none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class _Shown:
    """A tool of which the schema is all that is needed."""

    schema: dict[str, Any]
    origin = "the row"

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        raise NotImplementedError


async def render(
    chat: ChatFormat, conversation: Conversation, tools: ToolBox, tool_result_tokens: int
) -> list[TaughtSegment]:
    """Render a conversation up to the end of its last turn.

    Args:
        chat: The format that shows `tools`.
        tools: Every call of the conversation must be of one of them.
        tool_result_tokens: Longer results of tools are cut, as in episodes.

    Raises:
        PromptError: The format cannot render the conversation.
        Unusable: It has nothing to learn, or the format would leave something out.
    """
    messages = list(tools.without_nulls(conversation.messages))
    turns = [
        place
        for place, message in enumerate(messages)
        if place >= conversation.given and message.get("role") == "assistant"
    ]
    _check(messages, turns, tools)
    for place in range(turns[0] + 1, len(messages)):
        messages[place] = await _as_in_episodes(messages[place], tool_result_tokens, chat)
    ids = list(await chat.prompt_ids(messages[: turns[0]]))
    segments, mask = [], [False] * len(ids)
    for number, place in enumerate(turns):
        following = turns[number + 1] if number + 1 < len(turns) else None
        answers = messages[place + 1 : following]
        turn = await _turn(chat, messages[:place], messages[place], answers)
        suffix = None if following is None else await chat.suffix_ids(ids, turn, answers)
        ids, mask = ids + turn, mask + [True] * len(turn)
        if suffix is not None:
            ids, mask = ids + suffix, mask + [False] * len(suffix)
            continue
        segments.append(TaughtSegment(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)))
        if following is not None:
            ids = list(await chat.prompt_ids(messages[:following]))
            mask = [False] * len(ids)
    return segments


def _check(messages: Sequence[Message], turns: Sequence[int], tools: ToolBox) -> None:
    if not turns:
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages)) or "none"
        raise Unusable(f"it has no assistant's turn to learn (roles: {roles}); add one, or take the row out")
    if turns[0] == 0:
        raise Unusable("it begins with the assistant's turn; put a user's or a system message before it")
    names = {_name_of(tool) for tool in tools.schemas}
    for place, message in enumerate(messages):
        if place and message.get("role") == messages[place - 1].get("role") == "assistant":
            raise Unusable(f"messages {place - 1} and {place} are both the assistant's; join them")
        calls = message.get("tool_calls") or ()
        if message.get("content") is None and (message.get("role") == "tool" or (place in turns and not calls)):
            raise Unusable(f"message {place}, of role {message['role']!r}, has no content; give it text")
        if place in turns and message.get("weight") == 0:
            raise Unusable(
                f"message {place} has the weight 0, and all turns after the prompt are learnt: give the messages up to "
                f"it as `prompt`, and those after it as `completion`"
            )
        for call in calls if isinstance(calls, list) else ():
            if place in turns:
                _check_arguments(call, place)
            if (name := _name_of(call)) is not None and name not in names:
                there = ", ".join(sorted(filter(None, names))) or "none"
                raise Unusable(
                    f"message {place} calls {name!r}, which is no tool of the task (there: {there}): correct the name, "
                    f"or give the row's own tools in a column `tools`"
                )


def _check_arguments(call: Any, place: int) -> None:
    """Refuse a call that no tool could be called with: the policy would learn to write it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        read = json.loads(given) if isinstance(given, str) and given.strip() else given or None
    except ValueError:
        read = given
    if not isinstance(read, Mapping | None):
        raise Unusable(f"message {place}: the arguments of {_name_of(call)!r} are {given!r:.80}; give a JSON object")


async def _as_in_episodes(message: Message, most: int, chat: ChatFormat) -> Message:
    """Return a tool's message as `episodes.tool_results` makes it: as text, cut, and with special tokens broken. Other
    messages stay as they are."""
    if message.get("role") != "tool":
        return message
    try:
        content = as_text(message.get("content"))
    except TypeError as error:
        raise Unusable(f"a tool's message cannot be read: {error}") from None
    markup, count = markup_of(chat.tokenizer), token_counter(chat.tokenizer)
    content = await cut(content, most, count)
    if (broken := markup.broken(content)) != content:
        content = await cut(broken, most, count)
    texts = {
        name: markup.broken(message[name]) for name in ("name", "tool_call_id") if isinstance(message.get(name), str)
    }
    return {**message, **texts, "content": content}


async def _turn(chat: ChatFormat, before: Sequence[Message], turn: Message, answers: Sequence[Message]) -> list[int]:
    """Return the ids of a turn, from where the format asks for it to the token that ends it.

    Some formats end a turn only by what follows, and some leave out reasoning if a user's message follows, so the turn
    is rendered in front of each until it is whole.

    Raises:
        Unusable: It is whole in none of them.
    """
    asked = list(await chat.prompt_ids(before))
    stops, faults = frozenset(chat.stop_token_ids), []
    alone: tuple[list[Message], bool] = ([turn], False)
    ways = [alone, ([turn, _USER], True)]
    of_tools = bool(answers) and all(message.get("role") == "tool" for message in answers)
    if turn.get("tool_calls") and of_tools:
        ways = [([turn, *answers], True), alone]
    unended: list[int] | None = None
    for messages, asks in ways:
        try:
            whole = await chat.render_ids([*before, *messages], generation_prompt=asks)
        except PromptError as error:
            faults.append(str(error))
            continue
        rest = _after(chat.tokenizer, asked, whole)
        if rest is None:
            faults.append(
                "the chat format begins its turn otherwise than it asks for one: give it reasoning_content, or switch "
                "thinking off ([chat] in the run file)"
            )
            continue
        stop = next((place for place, token in enumerate(rest) if token in stops), None)
        ids = rest if stop is None else rest[: stop + 1]
        if (lost := _left_out(chat.tokenizer, ids, turn)) is not None:
            faults.append(f"the chat format leaves out {lost} of message {len(before)}: take it out of the row")
        elif stop is not None:
            return ids
        elif not asks:
            unended = ids
    if unended is not None and chat.stop_token_ids:
        return [*unended, chat.stop_token_ids[0]]
    raise Unusable(faults[0] if faults else f"nothing ends the turn of message {len(before)}: see rollout.stop")


def _after(tokenizer: Any, asked: list[int], whole: list[int]) -> list[int] | None:
    """Return what `whole` has after `asked`; None if it does not begin with it. Where a token spans the border, the
    text after it is tokenised by itself, as the policy writes it."""
    if whole[: len(asked)] == asked:
        return whole[len(asked) :]
    before, text = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (asked, whole))
    return tokenizer.encode(text[len(before) :], add_special_tokens=False) if text.startswith(before) else None


def _left_out(tokenizer: Any, ids: Sequence[int], turn: Message) -> str | None:
    """Name what of a message is not in its turn; None if all of it is."""
    written = _compact(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    content = turn.get("content")
    texts = {name: turn.get(name) for name in REASONING_FIELDS}
    texts["content"] = text_of(content) if isinstance(content, list) else content
    for call in turn.get("tool_calls") or ():
        texts[f"the call of {_name_of(call)}"] = _name_of(call)
    return next((what for what, text in texts.items() if text and _compact(str(text)) not in written), None)


def _compact(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


@dataclass(frozen=True, slots=True)
class Loaded:
    """The conversations that can be learnt, at least one, and warnings about others."""

    demonstrations: list[Demonstration]
    findings: list[Finding]


def load_demonstrations(config: RunConfig) -> Loaded:
    """Load and render the conversations of `demonstrations.path` with the chat format and the tools of the task.

    Those that are longer than the context are left out, with a warning.

    Raises:
        ConfigError: There are none, or a row cannot be learnt from. Names the row or line, and the remedy.
    """
    rows = _rows(config)
    return asyncio.run(_loaded(config, load_task(config.task), rows))


def _rows(config: RunConfig) -> Sequence[Any]:
    path = config.demonstrations.path
    if path is None:
        raise ConfigError(
            "demonstrations.path is not set: name a file of conversations, such as --data demonstrations.jsonl"
        )
    try:
        rows: Sequence[Any] = load_data_files(path, None, None, None)
        count = len(rows)
        for number in range(count):
            _ = rows[number]  # a line that is no JSON is told before anything is rendered
    except ConfigError as error:
        # The loader is that of data sets, and names their setting.
        text = str(error).replace(f"Task(dataset={path!r})", f"demonstrations.path = {path}")
        raise ConfigError(text.replace("Task(dataset=...)", "demonstrations.path")) from None
    if not count:
        raise ConfigError(f"demonstrations.path = {path}: it holds no conversation; {_FORM}, one object a line")
    return rows


async def _loaded(config: RunConfig, task: Task, rows: Sequence[Any]) -> Loaded:
    path, most = config.demonstrations.path, config.vllm.max_model_len
    tool_result_tokens = EpisodeLimits.of(config).tool_result_tokens
    found: list[Demonstration] = []
    lengths: dict[int, int] = {}
    async with UserCode() as code:
        context = SourceContext(config, task, code, load_tokenizer(config.model))
        async with source_of(task).open(context) as source:
            shown: dict[str, tuple[ChatFormat, ToolBox]] = {}
            own = source.chat, ToolBox([_Shown(dict(schema)) for schema in source.tool_schemas])
            for number, row in enumerate(rows, start=1):
                try:
                    conversation = Conversation.of(row)
                    # Results of tools are cut.
                    if size_fault([each for each in conversation.messages if each.get("role") != "tool"], most):
                        lengths[number] = 0  # to count them would take minutes
                        continue
                    key = json.dumps(conversation.tools, sort_keys=True)
                    if conversation.tools is not None and key not in shown:
                        box = ToolBox([_Shown(schema) for schema in conversation.tools])
                        shown[key] = context.build_chat(box.schemas), box
                    chat, tools = own if conversation.tools is None else shown[key]
                    segments = await render(chat, conversation, tools, tool_result_tokens)
                except (Unusable, PromptError, ConfigError) as error:
                    raise ConfigError(f"demonstrations.path = {path}: row {number}: {error}") from None
                longest = max(len(segment.token_ids) for segment in segments)
                if longest > most:
                    lengths[number] = longest
                else:
                    found.append(Demonstration(number, segments))
    findings = _too_long(config, lengths, len(rows))
    if not found:
        raise ConfigError(str(findings[0]))
    return Loaded(found, findings)


def _too_long(config: RunConfig, lengths: Mapping[int, int], rows: int) -> list[Finding]:
    if not lengths:
        return []
    named = ", ".join(str(number) for number in [*lengths][:MAX_NAMED])
    more = f" and {len(lengths) - MAX_NAMED} more" if len(lengths) > MAX_NAMED else ""
    of = f", of up to {longest} tokens" if (longest := max(lengths.values())) else ""
    text = (
        f"demonstrations.path = {config.demonstrations.path}: {len(lengths)} of {rows} conversations are longer than "
        f"vllm.max_model_len = {config.vllm.max_model_len} and are left out: rows {named}{more}{of}"
    )
    return [Finding("warning", text, "raise vllm.max_model_len, or shorten them")]
