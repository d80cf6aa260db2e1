"""Keeps the answers of one episode as a tree, and finds the answer that a request continues from.

Each sampled token is in exactly one segment, the one that it was sampled in, and trains there. An answer is appended to
the segment of the answer that its request continues from, if that answer is still the last of its segment. Otherwise
two requests continue from one answer, and the second begins its own segment that holds the shared part as context. A
request with a new conversation begins a segment too, and its whole prompt is rendered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slipstream.rollout_worker.agent.api.messages import ChatMessage, chained, chained_answer, repeats
from slipstream.rollout_worker.chat.parsers.base import Message, ParsedTurn
from slipstream.rollout_worker.episodes.episode import SegmentDraft
from slipstream.rollout_worker.inference.engine import Sampled


@dataclass(frozen=True, slots=True)
class GivenCall:
    """A call in an answer: the id that the agent was given, the tool's name, and the id in the policy's notation, which
    is None where the notation has none."""

    id: str
    name: str
    own_id: str | None


@dataclass(eq=False, slots=True)
class Answer:
    """One sampled turn, `draft.ids[start:end]`.

    Attributes:
        before: The answer that it continues from.
        shown: The messages since then, as the policy saw them.
        message: The answer itself, as the policy wrote it.
        text: The answer as text.
        calls: Its calls, as the agent was given them.
        given: The answer, as the agent was given it; None for a plain completion.
        asked: The messages that its request added, as the agent wrote them.
        tools: Digest of its request's tools.
        claims: Number of running requests that continue from it.
    """

    before: Answer | None
    shown: list[Message]
    message: Message
    text: str
    calls: tuple[GivenCall, ...]
    draft: SegmentDraft
    start: int
    end: int
    given: ChatMessage | None = None
    asked: Sequence[ChatMessage] = ()
    tools: bytes = b""
    claims: int = 0

    @property
    def context(self) -> list[int]:
        """Token ids of the segment up to the end of this answer."""
        return self.draft.ids[: self.end]

    @property
    def prompt_ids(self) -> list[int]:
        return self.draft.ids[: self.start]

    @property
    def turn_ids(self) -> list[int]:
        return self.draft.ids[self.start : self.end]

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its segment."""
        return self.end == len(self.draft.ids)

    def line(self) -> list[Answer]:
        """Return the answers before it and itself, in order."""
        found: list[Answer] = []
        answer: Answer | None = self
        while answer is not None:
            found.append(answer)
            answer = answer.before
        return found[::-1]

    def conversation(self) -> list[Message]:
        """Return the conversation as the policy saw it, up to this answer."""
        return [message for answer in self.line() for message in (*answer.shown, answer.message)]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """The position of a request in the tree.

    Attributes:
        before: The answer that it continues from; None if it begins again.
        rest: The messages after that answer; a tool's has the id that the agent was given for its call.
        key: Digest of the whole conversation.
        tools: Digest of its tools.
        messages: The whole conversation, as the agent wrote it.
    """

    before: Answer | None
    rest: Sequence[ChatMessage]
    key: bytes
    tools: bytes = b""
    messages: Sequence[ChatMessage] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """The context that a request is sampled after.

    Attributes:
        ids: All token ids.
        suffix: Those after the answer that the request continues from; None where `ids` is its own prompt.
        shown: The messages that the request adds, as the policy sees them.
    """

    ids: list[int]
    suffix: list[int] | None
    shown: list[Message]


@dataclass(slots=True)
class Tree:
    """The answers of one episode.

    Attributes:
        drafts: The segments, in the order of their first answers.
        last: The newest answer.
    """

    drafts: list[SegmentDraft] = field(default_factory=list)
    last: Answer | None = None
    # The last answer of each segment, by the id of its draft.
    _last: dict[int, Answer] = field(default_factory=dict)
    _answers: defaultdict[bytes, list[Answer]] = field(default_factory=lambda: defaultdict(list))

    def place(self, tools: bytes, messages: Sequence[ChatMessage]) -> TreeNode:
        """Find the position of a request with these messages. `tools`: digest of its tools."""
        key, begins, turns = tools, 0, 0
        found: list[Answer] = []
        # Ids of the calls in recognised answers, as the client writes them, and the place of each in its answer.
        known: dict[str, tuple[int, int]] = {}
        for number, each in enumerate(messages, start=1):
            as_answer = chained_answer(key, each) if each.role == "assistant" and self._answers else None
            again = self._repeated(as_answer, each, found) if as_answer is not None else []
            for place, call in enumerate(each.calls):
                known.pop(call.id, None)
                if again:
                    known[call.id] = turns, place
            if as_answer is not None and again:
                key, found, begins, turns = as_answer, again, number, turns + 1
            else:
                key = chained(key, _with_answers(each, known.get(each.answers or ""), "turn {}, call {}".format))
        # Among equal answers, prefer one that no other request continues from.
        before = min(found, key=lambda answer: (not answer.is_last, answer.claims), default=None)
        line = before.line() if before is not None else []
        rest = [
            _with_answers(each, known.get(each.answers or ""), lambda turn, place: line[turn].calls[place].id)
            for each in messages[begins:]
        ]
        return TreeNode(before, rest, key, tools, messages)

    def before(self, ids: Sequence[int]) -> Answer | None:
        """Return the answer that a prompt of these ids continues from: of the segments that it begins with the
        longest's last; None where it begins again."""
        found = [draft for draft in self.drafts if draft.ids == ids[: len(draft.ids)]]
        longest = max(found, key=lambda draft: len(draft.ids), default=None)
        return None if longest is None else self._last[id(longest)]

    def add(self, before: Answer | None, context: Context, sampled: Sampled, parsed: ParsedTurn) -> Answer:
        """Add an answer that was sampled after a context. `before`: as in `TreeNode`."""
        suffix: Sequence[int] = ()
        if before is None or context.suffix is None:
            draft = SegmentDraft(context.ids)
        else:
            suffix, draft = context.suffix, before.draft if before.is_last else SegmentDraft(before.context)
        if before is None or draft is not before.draft:
            self.drafts.append(draft)
        draft.add(suffix, sampled)
        end = len(draft.ids)
        start = end - len(sampled.token_ids)
        self.last = Answer(before, context.shown, parsed.message(), parsed.text, (), draft, start, end)
        self._last[id(draft)] = self.last
        return self.last

    def remember(self, answer: Answer, place: TreeNode, given: ChatMessage, calls: tuple[GivenCall, ...]) -> None:
        """Remember an answer as the agent gets it, and the position of its request."""
        answer.calls, answer.given = calls, given
        answer.asked, answer.tools = place.rest, place.tools
        self._answers[chained_answer(place.key, given)].append(answer)

    def lines(self) -> Iterator[list[Answer]]:
        """Yield the answers of each segment's line, the newest segment's first."""
        for draft in reversed(self.drafts):
            yield self._last[id(draft)].line()

    def _repeated(self, key: bytes, message: ChatMessage, before: Sequence[Answer]) -> list[Answer]:
        """Return the answers that a message may repeat; those that it repeats to the letter, if there are any.

        Args:
            key: Digest of the conversation that the message ends.
            before: Answers that the conversation may have gone on from; empty for any.
        """
        found = [
            answer
            for answer in self._answers.get(key, ())
            if answer.given is not None and repeats(message, answer.given) and (not before or answer.before in before)
        ]
        exact = [answer for answer in found if _is_exact(message, answer.given)] if len(found) > 1 else []
        return exact or found


def _is_exact(message: ChatMessage, given: ChatMessage | None) -> bool:
    ids = [[call.id for call in each.calls] for each in (message, given) if each is not None]
    return given is not None and (message.content or "", ids[0]) == (given.content or "", ids[1])


def _with_answers(message: ChatMessage, place: tuple[int, int] | None, named: Callable[[int, int], str]) -> ChatMessage:
    """Return a tool's message whose call is named by its place; any other as it is."""
    return message if place is None else replace(message, answers=named(*place))


def shown_to_policy(before: Answer | None, added: Sequence[ChatMessage]) -> Iterator[tuple[ChatMessage, Message]]:
    """Yield the messages that a request adds, each also as a chat format takes it: a tool's message has the tool's
    name. The results of a turn are put in the order of its calls."""
    names = {call.id: (call.name, call.own_id) for answer in (before.line() if before else ()) for call in answer.calls}
    for each in _in_order(before, added):
        names |= {call.id: (call.name, call.id) for call in each.calls}
        if each.role != "tool":
            yield each, each.message()
            continue
        name, own_id = names.get(each.answers or "", ("tool", each.answers))
        message: Message = {"role": "tool", "name": name, "content": each.content or ""}
        yield each, message if own_id is None else {**message, "tool_call_id": own_id}


def _in_order(before: Answer | None, added: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    calls = before.calls if before is not None else ()
    places = {call.id: place for place, call in enumerate(calls)}
    results = next((number for number, each in enumerate(added) if each.role != "tool"), len(added))
    if results < 2:
        return added
    return [*sorted(added[:results], key=lambda each: places.get(each.answers or "", len(places))), *added[results:]]
