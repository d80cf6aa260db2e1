"""Algorithms by name: what each sets of [learner]. `docs/algorithms.md` says when to choose it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where a preset says nothing, a setting has its own default. A run file's own settings go first.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    # TRL's GRPOTrainer as it is by default: on stale data its sequence_mask leaves out whole rollouts.
    "trl_grpo": {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens", "correction": "sequence_mask"},
    # TRL's AsyncGRPOTrainer, but with one normaliser for the whole step, where TRL has one a micro-batch.
    "async_grpo": {"advantage": "async_grpo", "clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
    # arXiv:2503.20783: neither deviation nor length divides.
    "dr_grpo": {"advantage": "dr_grpo", "normaliser": "constant"},
    # arXiv:2503.14476, section 4.1; TRL's loss_type="dapo" with the paper's bounds.
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "normaliser": "tokens"},
    # TRL's loss_type="bnpo", with the whole step for its local batch.
    "bnpo": {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
    # arXiv:2402.14740, as TRL's RLOOTrainer; the KL is off unless kl_coef is set.
    "rloo": {
        "advantage": "rloo",
        "objective": "sequence_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "normaliser": "rollouts",
        "kl_in_reward": True,
    },
    # arXiv:2601.05242; TRL's multi_objective_aggregation="normalize_then_sum".
    "gdpo": {"advantage": "gdpo"},
    # arXiv:2507.18071, section 5.1; TRL's importance_sampling_level="sequence" with loss_type="grpo".
    "gspo": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normaliser": "sequences"},
    # arXiv:2602.05261, section 5.1 (as TRL's documentation cites it); TRL's loss_type="luspo".
    "luspo": {"objective": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3, "normaliser": "rollouts"},
    # arXiv:2506.13585, with the bound 1 + 4 of arXiv:2510.13786, which is TRL's epsilon_high=5.
    "cispo": {"objective": "cispo", "clip_high": 4.0, "normaliser": "tokens"},
    # arXiv:2602.04879.
    "dppo": {"objective": "dppo", "normaliser": "tokens"},
    # arXiv:2511.20347; TRL's loss_type="sapo".
    "sapo": {"objective": "sapo", "normaliser": "sequences"},
    # arXiv:2602.10693; TRL's loss_type="vespo".
    "vespo": {"objective": "vespo", "normaliser": "tokens"},
    # Truncated importance sampling: fengyao.notion.site/off-policy-rl.
    "tis": {"objective": "reinforce", "correction": "token_truncate", "normaliser": "tokens"},
    # ringtech.notion.site/icepop.
    "icepop": {"objective": "reinforce", "correction": "token_mask", "normaliser": "tokens"},
    # arXiv:2505.24298.
    "decoupled_ppo": {"correction": "decoupled", "clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
}
