"""Defines the settings that differ between the examples' tiny policies. Everything else is the same for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from tiny_policy.demonstration import Demonstration


@dataclass(frozen=True)
class Recipe:
    """Describes how an example's tiny policy is built and warm-started.

    Attributes:
        tools: Functions, or their JSON schemas.
        correct: Draws a demonstration that solves its prompt.
        mixed: Draws a demonstration that is flawed with some probability, which sets the reward that RL starts from.
        whole: Texts that stay one token each, next to single digits, such as the names in the prompts. The policy
            copies them in one piece. The text between them may become one token, however long, which makes turns short.
            None: tokens end at words.
        vocabulary: Number of token ids.
        layers: Number of layers.
        hidden: Hidden size.
        context: Maximum length, tokens.
        batch: Demonstrations in a step.
        solves: Share of solved prompts at which the correct demonstrations have taught enough.
        clean_steps: Maximum number of steps on correct demonstrations.
        flawed_steps: Number of steps on the mix.
        muon: Train the layers' matrices on correct demonstrations with Muon. The learning rate then falls to a tenth
            over the second half of `clean_steps`.
    """

    tools: Sequence[Callable[..., Any] | dict[str, Any]]
    correct: Callable[[random.Random], Demonstration]
    mixed: Callable[[random.Random], Demonstration]
    whole: Sequence[str] | None = None
    vocabulary: int = 512
    layers: int = 2
    hidden: int = 128
    context: int = 1024
    batch: int = 64
    solves: float = 0.9
    clean_steps: int = 600
    flawed_steps: int = 50
    muon: bool = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in self.tools]
