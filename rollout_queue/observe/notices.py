"""What a person should be told, each thing once."""

from __future__ import annotations

import re
from collections import deque

import msgspec

from protocol.status import Notice

MOST_NOTICES = 64

MOST_CHARACTERS = 500

_MOST_KNOWN = 1024

_NUMBERS = re.compile(r"\d+")


class _Said(msgspec.Struct, frozen=True):
    id: int
    kind: str
    text: str
    who: str | None
    at: float


class Notices:
    """The newest `MOST_NOTICES`. Two texts that differ in their digits only are the same notice, unless `key` says what
    is."""

    def __init__(self) -> None:
        self._said: deque[_Said] = deque(maxlen=MOST_NOTICES)
        self._known: dict[tuple[str, str], None] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Notices ever said."""
        return self._count

    def say(self, kind: str, text: str, now: float, who: str | None = None, key: str | None = None) -> None:
        # It is printed on terminals, and may quote what was sampled: no escape sequences.
        kind = kind[:MOST_CHARACTERS]
        text = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:MOST_CHARACTERS])
        who = who and "".join(c if c.isprintable() else " " for c in who)
        known = (kind, _NUMBERS.sub("0", text) if key is None else key)
        if known in self._known:
            return
        self._known[known] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._count += 1
        self._said.append(_Said(self._count, kind, text, who, now))

    def list(self, now: float) -> list[Notice]:
        """Oldest first."""
        return [Notice(said.id, said.kind, said.text, said.who, now - said.at) for said in self._said]
