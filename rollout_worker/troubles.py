"""The first failure of each kind of tool, reward, row, prompt, episode, ticket, server and code, for a person to read.

The counters count all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from protocol.messages import Notice
from rollout_worker.user_code.texts import encodable

logger = logging.getLogger(__name__)

MOST = 16
MAX_CHARACTERS = 500


class Troubles:
    """`found`: at most `MOST`, the first of each kind and key; `told` is called at each new one."""

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.found: list[Notice] = []
        self._keys: set[tuple[str, str]] = set()
        self._told = told

    def add(self, kind: str, key: str, text: str, where: str | None = None) -> None:
        """`kind`: as in `Trouble`; `key`: what failed and how, the same for failures that are alike; `where`: file:line
        of the user's code."""
        if (kind, key) in self._keys or len(self.found) == MOST:
            return
        self._keys.add((kind, key))
        place = f" ({where[-MAX_CHARACTERS // 2 :]})" if where else ""
        room = MAX_CHARACTERS - len(place)
        whole = " ".join(text.split())
        shown = (whole if len(whole) <= room else f"{whole[: room - 3]}...") + place
        trouble = Notice(kind, encodable(shown))
        self.found.append(trouble)
        logger.warning("%s; others like it are only counted", trouble.text)
        self._told()
