"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demonstrations import correct, mixed  # noqa: E402
from task import NumberGame  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402

# Turns are short because numbers stay whole and the text between them becomes a few long tokens.
RECIPE = Recipe(
    tools=[NumberGame().guess],
    correct=correct,
    mixed=mixed,
    whole=[str(number) for number in range(10, 41)],
    vocabulary=512,
    batch=32,
)

if __name__ == "__main__":
    main(RECIPE, __doc__)
