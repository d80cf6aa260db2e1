"""Checks at the start that a chat format fits the run's tools and an environment's answers.

With tools, a format must show the tools, read its own calls back, and append exactly. Where an environment answers
turns, the ids it appends after a turn, for the user's messages, must be the ids that the template would write.

Both checks render made-up conversations, cut them where the policy would have spoken, and compare the format's own
ids with the rendered ones. The reference is `render_ids`, which episodes never call.

A format may know no suffix. Many formats that leave out earlier reasoning know none. Each answer then opens a new
segment. That is correct, and costs a prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.parser_choice import same_value
from slipstream.rollout_worker.chat.parsers.base import OPENS_THOUGHT, Message, ParsedTurn, ToolCall
from slipstream.rollout_worker.chat.shown_tools import nested_words

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

# A call's id, with the name that templates give it.
_ID = re.compile(r"""(?i)(?<![a-z])id["'\]|>]*\s*[:=]?\s*["']?[\w.:-]*\d[\w.:-]*["']?""")

_EMPTY_THOUGHT = re.compile(r"\s*(?:<[^<>]+>|\[[A-Z_]+\])\w*\s*(?:<[^<>]+>|\[/[A-Z_]+\])\s*")

# These values break notations: quotes of both kinds, a line break, an apostrophe, nested values, other alphabets.
ARGUMENTS: dict[str, Any] = {
    "slipstream_number": 7,
    "slipstream_text": 'It\'s "so", she said:\n{1: [2]} <3',
    "slipstream_nested": {"list": [1, -2.5, True, None], "text": 'a "b", c'},
    "slipstream_unicode": "naïve 漢字 🙂",
}

_WORDS = ("slipstream question", "slipstream answer", "slipstream reply", "slipstream guess", "slipstream end")


@dataclass(frozen=True, slots=True)
class ToolFormatCheck:
    """Holds the findings of the tool check on made-up conversations.

    None means not tried, because an earlier check failed.

    The format may write something where it asks for a turn, such as an empty thought. That stays in the conversation,
    even where the whole conversation, rendered again, would leave it out. A turn opens a new segment if its reasoning
    would be left out. Nothing is appended to such a turn.

    Attributes:
        schemas_shown: A prompt shows each tool's name, description and parameters.
        call_parses_back: A rendered call with integers, text and nested values is read back unchanged. A value that
            comes back as text counts if it reads as the value that was written.
        suffix_exact: Prompt, turn and suffix together equal the whole conversation as the format renders it.
        parallel_calls: Two calls in one turn pass both checks.
        several_rounds: A second turn of calls and answers passes both checks.
        reasoning: The format separates reasoning from content. None also where the format writes no reasoning.
        problems: Each failure, with the setting that fixes it.
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
    """Check how well a format handles tools. Without schemas there is nothing to check.

    Args:
        chat: The format, built for these tools.
        schemas: JSON schemas of the tools.

    Returns:
        The findings. All are None without schemas.
    """
    if not schemas:
        return ToolFormatCheck()
    name = schemas[0]["function"]["name"]
    problems = await find_hidden_tools(chat, schemas)
    schemas_shown = not problems
    # Some formats want a call id of nine letters and digits. Others want the tool's name and the call's position.
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
    """Describes a turn that calls a tool, and the answers to it.

    Attributes:
        name: The tool's name.
        calls: Number of calls in the turn.
        ids: Pattern of the calls' ids, with the fields `name` and `place`.
        reasoning: The turn's reasoning, or None.
    """

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
    """Holds the findings on one exchange. None means not tried.

    Attributes:
        parsed: The calls were read back as written.
        exact: The suffix equals the rest of the whole conversation.
        turns: Texts of the turn as the format wrote it, without reasoning and with it.
    """

    parsed: bool | None = None
    exact: bool | None = None
    turns: tuple[str, ...] = ()


async def _check_tool_round(
    chat: ChatFormat, exchanges: list[_Exchange], problems: list[str], where: str = ""
) -> _Found:
    """Check the last of the exchanges, without reasoning and with it. Keep the better result.

    The format's prompt may fit only one of the two.
    """
    found: list[_Found] = []
    problems_of: list[list[str]] = []
    for way in (exchanges, [exchange.thinking() for exchange in exchanges]):
        mine: list[str] = []
        found.append(await _exchange(chat, way, mine))
        problems_of.append(mine)
    # If the prompt opens a thought, or closes an empty one, only one of the two can follow it.
    best = max(range(2), key=lambda way: (bool(found[way].exact), bool(found[way].parsed)))
    if not (found[best].exact and found[best].parsed):
        problems += [where + problem for problem in problems_of[best]]
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
    if parsed and len(exchanges) == 1:
        parsed = _is_pure(read, str(chat.tokenizer.decode(prompt[begin:])), problems)
    suffix = await chat.suffix_ids(prompt, turn, last.answers())
    exact = suffix is not None and _without_ids(chat, suffix) == _without_ids(chat, rest)
    if not exact:
        problems.append(
            f"what would be appended after a tool call is not what the whole conversation has there: "
            f"{difference(chat, suffix, rest)}; {_REMEDY}"
        )
    return _Found(parsed, exact, (_ID.sub("", read.text),))


def _without_ids(chat: ChatFormat, ids: Sequence[int]) -> list[int] | str:
    """Return what is compared: the ids; or the text, if it names calls by ids, which some templates number again."""
    text = str(chat.tokenizer.decode(list(ids)))
    without = _ID.sub("", text)
    return list(ids) if without == text else without


def turn_begins(chat: ChatFormat, prompt: list[int], bare: list[int], whole: list[int]) -> int | None:
    """Find where a turn begins in the whole conversation.

    Args:
        chat: The format that rendered the ids.
        prompt: Ids of the conversation before the turn, with the generation prompt.
        bare: Ids of the conversation before the turn, without the generation prompt.
        whole: Ids of the conversation with the turn and the messages after it.

    Returns:
        The index of the turn's first id in `whole`. None if `whole` does not begin with the prompt. An empty thought
        at the end of the prompt may be missing in `whole`.
    """
    shared = next(
        (place for place, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    if shared == len(prompt):
        return shared
    # A template may later leave out the empty thought with which the prompt asks for a turn. Sampled turns keep it.
    # An open thought does not qualify: the template would leave out the policy's own words with it.
    # Prompt and conversation may still share the first character of a tag, so the search goes back from `shared`.
    for begin in range(shared, len(bare) - 1, -1):
        asked = str(chat.tokenizer.decode(prompt[begin:]))
        if _EMPTY_THOUGHT.fullmatch(asked) is not None and not asked.rstrip().endswith(OPENS_THOUGHT):
            return begin
    return None


def turn_ends(chat: ChatFormat, whole: Sequence[int], begin: int) -> int | None:
    """Return the index after the first stop id from `begin` on, where the turn ends. None if there is no stop id."""
    return next((place + 1 for place in range(begin, len(whole)) if whole[place] in chat.stop_token_ids), None)


def _is_pure(turn: ParsedTurn, asked: str, problems: list[str]) -> bool:
    """Return whether a turn that only calls has no content. `asked`: what it repeats of the prompt, if anything."""
    if not turn.content.strip().removeprefix(asked.strip()):
        return True
    problems.append(
        f"a turn that only calls a tool, {turn.text[:300]!r}, is read with the content {turn.content[:300]!r}, which a "
        f"prompt would show next to the call; {_PARSER}"
    )
    return False


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


async def find_hidden_tools(chat: ChatFormat, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Return why a prompt does not show the first of the tools that it does not show; an empty list if it shows all."""
    try:
        prompt = str(chat.tokenizer.decode(await chat.prompt_ids([_USER])))
    except PromptError as error:
        return [f"the format refuses a user's message: {error}; {_REMEDY}"]
    for schema in schemas:
        function = schema["function"]
        missing = next((word for word in _words(function) if word not in prompt), None)
        if missing is not None:
            return [
                f"the prompt does not show the tool {function['name']!r}: {missing!r} of its schema is missing, so "
                f'that the policy cannot know how to call it; set chat.tools = "prompt", which describes the tools in '
                f"the system message, {_REMEDY}"
            ]
    return []


def _words(function: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a function's schema that a prompt must contain, however it quotes them."""
    yield function["name"]
    yield from nested_words(function.get("parameters", {}))
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


async def end_that_does_not_stop(chat: ChatFormat) -> str | None:
    """Return the special token with which the format ends a turn, if it is none of the stop ids, nor a later one is.

    A policy that writes the end of a turn as it has learnt it then continues to its limit of tokens.
    """
    reply, after = _WORDS[1:3]
    conversation = [_USER, {"role": "assistant", "content": reply}, {"role": "user", "content": after}]
    try:
        whole = await chat.render_ids(conversation, generation_prompt=False)
    except PromptError:
        return None
    text = str(chat.tokenizer.decode(whole))
    if not -1 < text.find(reply) < text.find(after):
        return None

    def end_of(words: str) -> int:
        """Return the number of ids after which the text has `words`."""
        counts = range(len(whole) + 1)
        return bisect_left(counts, True, key=lambda count: words in str(chat.tokenizer.decode(whole[:count])))

    between = whole[end_of(reply) : end_of(after)]
    if set(between) & set(chat.stop_token_ids):
        return None
    special = set(chat.tokenizer.all_special_ids) | set(chat.tokenizer.added_tokens_decoder)
    return next((str(chat.tokenizer.decode([token])) for token in between if token in special), None)


@dataclass(frozen=True, slots=True)
class AnswersProof:
    """Holds the findings of the check of answers on made-up conversations.

    Attributes:
        appended: The suffix equals the ids of the whole conversation there, in the first round and in the second.
            None if the format knows no suffix, or none can be compared.
        problems: Each failure, with the setting that fixes it.
    """

    appended: bool | None = None
    problems: list[str] = field(default_factory=list)


async def check_answer_format(chat: ChatFormat) -> AnswersProof:
    """Check that `chat` appends users' messages exactly after a turn without calls."""
    problems: list[str] = []
    rounds = [await _check_answer_round(chat, size, problems) for size in (1, 2)]
    found = False if False in rounds else None if None in rounds else True
    return AnswersProof(found, problems)


async def _check_answer_round(chat: ChatFormat, size: int, problems: list[str]) -> bool | None:
    """Check the last of `size` turns and answers, without reasoning and with it.

    The format's prompt may fit only one of the two.

    Returns:
        False if either suffix is wrong. True if at least one is right. None if none can be compared.
    """
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
