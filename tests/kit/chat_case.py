"""Defines a case: one model family in one chat format, for the tests and docs/models.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.rollout_worker.chat.base import ChatFormat


@dataclass(frozen=True, slots=True)
class Case:
    """Holds one model family in one chat format.

    Attributes:
        family: Name of the family, as people call it.
        how: What makes it work, such as `renderer qwen3` or `template, parser hermes`.
        build: Builds the format for tools with these JSON schemas.
        tokenizer: Whether the tokenizer is the family's own ("real") or a stand-in.
        thinking: How reasoning is handled, in a few words.
    """

    family: str
    how: str
    build: Callable[[Sequence[dict[str, Any]]], ChatFormat]
    tokenizer: Literal["stand-in", "real"]
    thinking: str
