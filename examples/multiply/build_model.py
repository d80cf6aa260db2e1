"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`.

A two-layer Qwen3 of 0.4 M parameters learns the format from correct conversations until it would solve 90 % of the
prompts. A mix with flawed conversations then gives it bad habits (no tool, wrong arguments, malformed calls,
misquotes), which leave it at about 40 %. RL has to remove them. A folder that is complete is not changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demonstrations import correct, mixed  # noqa: E402
from task import multiply  # noqa: E402
from tiny_policy.build import main  # noqa: E402
from tiny_policy.recipe import Recipe  # noqa: E402

RECIPE = Recipe(tools=[multiply], correct=correct, mixed=mixed, batch=32, clean_steps=400, muon=True)

if __name__ == "__main__":
    main(RECIPE, __doc__)
