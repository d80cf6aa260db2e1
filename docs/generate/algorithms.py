"""Writes docs/algorithms.md from the docstrings in `learner/algorithm` and the notes next to the presets."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.learner.algorithm.advantages import ADVANTAGES
from slipstream.learner.algorithm.corrections import CORRECTIONS, PROXIMALS
from slipstream.learner.algorithm.credit import CREDITS
from slipstream.learner.algorithm.loss_terms import (
    EntropyBonus,
    KlInLoss,
    KlInReward,
    OffPolicy,
    RouterLoss,
    TopEntropy,
)
from slipstream.learner.algorithm.objectives import OBJECTIVES, ClipObjective
from slipstream.learner.algorithm.step_data import NORMALISERS
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.checks import READERS
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.presets import ABOUT, PRESETS

INTRODUCTION = """# Algorithms

Generated from the code by `python -m docs.generate algorithms`. `learner.algorithm` names a preset. Settings in the run
file or on the command line override the preset's:

```bash
slipstream up run.toml --learner.algorithm rloo --learner.kl_coef 0.05
slipstream up run.toml --learner.objective cispo --learner.clip_high 4
```

A setting that the chosen algorithm does not read is refused. `slipstream config run.toml` prints what a preset sets;
[settings](settings.md) has the bounds.

## What to choose

Start with `grpo`, the default. It needs no second model and no extra pass. Its clip bounds the effect of stale tokens,
and `delta` also bounds that of bad tokens, which PPO's clip does not.

| you see | choose |
|---|---|
| `staleness_mean` of 0 to 1, as with the default pacing | `grpo` |
| more, with `ess` below 0.9 or `clip_ratio/region_mean` above 0.1 | a lower `queue.max_staleness`; else the next row |
| data that has to be stale | `decoupled_ppo`; or `tis` or `cispo`, at a lower `learning_rate` |
| a mixture of experts, or very long answers | `gspo`; `icepop` where `log_ratio_max` is large at staleness 0 |
| answers that grow longer and not better | `dr_grpo` |
| several reward functions, one of which never rises | `gdpo` |
| `entropy` near 0 while the reward is low | `entropy_coef = 0.001`, or a higher `clip_high` |
| the policy forgets what it could before | `kl_coef = 0.04`; takes the memory of one more model ([sizing](sizing.md)) |

Most rows follow the papers. The third is measured on two CPU cores with tokens 1 to 4 versions old (`python -m
benchmarks.staleness`): `grpo` and `decoupled_ppo` learn at a rate of 4e-4, at which `tis` and `rloo` collapse; these
learn as well at 1e-4.
"""


def page() -> str:
    """Returns the text of the page."""
    return (
        "\n".join(
            [
                INTRODUCTION,
                _presets(),
                "## Advantages\n\nHow much better a rollout did than the others, computed from its reward `r`; 0 in a "
                "group with equal rewards. All read `normalise_advantages`; all except `gdpo` read `reward_clip`.\n",
                _variants("advantage", ADVANTAGES),
                "## Credit\n\nWhich rewards a token answers for ([rewards at turns](your_task.md#rewards-at-turns)). "
                "`turn` and `gigpo` take neither `batch` nor `gdpo`, `normalise_advantages`, `reward_clip` or "
                "`kl_in_reward`.\n",
                _variants("credit", CREDITS),
                "## Normalisers\n\nThe divisor of a step's summed losses, one for the whole step. Tokens of tools and "
                "environments never count.\n",
                _variants("normaliser", NORMALISERS),
                "## Objectives\n\nThe loss of a token from its advantage `A` and its ratio `r = p / p_old`; `p_old` is "
                "the policy that sampled it, unless a correction moves it.\n\n"
                f"`ppo_clip`, `gspo` and `sequence_clip` clip. {_text(ClipObjective)}\n",
                _variants("objective", OBJECTIVES),
                "## Corrections\n\nCorrect for tokens that an older version sampled. All but `none` and "
                "`geometric_mask` multiply a token's weight by r = proximal / behaviour within bounds, and take the "
                "objective's ratio against the proximal policy instead of the sampler. r is the whole rollout's for "
                "`sequence_...`, else the token's.\n",
                _variants("correction", CORRECTIONS),
                "## Proximal policies\n\nThe policy between sampler and learner that corrections weigh by.\n",
                _variants("proximal", PROXIMALS),
                "## Masks\n\nTokens that the objective does not see; they stay in the normaliser.\n",
                _part("`off_policy_mask_threshold`", OffPolicy, (), "--learner.off_policy_mask_threshold 0.5"),
                _part("`top_entropy_quantile`", TopEntropy, (), "--learner.top_entropy_quantile 0.2"),
                "## KL, entropy and routers\n\nFurther terms of the loss, all off by default.\n",
                _part(
                    "`kl_coef`",
                    KlInLoss,
                    ("kl_bias_correction", "reference_sync_steps", "reference_mixup"),
                    "--learner.kl_coef 0.04",
                ),
                _part(
                    "`kl_in_reward`",
                    KlInReward,
                    ("kl_coef", "reference_sync_steps", "reference_mixup"),
                    "--learner.kl_coef 0.05 --learner.kl_in_reward true",
                ),
                _part("`entropy_coef`", EntropyBonus, (), "--learner.entropy_coef 0.001"),
                _part(
                    "`router_aux_loss_coef`",
                    RouterLoss,
                    (),
                    "--learner.router_aux_loss_coef 0.001",
                ),
            ]
        ).rstrip("\n")
        + "\n"
    )


def _presets() -> str:
    rows = [f"| `{name}` | {_sets(PRESETS[name])} | {about.choose} |" for name, about in ABOUT.items()]
    head = ["| preset | sets | choose it where |", "|---|---|---|"]
    return "\n".join(
        [
            "## Presets\n\nA setting that a preset does not name keeps its default. Where the last column is empty, "
            "see the entry of that name below. [From TRL](from_trl.md) has TRL's names.\n",
            *head,
            *rows,
            "",
        ]
    )


def _sets(preset: Mapping[str, Any]) -> str:
    """Return what a preset sets to another value than the default."""
    fields = LearnerSection.model_fields
    sets = (f"`{name} = {toml_value(value)}`" for name, value in preset.items() if value != fields[name].default)
    return ", ".join(sets) or "nothing"


def _variants(part: str, table: Mapping[str, Any]) -> str:
    default = LearnerSection.model_fields[part].default
    parts = []
    for name, variant in table.items():
        reads = [setting for setting, readers in READERS.items() if name in readers.get(part, ())]
        own = [setting for setting in reads if setting not in ("reward_clip", "kl_in_reward")]
        title = f'`{part} = "{name}"`{", the default" if name == default else ""}'
        beside = "--learner.correction decoupled " if part == "proximal" else ""  # which reads it
        more = f"{beside}{_preset_bounds(name, own)}"
        parts.append(
            _part(title, variant, own, f"{beside}--learner.{part} {name}{_preset_bounds(name, own)}" * bool(more))
        )
    return "\n".join(parts)


def _preset_bounds(variant: str, own: Sequence[str]) -> str:
    """Options for what the preset of a variant's name has of the settings that it reads: the defaults are another
    objective's."""
    preset = PRESETS.get(variant, {})
    return "".join(f" --learner.{name} {toml_value(preset[name])}" for name in own if name in preset)


def _part(title: str, of: Any, settings: Any, options: str) -> str:
    """Return an entry. `options` are those of a command that uses it, if the title does not say all of them."""
    unnamed = [f"`{name}`" for name in settings if f"`{name}`" not in _text(of) and f"`{name}`" not in title]
    reads = f"Settings: {', '.join(unnamed)}." if unnamed else ""
    end = " ".join(filter(None, (reads, options and f"`{options}`")))
    return "\n\n".join(filter(None, (f"### {title}", _text(of), end))) + "\n"


def _text(of: Any) -> str:
    """A docstring as markdown, without its metrics: docs/metrics.md has them."""
    text = re.sub(r"\s*\bSums?:\s.*?(?=\n\n|\Z)", "", inspect.getdoc(of) or "", flags=re.DOTALL)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(_escaped(paragraph) for paragraph in paragraphs if paragraph)


def _escaped(paragraph: str) -> str:
    """Stars outside of code are times signs."""
    parts = paragraph.split("`")
    parts[::2] = [part.replace("*", r"\*").replace("_", r"\_") for part in parts[::2]]
    return "`".join(parts)
