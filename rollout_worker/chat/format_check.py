"""The start check: does a chat format show the tools, read its own calls back, and append exactly?

It renders made-up conversations, cuts them where the policy would have spoken, and asks the format for what it would
have put there. What is never asked of a format at work, `render_ids`, is what the rest is compared with.

The start check where an environment answers turns: is what is appended after a turn, with messages of the user's,
what the template would write?

As in `proof`, on made-up conversations. A format may know no suffix, as many do that leave out earlier reasoning: then
each answer opens a new segment, which is right, and costs a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.chat.parser_choice import same_value
from rollout_worker.chat.parsers.base import Message, ParsedTurn, ToolCall

_REMEDY = (
    "name a renderer that knows the model with chat.renderer, another template with chat.template = file.jinja, or "
    "give a task without tools"
)

_PARSER = (
    "name the notation with chat.parser (docs/models.md lists them), a function of yours with chat.parser = "
    "path/to/file.py:function, or a renderer that knows the model with chat.renderer"
)

_USER: Message = {"role": "user", "content": "slipstream question"}

_REASONING = "slipstream reasoning"

_EMPTY_THOUGHT = re.compile(r"\s*(?:<[^<>]+>|\[[A-Z_]+\])\w*\s*(?:<[^<>]+>|\[/[A-Z_]+\])\s*")

# What breaks notations: quotes of both kinds, a line break, an apostrophe, a value within a value, other alphabets.
ARGUMENTS: dict[str, Any] = {
    "slipstream_number": 7,
    "slipstream_text": 'It\'s "so", she said:\n{1: [2]} <3',
    "slipstream_nested": {"list": [1, -2.5, True, None], "text": 'a "b", c'},
    "slipstream_unicode": "naïve 漢字 🙂",
}


@dataclass(frozen=True, slots=True)
class ToolFormatCheck:
    """What was found on made-up conversations; None: not tried, because something before it failed.

    schemas_shown: a tool's name, description and parameters stand in a prompt; call_parses_back: a rendered call with
    integers, text and nested values is read as it was, where a value that comes back as text counts if it reads as the
    one that was written; suffix_exact: prompt, turn and suffix are what the format makes of the whole conversation;
    parallel_calls: two calls in one turn, likewise; several_rounds: a second turn of calls and answers, likewise;
    reasoning: it is told from content, None where the format writes none. `problems`: each failure, with what to set.

    What the format writes where it asks for a turn, such as an empty thought, stays in the conversation even where the
    whole conversation rendered anew would leave it out. A turn with reasoning that would be left out opens a new
    segment, and nothing of it is appended to.
    """

    schemas_shown: bool | None = None
    call_parses_back: bool | None = None
    suffix_exact: bool | None = None
    parallel_calls: bool | None = None
    several_rounds: bool | None = None
    reasoning: bool | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def fit_for_tools(self) -> bool:
        return bool(self.schemas_shown and self.call_parses_back and self.suffix_exact and self.several_rounds)


async def check_tool_format(chat: ChatFormat, schemas: Sequence[dict[str, Any]]) -> ToolFormatCheck:
    """What `chat`, made for tools with these schemas, can do. Without schemas there is nothing to prove."""
    if not schemas:
        return ToolFormatCheck()
    name = schemas[0]["function"]["name"]
    problems: list[str] = []
    schemas_shown = await _schemas_shown(chat, schemas, problems)
    # A call's id is nine letters and digits to some, and its name and place in the turn to others.
    for ids in ("slipcall{place}", "functions.{name}:{place}"):
        tried: list[str] = []
        first = await _check_tool_round(chat, [_Exchange(name, 1, ids)], tried)
        if first.parsed:
            break
    problems += tried
    if not first.exact:
        return ToolFormatCheck(schemas_shown, first.parsed, first.exact, problems=problems)
    second = await _check_tool_round(
        chat, [_Exchange(name, 1, ids), _Exchange(name, 1, ids)], problems, "a second round: "
    )
    if second.exact and not any(turn.endswith(later) for turn in first.turns for later in second.turns):
        problems.append(
            f"a second round: the turn begins with what the policy is not asked for, {second.turns[0][:200]!r} instead "
            f"of {first.turns[0][:200]!r}; {_REMEDY}"
        )
        second = _Found(second.parsed, False)
    parallel = await _check_tool_round(chat, [_Exchange(name, 2, ids)], [])
    return ToolFormatCheck(
        schemas_shown,
        first.parsed,
        first.exact,
        bool(parallel.parsed and parallel.exact),
        bool(second.parsed and second.exact),
        await _reasoning_told(chat, _Exchange(name, 1, ids).thinking()),
        problems,
    )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A turn with `calls` of a tool, and the answers. reasoning: what the turn thinks."""

    name: str
    calls: int
    ids: str
    reasoning: str | None = None

    def expected(self) -> list[tuple[str, dict[str, Any]]]:
        return [(self.name, {**ARGUMENTS, "slipstream_number": 7 + place}) for place in range(self.calls)]

    def turn(self) -> Message:
        calls = [
            {"type": "function", "id": self._id(place), "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(self.expected())
        ]
        thought = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        return {"role": "assistant", "content": "", **thought, "tool_calls": calls}

    def answers(self) -> list[Message]:
        return [
            {"role": "tool", "name": self.name, "tool_call_id": self._id(place), "content": f"answer {place}: 7"}
            for place in range(self.calls)
        ]

    def _id(self, place: int) -> str:
        return self.ids.format(name=self.name, place=place)

    def thinking(self) -> _Exchange:
        return replace(self, reasoning=_REASONING)


@dataclass(frozen=True, slots=True)
class _Found:
    """turns: the turn's text as the format wrote it, without reasoning and with it."""

    parsed: bool | None = None
    exact: bool | None = None
    turns: tuple[str, ...] = ()


async def _check_tool_round(
    chat: ChatFormat, exchanges: list[_Exchange], problems: list[str], where: str = ""
) -> _Found:
    """The last of the exchanges, without reasoning or with it: as the format's prompt asks for."""
    found: list[_Found] = []
    told: list[list[str]] = []
    for way in (exchanges, [exchange.thinking() for exchange in exchanges]):
        mine: list[str] = []
        found.append(await _exchange(chat, way, mine))
        told.append(mine)
    # A prompt that opens a thought, or closes an empty one, is followed by one of the two alone.
    best = max(range(2), key=lambda way: (bool(found[way].exact), bool(found[way].parsed)))
    if not (found[best].exact and found[best].parsed):
        problems += [where + problem for problem in told[best]]
    return replace(found[best], turns=tuple(turn for each in found for turn in each.turns))


async def _exchange(chat: ChatFormat, exchanges: list[_Exchange], problems: list[str]) -> _Found:
    messages: list[Message] = [_USER]
    for exchange in exchanges[:-1]:
        messages += [exchange.turn(), *exchange.answers()]
    last = exchanges[-1]
    try:
        prompt = await chat.render_ids(messages, generation_prompt=True)
        whole = await chat.render_ids([*messages, last.turn(), *last.answers()], generation_prompt=True)
        bare = await chat.render_ids(messages, generation_prompt=False)
    except PromptError as error:
        problems.append(f"the format refuses a tool call and its answer: {error}; {_REMEDY}")
        return _Found(exact=False)
    begin = turn_begins(chat, prompt, bare, whole)
    if begin is None:
        problems.append(
            f"the conversation changes when a tool call and its answer are added, so that nothing can be appended; "
            f"{_REMEDY}"
        )
        return _Found(exact=False)
    end = turn_ends(chat, whole, begin)
    if end is None:
        problems.append(f"a turn with a tool call ends with none of the stop ids {chat.stop_token_ids}; {_REMEDY}")
        return _Found(exact=False)
    turn, rest = whole[begin:end], whole[end:]
    read = chat.parse(prompt, turn)
    parsed = _parsed_back(read, last, problems)
    suffix = await chat.suffix_ids(prompt, turn, last.answers())
    if suffix != rest:
        problems.append(
            f"what would be appended after a tool call is not what the whole conversation has there: "
            f"{difference(chat, suffix, rest)}; {_REMEDY}"
        )
    return _Found(parsed, suffix == rest, (read.text,))


def turn_begins(chat: ChatFormat, prompt: list[int], bare: list[int], whole: list[int]) -> int | None:
    """Where the turn begins in the whole conversation; None where that does not begin with the prompt."""
    shared = next(
        (place for place, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    if shared == len(prompt):
        return shared
    # An empty thought with which the prompt asks for a turn is left out later: sampled turns keep it. But not an open
    # one, of which the policy's own words would be left out with it. The two may share the first character of a tag.
    for begin in range(shared, len(bare) - 1, -1):
        if _EMPTY_THOUGHT.fullmatch(str(chat.tokenizer.decode(prompt[begin:]))) is not None:
            return begin
    return None


def turn_ends(chat: ChatFormat, whole: Sequence[int], begin: int) -> int | None:
    """Where what follows a turn begins: behind the first stop id from `begin` on; None if there is no stop id."""
    return next((place + 1 for place in range(begin, len(whole)) if whole[place] in chat.stop_token_ids), None)


def _parsed_back(turn: ParsedTurn, exchange: _Exchange, problems: list[str]) -> bool:
    expected = exchange.expected()
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    if len(calls) == len(turn.calls) == len(expected) and all(
        call.name == name and same_value(arguments, call.arguments)
        for call, (name, arguments) in zip(calls, expected, strict=True)
    ):
        return True
    read = ", ".join(str(call)[:300] for call in turn.calls) or "no call"
    problems.append(f"a tool call that the format wrote, {turn.text[:300]!r}, is read as {read}; {_PARSER}")
    return False


def difference(chat: ChatFormat, suffix: Sequence[int] | None, rest: Sequence[int]) -> str:
    if suffix is None:
        return "it cannot tell"
    text, whole = (str(chat.tokenizer.decode(list(ids)))[:200] for ids in (suffix, rest))
    return f"{text!r} instead of {whole!r}" if text != whole else f"{text!r} in other ids"


async def _schemas_shown(chat: ChatFormat, schemas: Sequence[dict[str, Any]], problems: list[str]) -> bool:
    try:
        prompt = str(chat.tokenizer.decode(await chat.prompt_ids([_USER])))
    except PromptError as error:
        problems.append(f"the format refuses a user's message: {error}; {_REMEDY}")
        return False
    for schema in schemas:
        function = schema["function"]
        missing = next((word for word in _words(function) if word not in prompt), None)
        if missing is not None:
            problems.append(
                f"the prompt does not show the tool {function['name']!r}: {missing!r} of its schema is missing, so "
                f"that the policy cannot know how to call it; {_REMEDY}"
            )
            return False
    return True


def _words(function: dict[str, Any]) -> Iterator[str]:
    """What of a function's schema must stand in a prompt, however it is quoted there."""
    yield function["name"]
    yield from function.get("parameters", {}).get("properties", {})
    yield from re.findall(r"[a-zA-Z0-9]+", function.get("description", ""))


async def _reasoning_told(chat: ChatFormat, exchange: _Exchange) -> bool | None:
    try:
        prompt = await chat.render_ids([_USER], generation_prompt=True)
        whole = await chat.render_ids([_USER, exchange.turn(), *exchange.answers()], generation_prompt=True)
    except PromptError:
        return None
    shared = next((place for place, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if _REASONING not in str(chat.tokenizer.decode(whole[shared:])) or shared < len(prompt):
        return None
    turn = chat.parse(prompt, whole[shared : turn_ends(chat, whole, shared)])
    return exchange.reasoning == (turn.reasoning or "").strip() and _REASONING not in turn.content


_WORDS = ("slipstream question", "slipstream answer", "slipstream reply", "slipstream guess", "slipstream end")


@dataclass(frozen=True, slots=True)
class AnswersProof:
    """appended: the suffix is what the whole conversation has there, in the first round and in the second; None where
    the format knows none, or none can be compared. problems: what is wrong, with what to set."""

    appended: bool | None = None
    problems: list[str] = field(default_factory=list)


async def check_answer_format(chat: ChatFormat) -> AnswersProof:
    """What `chat` makes of users' messages after a turn without calls."""
    problems: list[str] = []
    rounds = [await _check_answer_round(chat, size, problems) for size in (1, 2)]
    found = False if False in rounds else None if None in rounds else True
    return AnswersProof(found, problems)


async def _check_answer_round(chat: ChatFormat, size: int, problems: list[str]) -> bool | None:
    """The last of `size` turns and answers, as they are and with reasoning: the format's prompt asks for one."""
    plain = [{"role": ("user", "assistant")[place % 2], "content": word} for place, word in enumerate(_WORDS)]
    conversation = plain[: 2 * size + 1]
    thinking = [
        {**message, "reasoning_content": "slipstream reasoning"} if message["role"] == "assistant" else message
        for message in conversation
    ]
    found = [await _suffix(chat, way, problems) for way in (conversation, thinking)]
    return False if False in found else True if True in found else None


async def _suffix(chat: ChatFormat, conversation: Sequence[Message], problems: list[str]) -> bool | None:
    before, turn, answer = list(conversation[:-2]), conversation[-2], conversation[-1]
    try:
        prompt = await chat.render_ids(before, generation_prompt=True)
        whole = await chat.render_ids([*before, turn, answer], generation_prompt=True)
        bare = await chat.render_ids(before, generation_prompt=False)
    except PromptError as error:
        problems.append(f"the format refuses a user's message after a turn: {error}")
        return False
    begin = turn_begins(chat, prompt, bare, whole)
    end = turn_ends(chat, whole, begin or 0)
    if begin is None or end is None:
        return None
    suffix = await chat.suffix_ids(prompt, whole[begin:end], [answer])
    if suffix is None:
        return None
    if suffix != whole[end:]:
        problems.append(
            f"what would be appended after a turn that a user's message answers is not what the whole conversation has "
            f"there: {difference(chat, suffix, whole[end:])}"
        )
        return False
    return True
