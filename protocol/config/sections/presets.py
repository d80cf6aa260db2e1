"""Presets of [learner]: the settings of each named algorithm. `docs/algorithms.md` says when to choose which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Settings that a preset leaves out keep their defaults. A run file's own settings override the preset.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "trl_grpo": {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens", "correction": "sequence_mask"},
    "async_grpo": {"advantage": "async_grpo", "clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
    "dr_grpo": {"advantage": "dr_grpo", "normaliser": "constant"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "normaliser": "tokens"},
    "bnpo": {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens"},
    "rloo": {
        "advantage": "rloo",
        "objective": "sequence_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "normaliser": "rollouts",
        "kl_in_reward": True,
    },
    "gdpo": {"advantage": "gdpo"},
    "gspo": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normaliser": "sequences"},
    "luspo": {"objective": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3, "normaliser": "rollouts"},
    "cispo": {"objective": "cispo", "clip_high": 4.0, "normaliser": "tokens"},
    "dppo": {"objective": "dppo", "normaliser": "tokens"},
    "sapo": {"objective": "sapo", "normaliser": "sequences"},
    "vespo": {"objective": "vespo", "normaliser": "tokens"},
    "tis": {"objective": "reinforce", "correction": "token_truncate", "normaliser": "tokens"},
    "icepop": {"objective": "reinforce", "correction": "token_mask", "normaliser": "tokens"},
    "decoupled_ppo": {
        "correction": "decoupled",
        "proximal": "interpolated",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "normaliser": "tokens",
    },
}
# Settings that follow `algorithm` if a run file leaves them out.
SET_BY_PRESETS = frozenset(name for preset in PRESETS.values() for name in preset)
# Settings that a preset sets for one part only: if a run file chooses another part, they are not set.
TIED_TO: Mapping[str, tuple[str, ...]] = {
    "clip_low": ("objective",),
    "clip_high": ("objective",),
    "proximal": ("correction",),
    "kl_in_reward": ("advantage",),
}


@dataclass(frozen=True, slots=True)
class About:
    """Text about a preset: `source`, its paper; `choose`, the end of "choose it where
    ...", empty where the docstring of a variant of that name says it."""

    source: str
    choose: str


# `choose` is for docs/algorithms.md, `source` for the model card.
ABOUT: Mapping[str, About] = {
    "grpo": About(
        "arXiv:2402.03300; bounds and normaliser of arXiv:2503.14476, bound on bad tokens of arXiv:2505.07291",
        "the default: its bounds tolerate a staleness of a few versions",
    ),
    "trl_grpo": About(
        "TRL 1.16's GRPOTrainer with vLLM, as it is by default",
        "to compare with TRL's GRPOTrainer on fresh data; on stale data its mask leaves out whole rollouts",
    ),
    "async_grpo": About(
        "TRL 1.16's AsyncGRPOTrainer, with one normaliser for the step in place of one a micro-batch",
        "to compare with TRL's AsyncGRPOTrainer, whose normaliser is that of a micro-batch",
    ),
    "dr_grpo": About(
        "arXiv:2503.20783",
        "",
    ),
    "dapo": About(
        "arXiv:2503.14476, section 4.1",
        "the same as `grpo`, under the paper's name",
    ),
    "bnpo": About(
        "TRL's name; the step for its local batch",
        "to compare with TRL, whose normaliser is that of a local batch",
    ),
    "rloo": About(
        "arXiv:2402.14740; the KL is off unless `kl_coef` is set",
        "answers are short, or the size of a reward means something; the KL needs `kl_coef` (TRL: 0.05)",
    ),
    "gdpo": About(
        "arXiv:2601.05242",
        "",
    ),
    "gspo": About(
        "arXiv:2507.18071, section 5.1",
        "",
    ),
    "luspo": About(
        "arXiv:2602.05261, section 5.1, as TRL's documentation cites it",
        "as `gspo`, where long answers may weigh more",
    ),
    "cispo": About(
        "arXiv:2506.13585, with the bound of arXiv:2510.13786",
        "",
    ),
    "dppo": About(
        "arXiv:2602.04879",
        "",
    ),
    "sapo": About(
        "arXiv:2511.20347",
        "",
    ),
    "vespo": About(
        "arXiv:2602.10693",
        "",
    ),
    "tis": About(
        "fengyao.notion.site/off-policy-rl",
        "data is stale",
    ),
    "icepop": About(
        "ringtech.notion.site/icepop",
        "sampler and learner disagree on single tokens, as mixtures of experts do",
    ),
    "decoupled_ppo": About(
        "arXiv:2505.24298",
        'data is stale; `proximal = "last_step"` is exact',
    ),
}
