"""A tiny model that sees, untrained: a Qwen2.5-VL of 0.3 M parameters with tokenizer and image processor."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def build_seeing(folder: Path) -> Path:
    """Write the model's folder, as the example `colours` builds it but for its training."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    made, policy, recipes, vision = (
        import_module(f"tiny_policy.{name}") for name in ("demonstration", "policy", "recipe", "vision")
    )

    def spoken(_: object) -> Any:
        return made.Demonstration([{"role": "user", "content": "Which colour?"}], [made.says("red")])

    recipe = recipes.Recipe(tools=[], correct=spoken, mixed=spoken, hidden=64)
    tokenizer = policy.build_tokenizer(recipe, 0, vision.TOKENS)
    for part in (vision.build_model(recipe, tokenizer, 0), tokenizer, vision.build_processor(48)):
        part.save_pretrained(folder)
    return folder
