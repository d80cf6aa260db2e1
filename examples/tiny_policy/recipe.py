"""What an example says of its tiny policy; all else is the same for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from tiny_policy.demonstration import Demonstration


@dataclass(frozen=True)
class Recipe:
    """tools: functions, or their JSON schemas. correct: draws a demonstration that solves its prompt. mixed: draws
    one that is flawed with some probability, which sets the reward that RL starts from.

    whole: what stays a token of its own, beside single digits, such as the names in the prompts; the policy copies it
    in one piece. Text between may become one token, however long, which makes turns short. None: tokens end at words.
    solves: the share of prompts at which the correct demonstrations have taught enough; `clean_steps` end them too.
    muon: train the layers' matrices on correct demonstrations with Muon, whose learning rate falls to a tenth over the
    second half of `clean_steps`.
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
