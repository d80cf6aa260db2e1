"""The start check where an environment answers turns: is what is appended after a turn, with messages of the user's,
what the template would write?

As in `proof`, on made-up conversations. A format may know no suffix, as many do that leave out earlier reasoning: then
each answer opens a new segment, which is right, and costs a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_worker.chat.base import ChatFormat, Message, PromptError
from rollout_worker.chat.format_check import difference, turn_begins, turn_ends

_WORDS = ("slipstream question", "slipstream answer", "slipstream reply", "slipstream guess", "slipstream end")


@dataclass(frozen=True, slots=True)
class AnswersProof:
    """appended: the suffix is what the whole conversation has there, in the first round and in the second; None where
    the format knows none, or none can be compared. problems: what is wrong, with what to set."""

    appended: bool | None = None
    problems: list[str] = field(default_factory=list)


async def prove_answers(chat: ChatFormat) -> AnswersProof:
    """What `chat` makes of users' messages after a turn without calls."""
    problems: list[str] = []
    rounds = [await _round(chat, size, problems) for size in (1, 2)]
    found = False if False in rounds else None if None in rounds else True
    return AnswersProof(found, problems)


async def _round(chat: ChatFormat, size: int, problems: list[str]) -> bool | None:
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
