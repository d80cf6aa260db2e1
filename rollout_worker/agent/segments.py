"""Says why a request of an agent began its own segment, so that its author can mend what was not meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.rollout_worker.agent.api.messages import ChatMessage, chained_answer, repeats
from slipstream.rollout_worker.agent.tree import Tree, TreeNode
from slipstream.rollout_worker.tools.argument_text import short

Reason = Literal["conversation", "branch", "answer", "history", "system", "tools", "template"]

_MEANINGS: dict[Reason, str] = {
    "conversation": "its own conversation",
    "branch": "another request had gone on from the same answer",
    "answer": "an answer of the policy came back changed",
    "history": "an earlier message was changed or left out",
    "system": "the system message was changed",
    "tools": "the tools were changed",
    "template": "the chat template cannot append these messages to an answer",
}

# Authors mean these; of the others they are told.
MEANT: tuple[Reason, ...] = ("conversation", "branch")

# Segments that a conversation is compared with.
_COMPARED = 16


@dataclass(frozen=True, slots=True)
class NewSegment:
    """Why a segment was begun. `detail`: what differs; empty where nothing does."""

    reason: Reason
    detail: str = ""

    @property
    def text(self) -> str:
        return _MEANINGS[self.reason] + (f": {self.detail}" if self.detail else "")


def why_new(tree: Tree, node: TreeNode) -> NewSegment:
    """Return why the request at this position, which continues in no segment, does not.

    Args:
        tree: The episode's answers before the request's own.
    """
    answers = [message for message in node.messages if message.role == "assistant"]
    if node.before is not None and not any(message.role == "assistant" for message in node.rest):
        return NewSegment("template" if node.before.is_last else "branch")
    if not answers:
        return NewSegment("conversation")
    found: tuple[int, Sequence[ChatMessage], bytes] = (-1, (), b"")
    for number, line in enumerate(tree.lines()):
        if number == _COMPARED:
            break
        of_line = [message for each in line for message in (*each.asked, *([each.given] if each.given else []))]
        compared = _same_messages(node.messages, of_line), of_line, line[-1].tools
        found = max(found, compared, key=lambda each: each[0])
    same, said, tools = found
    # By digest: to compare each with each would block the loop for conversations of a thousand answers.
    known = {chained_answer(b"", message) for message in said if message.role == "assistant"}
    if same == 0 and known.isdisjoint(chained_answer(b"", message) for message in answers):
        return NewSegment("conversation")
    if same == min(len(said), len(node.messages)):
        return NewSegment("history" if tools == node.tools else "tools")
    was, now = said[same], node.messages[same]
    texts = _shown(was), _shown(now)
    if texts[0] == texts[1] and was.reasoning != now.reasoning:
        texts = f"{texts[0]} after {_thought(was)}", f"{texts[1]} after {_thought(now)}"
    detail = f"message {same} was {texts[0]} and is {texts[1]}"
    if "system" in (was.role, now.role):
        return NewSegment("system", detail)
    return NewSegment("answer" if was.role == now.role == "assistant" else "history", detail)


def _same_messages(given: Sequence[ChatMessage], said: Sequence[ChatMessage]) -> int:
    """Return the number of messages at the beginning that are the same."""
    for number, (one, other) in enumerate(zip(given, said, strict=False)):
        if not _is_same(one, other):
            return number
    return min(len(given), len(said))


def _is_same(one: ChatMessage, other: ChatMessage) -> bool:
    if one == other:
        return True
    if one.role == other.role == "assistant":
        return chained_answer(b"", one) == chained_answer(b"", other) and repeats(one, other)
    # A tool's message names its call, which clients may name differently.
    return one.role == other.role and (one.content or "") == (other.content or "")


def _shown(message: ChatMessage) -> str:
    calls = "".join(f" {call.name}({call.arguments})" for call in message.calls)
    return f"{message.role}: {short((message.content or '') + calls)}"


def _thought(message: ChatMessage) -> str:
    return "no reasoning" if message.reasoning is None else f"the reasoning {short(message.reasoning)}"
