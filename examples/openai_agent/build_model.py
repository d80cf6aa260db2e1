"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demonstrations import correct, mixed  # noqa: E402
from task import MULTIPLY  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402

RECIPE = Recipe(tools=[MULTIPLY], correct=correct, mixed=mixed)

if __name__ == "__main__":
    main(RECIPE, __doc__)
