"""Waits as people see them (I7): name, cause and beginning of each; many with one cause are shown as one. Times are
arguments, in seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from slipstream.protocol.status import Wait

# Names of those who wait, and of what they wait for.
LEARNER, FEEDER = "learner", "learner (next batch)"
_PROCESSES = frozenset({LEARNER, FEEDER})
EPISODES = "'s episodes"  # after a worker's name
# A worker that does not fit the last session waits for the next one.
SESSION = "the learner's session"

_MAX_NAMED = 4

_MIN_PRUNED = 256

_NUMBERS = re.compile(r"\d+")


def group_alike(waits: Iterable[Wait], who: str) -> list[Wait]:
    """Put more than `_MAX_NAMED` that wait for the same, digits aside, into one `Wait`.

    Args:
        who: What they are called together, such as "workers".
    """
    keys: dict[str, str] = {}
    alike: dict[str, list[Wait]] = {}
    for wait in waits:
        if (key := keys.get(wait.what)) is None:
            key = keys[wait.what] = _NUMBERS.sub("0", wait.what)
        alike.setdefault(key, []).append(wait)
    found = []
    for group in alike.values():
        if len(group) <= _MAX_NAMED:
            found += group
        else:
            longest = max(group, key=lambda wait: wait.since_s)
            found.append(Wait(f"{len(group):,} {who}", longest.what, longest.since_s, len(group)))
    return found


class Waits:
    """Remembers who waits for what and since when. A wait over several requests keeps its beginning."""

    def __init__(self) -> None:
        self._waits: dict[str, _Entry] = {}
        self._prune_at = _MIN_PRUNED

    def begin(self, who: str, what: str, now: float, until: float = math.inf) -> None:
        """Note a wait, or that it continues. Without renewal it is forgotten after `until`: its owner has gone."""
        entry = self._waits.get(who)
        since = entry.since if entry is not None and entry.until >= now else now
        self._waits[who] = _Entry(what, since, until)
        if len(self._waits) > self._prune_at:
            self._prune(now)

    def end(self, who: str) -> None:
        self._waits.pop(who, None)

    def what(self, who: str) -> str | None:
        entry = self._waits.get(who)
        return entry.what if entry is not None else None

    def list(self, now: float) -> list[Wait]:
        """Return who waits; many workers that wait for the same as one."""
        self._prune(now)
        found: dict[str, list[Wait]] = {"": [], "workers": [], "workers' episodes": []}
        for who, entry in self._waits.items():
            name = "" if who in _PROCESSES else "workers' episodes" if who.endswith(EPISODES) else "workers"
            found[name].append(Wait(who, entry.what, now - entry.since))
        return found.pop("") + [wait for name, waits in found.items() for wait in group_alike(waits, name)]

    def _prune(self, now: float) -> None:
        self._waits = {who: entry for who, entry in self._waits.items() if entry.until >= now}
        self._prune_at = max(_MIN_PRUNED, 2 * len(self._waits))


class _Entry(msgspec.Struct, frozen=True):
    what: str
    since: float
    until: float
