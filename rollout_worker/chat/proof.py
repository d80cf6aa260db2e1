"""The start check: does a chat format show the tools, read its own calls back, and append exactly?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_worker.chat.base import ChatFormat


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found on made-up conversations; None: not tried, because something before it failed.

    schemas_shown: a tool's name, description and parameters stand in a prompt; call_parses_back: a rendered call with
    integers, text and nested values is read as it was; suffix_exact: prompt, turn and suffix are what the format makes
    of the whole conversation; parallel_calls: two calls in one turn, likewise; several_rounds: a second turn of calls
    and answers, likewise; reasoning: it is told from content. `problems`: each failure, with what to set.
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


async def prove(chat: ChatFormat, schemas: Sequence[dict[str, Any]]) -> Proof:
    """What `chat`, made for tools with these schemas, can do."""
    raise NotImplementedError
