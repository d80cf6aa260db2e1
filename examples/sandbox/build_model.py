"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demonstrations import correct, mixed  # noqa: E402
from task import WORDS, python  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402

# Words and numbers below 100 stay whole, so that the policy can copy them. The text between becomes long tokens.
RECIPE = Recipe(
    tools=[python],
    correct=correct,
    mixed=mixed,
    whole=[*WORDS, *(str(number) for number in range(10, 100))],
    vocabulary=1024,
    batch=32,
    clean_steps=1500,
)

if __name__ == "__main__":
    main(RECIPE, __doc__)
