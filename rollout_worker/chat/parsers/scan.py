"""A turn's text as reasoning, content and calls: what is common to all notations.

What the policy only thought of is not a call. In a thought that is never closed, whether the policy or the prompt
opened it, it is an attempt that cannot be run. And a tag of thought inside a call's arguments is an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rollout_worker.chat.base import UNCLOSED_THOUGHT, MalformedCall, ParsedTurn
from rollout_worker.chat.parsers.base import MOST_CALLS, Before, CallFinder, Calls, Notation, no_more

OPENS_THOUGHT, CLOSES_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """How reasoning is written. told: it is told from the content; else it stays in it."""

    opening: str = OPENS_THOUGHT
    closing: str = CLOSES_THOUGHT
    told: bool = False

    def is_open(self, said: str) -> bool:
        """Does what was said end inside a thought?"""
        return said.rfind(self.opening) > said.rfind(self.closing)


@dataclass(frozen=True, slots=True)
class Scan:
    """A parser of one notation."""

    notation: Notation
    thought: Thought = Thought()
    _either: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        opening = self.notation.opening
        either = re.compile(
            f"(?P<slipstream_thought>{re.escape(self.thought.opening)})|{opening.pattern}", opening.flags
        )
        object.__setattr__(self, "_either", either)

    def __call__(self, text: str, before: Before) -> ParsedTurn:
        source, thought = CallFinder(text), self.thought
        thoughts: list[str] = []
        content: list[str] = []
        calls: Calls = []

        def think(start: int, inside: int) -> int:
            """Takes the thought whose text begins at `inside`; where it ends."""
            end = text.find(thought.closing, inside)
            closed = end + len(thought.closing) if end >= 0 else len(text)
            if end < 0:
                calls.extend(self._unclosed(source, inside))
            thoughts.append(text[inside : end if end >= 0 else len(text)])
            if not thought.told:
                content.append(text[start:closed])
            return closed

        reads = 0
        at = think(0, 0) if thought.is_open(before.said) else 0
        while at < len(text):
            opened = self._either.search(text, at)
            if opened is None:
                break
            content.append(text[at : opened.start()])
            if opened["slipstream_thought"] is not None:
                at = think(opened.start(), opened.end())
                continue
            if reads >= MOST_CALLS:
                calls.append(MalformedCall(f"more than {MOST_CALLS} tool calls were begun; the others are not read"))
                at = opened.start()
                break
            reads += 1
            found, at = self.notation.read(source, opened)
            calls += found
            if not found or any(isinstance(call, MalformedCall) for call in found):
                content.append(text[opened.start() : at])
        content.append(text[at:])
        if not calls and not (thought.told and thoughts):
            return ParsedTurn(text, text, [])
        reasoning = "\n\n".join(stripped for part in thoughts if (stripped := part.strip())) if thought.told else ""
        return ParsedTurn(text, "".join(content).strip(), no_more(calls), reasoning or None)

    def _unclosed(self, source: CallFinder, at: int) -> Calls:
        """What becomes of the calls in a thought that begins at `at` and is never closed."""
        calls: Calls = []
        for _ in range(MOST_CALLS):
            opened = self.notation.opening.search(source.text, at)
            if opened is None:
                break
            found, at = self.notation.read(source, opened)
            calls += [UNCLOSED_THOUGHT] * len(found)
        return calls
