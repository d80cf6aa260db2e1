"""Which settings of [learner] the chosen algorithm reads: one that does nothing must not look as if it did; and which
do not suit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.config.sections import LearnerSection
from protocol.config.sections.base import toml_value
from protocol.config.sections.objective import CLIPPED
from protocol.config.sections.presets import PRESETS

_CORRECTED = (
    *("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    *("geometric_mask", "decoupled"),
)
# By setting, where only some algorithms read it: each part of the algorithm that may, with its variants that do.
READERS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "advantage_epsilon": {"advantage": ("grpo", "batch", "gdpo"), "normalise_advantages": (True,)},
    "reward_clip": {"advantage": ("grpo", "async_grpo", "dr_grpo", "rloo", "batch")},
    "kl_in_reward": {"advantage": ("grpo", "async_grpo", "dr_grpo", "rloo", "batch")},
    "clip_low": {"objective": CLIPPED},
    "clip_high": {"objective": (*CLIPPED, "cispo")},
    "delta": {"objective": CLIPPED},
    "dppo_divergence": {"objective": ("dppo",)},
    "dppo_threshold": {"objective": ("dppo",)},
    "dppo_ratio_max": {"objective": ("dppo",)},
    "sapo_temperature_pos": {"objective": ("sapo",)},
    "sapo_temperature_neg": {"objective": ("sapo",)},
    "vespo_k_pos": {"objective": ("vespo",)},
    "vespo_lambda_pos": {"objective": ("vespo",)},
    "vespo_k_neg": {"objective": ("vespo",)},
    "vespo_lambda_neg": {"objective": ("vespo",)},
    "correction_low": {"correction": _CORRECTED},
    "correction_high": {"correction": _CORRECTED},
    "proximal": {"correction": _CORRECTED},
}

# Of the mean ratio of a rollout, which hardly leaves 1.
_WIDE_FOR_GSPO = 0.05


def doubts(learner: LearnerSection) -> list[str]:
    """What may be meant, but hardly is."""
    bounds = {name: getattr(learner, name) for name in ("clip_low", "clip_high")}
    wide = [f"learner.{name} = {value:g}" for name, value in bounds.items() if value > _WIDE_FOR_GSPO]
    if learner.objective != "gspo" or not wide:
        return []
    papers = " and ".join(f"{name} = {PRESETS['gspo'][name]:g}" for name in bounds)
    return [
        f'{" and ".join(wide)} with objective = "gspo": the mean ratio of a rollout hardly ever moves so far, and '
        f"nothing would be clipped; its paper has {papers}"
    ]


def check(learner: LearnerSection) -> None:
    """Raises `ValueError` for a setting that the run file chooses and nothing reads."""
    for name, readers in READERS.items():
        read = any(getattr(learner, part) in variants for part, variants in readers.items())
        if learner.chooses(name) and not read:
            chosen = ", ".join(f"{part} = {toml_value(getattr(learner, part))}" for part in readers)
            wanted = " or ".join(f"{part} = {toml_value(v)}" for part, variants in readers.items() for v in variants)
            value = toml_value(getattr(learner, name))
            raise ValueError(f"learner.{name} = {value} does nothing with {chosen}: leave it out, or set {wanted}")
