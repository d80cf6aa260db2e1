"""A tiny model that sees, untrained: a Qwen2.5-VL of 0.3 M parameters with tokenizer and image processor."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def build_seeing(folder: Path) -> Path:
    """Write the model's folder, as the example `colours` builds it but for its training."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    from tiny_policy.demonstration import Demonstration, says
    from tiny_policy.policy import build_tokenizer
    from tiny_policy.recipe import Recipe
    from tiny_policy.vision import TOKENS, build_model, build_processor

    def spoken(_: object) -> Demonstration:
        return Demonstration([{"role": "user", "content": "Which colour?"}], [says("red")])

    recipe = Recipe(tools=[], correct=spoken, mixed=spoken, hidden=64)
    tokenizer = build_tokenizer(recipe, 0, TOKENS)
    for part in (build_model(recipe, tokenizer, 0), tokenizer, build_processor(48)):
        part.save_pretrained(folder)
    return folder
