"""How much there is to a value of JSON, counted no further than is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Weight:
    """Values in a value, itself included, and the characters of its texts and names."""

    values: int
    characters: int

    def exceeds(self, most: Weight) -> bool:
        return self.values > most.values or self.characters > most.characters


def weigh(value: Any, most: Weight) -> Weight:
    """The weight of `value`; of one that exceeds `most`, of so much of it that it does."""
    values = characters = 0
    left = [value]
    while left:
        each = left.pop()
        values += 1
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, Mapping):
            characters += sum(len(name) for name in each if isinstance(name, str))
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
        if values > most.values or characters > most.characters:
            break
    return Weight(values, characters)
