"""Implements the command line of each example's `build_model.py`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_policy.recipe import Recipe
from tiny_policy.warm_start import warm_start


def main(recipe: Recipe, description: str, build: Callable[[Recipe, int], Sequence[Any]] = warm_start) -> None:
    """Build a policy: `--out FOLDER [--seed N]`.

    A folder that is complete is not changed. An incomplete folder never appears.

    Args:
        recipe: The example's recipe.
        description: Text for `--help`. Its first line is shown.
        build: Maps recipe and seed to the parts of the folder: the model, its tokenizer and what else it needs.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.out / "config.json").is_file():
        print(f"{arguments.out}: already built")
        return
    parts = build(recipe, arguments.seed)
    unfinished = arguments.out.with_name(arguments.out.name + f".tmp{os.getpid()}")
    for part in parts:
        part.save_pretrained(unfinished)
    # safetensors makes its file readable for its owner alone.
    (unfinished / "model.safetensors").chmod((unfinished / "config.json").stat().st_mode)
    os.replace(unfinished, arguments.out)
    print(f"{arguments.out}: built with seed {arguments.seed}")
