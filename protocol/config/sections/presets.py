"""Algorithms by name: what each sets of [learner]. `docs/algorithms.md` says when to choose it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where a preset says nothing, a setting has its own default. A run file's own settings go first.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    # TRL's AsyncGRPOTrainer, but with one normaliser for the whole step, where TRL has one a micro-batch.
    "async_grpo": {"advantage": "async_grpo", "clip_low": 0.2, "clip_high": 0.2},
    # arXiv:2503.20783: neither deviation nor length divides.
    "dr_grpo": {"advantage": "dr_grpo", "normaliser": "constant"},
    # arXiv:2503.14476; TRL's loss_type="dapo" with the paper's bounds.
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "normaliser": "tokens"},
    # TRL's loss_type="bnpo", with the whole step for its local batch.
    "bnpo": {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
    # arXiv:2601.05242; TRL's multi_objective_aggregation="normalize_then_sum".
    "gdpo": {"advantage": "gdpo"},
}
