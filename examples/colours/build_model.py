"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`.

A Qwen2.5-VL of 0.6 M parameters, two layers that see and two that speak, learns both tasks from correct conversations
until it would solve 90 % of them. A mix with wrong colours then leaves it at about half. RL has to make it say what it
sees. A folder that is complete is not changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demonstrations import correct, mixed  # noqa: E402
from task import COLOURS, SIDE, open_box  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402
from tiny_policy.vision import warm_start  # noqa: E402

RECIPE = Recipe(tools=[open_box], correct=correct, mixed=mixed, whole=[*COLOURS], batch=32, clean_steps=800)

if __name__ == "__main__":
    main(RECIPE, __doc__, lambda recipe, seed: warm_start(recipe, SIDE, seed))
