"""One model family in one chat format, as the tests and docs/models.md take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout_worker.chat.base import ChatFormat


@dataclass(frozen=True, slots=True)
class Case:
    """family: as people call it; how: what makes it work, such as `renderer qwen3` or `template, parser hermes`; build:
    the format for tools with these JSON schemas; tokenizer: the family's own, or one that stands in; thinking: what
    becomes of reasoning, in a few words."""

    family: str
    how: str
    build: Callable[[Sequence[dict[str, Any]]], ChatFormat]
    tokenizer: Literal["stand-in", "real"]
    thinking: str
