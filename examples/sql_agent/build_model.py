"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from database import CITIES, ITEMS, NAMES  # noqa: E402
from demonstrations import correct, mixed  # noqa: E402
from task import query  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402

# The values stay whole, so that the policy can copy them. The SQL between them becomes a few long tokens.
RECIPE = Recipe(
    tools=[query],
    correct=correct,
    mixed=mixed,
    whole=[*CITIES, *ITEMS, *NAMES],
    vocabulary=1152,
    batch=32,
    clean_steps=1500,
)

if __name__ == "__main__":
    main(RECIPE, __doc__)
