"""Notices: texts that tell a person what to fix, each once."""

from __future__ import annotations

import re
from collections import deque

import msgspec

from slipstream.protocol.status import Notice

MAX_NOTICES = 64

# The kind of a notice about something that people changed: a data set, a task's file.
CHANGED = "changed"

MAX_CHARACTERS = 500

# Seconds in which nobody gives a notice, after which the next who does gives it again, as the newest, and counted. Less
# than a worker takes.
AGAIN_AFTER_S = 240.0

_MAX_KNOWN = 1024

# Workers repeat their notices with each heartbeat.
_MAX_REPEATED = 65_536

# A shorter name may be a part of a word.
_MIN_NAME_CHARACTERS = 4

_NUMBERS = re.compile(r"\d+")


class _Said(msgspec.Struct):
    id: int
    kind: str
    text: str
    who: str | None
    at: float
    given_at: float
    others: set[str]
    first_at: float
    times: int = 1


def printable(text: str) -> str:
    """Replace what a terminal would obey by spaces, except for ends of lines."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


class Notices:
    """Keeps the newest `MAX_NOTICES`. Texts that differ only in digits, or in the name of who they are about, are the
    same notice, unless they come with a key."""

    def __init__(self) -> None:
        self._said: deque[_Said] = deque(maxlen=MAX_NOTICES)
        self._known: dict[tuple[str, str], _Said] = {}
        self._repeated: dict[int, None] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Notices ever given."""
        return self._count

    def say(
        self,
        kind: str,
        text: str,
        now: float,
        who: str | None = None,
        key: str | None = None,
        life: str = "",
        again: bool = False,
    ) -> None:
        """Add a notice unless it was given before; again if nobody has given it for `AGAIN_AFTER_S`.

        Args:
            kind: A reason of `slipstream.protocol.reasons`.
            text: What is wrong and what to do; cut at MAX_CHARACTERS.
            now: Current time, seconds.
            who: The worker or process that it is about.
            key: Notices of one kind and key are the same, whatever their texts.
            life: Tells processes of one name apart, whose texts may be the same: one that was restarted.
            again: Whether each call is an event, not the repetition of what was given before.
        """
        given = hash((kind, text, who, key, life))
        if given in self._repeated and not again:
            return
        self._repeated[given] = None
        if len(self._repeated) > _MAX_REPEATED:
            del self._repeated[next(iter(self._repeated))]
        # Terminals print it, and it may quote sampled text: no escape sequences.
        kind = kind[:MAX_CHARACTERS]
        text = printable(text[:MAX_CHARACTERS])
        who = who and printable(who).replace("\n", " ")
        nameless = text.replace(who, "") if who and len(who) >= _MIN_NAME_CHARACTERS else text
        name = (kind, _NUMBERS.sub("0", nameless) if key is None else key)
        known = self._known.get(name)
        first_at, times = now, 1
        if known is not None:
            recent = now - known.given_at < AGAIN_AFTER_S
            if recent or (key is not None and not again):
                known.given_at, known.times = now, known.times + again
                if who and who != known.who:
                    known.others.add(who)
                return
            first_at, times = known.first_at, known.times + 1
            if known in self._said:
                self._said.remove(known)
        self._count += 1
        said = self._known[name] = _Said(self._count, kind, text, who, now, now, set(), first_at, times)
        self._said.append(said)
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def list(self, now: float) -> list[Notice]:
        """Oldest first."""
        return [
            Notice(
                *(said.id, said.kind, said.text, said.who, now - said.at, 1 + len(said.others)),
                *(said.times, now - said.first_at),
            )
            for said in self._said
        ]
