"""Writes the pages that come from the code: `python -m docs.generate settings > docs/settings.md`, and `algorithms`.

Formulas, sources and advice are those of the docstrings in learner/algorithm; the presets' stand beside them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.corrections import CORRECTIONS, PROXIMALS, ImportanceWeight
from learner.algorithm.loss_terms import EntropyBonus, KlInLoss, KlInReward, OffPolicy, RouterLoss, TopEntropy
from learner.algorithm.objectives import OBJECTIVES, ClipObjective
from learner.algorithm.step_data import NORMALISERS
from protocol.config import LearnerSection, RunConfig
from protocol.config.checks import READERS
from protocol.config.sections.base import toml_value
from protocol.config.sections.presets import ABOUT, PRESETS

ALGORITHMS_INTRODUCTION = """# Algorithms

What a step learns, written by `python -m docs.generate` from the code. `learner.algorithm` names a preset;
each setting that it has may be given beside it, in the run file or on the command line, and goes first:

```bash
slipstream up run.toml --learner.algorithm rloo
slipstream up run.toml --learner.algorithm rloo --learner.kl_coef 0.05
slipstream up run.toml --learner.objective cispo --learner.clip_high 4
```

A setting that the chosen algorithm does not read is refused. `slipstream config run.toml` prints what a preset comes
to, and [settings](settings.md) has the bounds of each setting.

## What to choose

Start with `grpo`, the default. Its ratio is to the policy that sampled each token, so it bounds what old tokens do
without a second model or a pass. `delta` bounds it for bad tokens too, which PPO's clip does not: one such token, 18
nats off, took a gradient's norm from 3.9 to 270,229.

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

Most of these are what the papers say. Measured is the third row: `python -m benchmarks.staleness`, the multiply example
with only every fifth version published, so that every step but the first of five trains on tokens that are 1 to 4
versions old. Mean rewards of ten steps each, two seeds, on two CPU cores:

| `learner.algorithm` | `learner.learning_rate` | seed 0 | seed 1 |
|---|---|---|---|
| `grpo` | 4e-4, the example's | 0.59 0.92 0.95 0.89 0.94 0.89 | 0.56 0.86 0.67 0.89 0.89 0.94 |
| `decoupled_ppo` | 4e-4 | 0.59 0.93 0.90 0.86 0.94 0.95 | 0.58 0.84 0.91 0.88 0.93 0.93 |
| `rloo` | 4e-4 | 0.58 0.93 0.95 0.35 0.26 0.41 | 0.60 0.87 0.91 0.90, then all rewards equal |
| `tis` | 4e-4 | 0.59 0.81 0.82 0.66, then all rewards equal | 0.59 0.43, then all rewards equal |
| `rloo` | 1e-4 | 0.49 0.81 0.93 0.95 0.95 0.95 | 0.47 0.78 0.85 0.89 0.92 0.92 |
| `tis` | 1e-4 | 0.47 0.80 0.92 0.94 0.96 0.94 | 0.49 0.78 0.87 0.91 0.92 0.94 |
| `objective = "importance"` | 4e-4 | 0.59 0.86 0.56, then all rewards equal | 0.58 0.83 0.73 0.85 0.93 0.88 |

So a clip holds a step at a rate at which what only weighs tokens collapses: with `tis` and `rloo` on old data, take a
lower `learning_rate`.
"""


def algorithms_page() -> str:
    return (
        "\n".join(
            [
                ALGORITHMS_INTRODUCTION,
                _presets(),
                "## Advantages\n\nHow much better a rollout did than others, from its reward `r`. Groups whose rewards "
                "are all equal have none.\n"
                "\nRead by all of them: `normalise_advantages`, and but for `gdpo` `reward_clip`.\n",
                _variants("advantage", ADVANTAGES),
                "## Normalisers\n\nWhat the sum of a step's losses is divided by. There is one for the whole step, so "
                "neither packing nor micro-batches change the gradient. Tokens of tools and environments never "
                "count.\n",
                _variants("normaliser", NORMALISERS),
                "## Objectives\n\nThe loss of a token from its advantage `A` and its ratio `r = p / p_old`; `p_old` is "
                "the policy that sampled it, unless a correction moves it.\n\n"
                f"`ppo_clip`, `gspo` and `sequence_clip` clip. {_text(ClipObjective)}\n",
                _variants("objective", OBJECTIVES),
                f"## Corrections\n\nWhat is done about tokens that an older version sampled. Those that weigh: "
                f"{_text(ImportanceWeight)}\n",
                _variants("correction", CORRECTIONS),
                "## Proximal policies\n\nThe policy between sampler and learner that corrections weigh by.\n",
                _variants("proximal", PROXIMALS),
                "## Masks\n\nTokens that the objective does not see; they stay in the normaliser.\n",
                _part("`off_policy_mask_threshold`", OffPolicy, (), "--learner.off_policy_mask_threshold 0.5"),
                _part("`top_entropy_quantile`", TopEntropy, (), "--learner.top_entropy_quantile 0.2"),
                "## KL, entropy and routers\n\nWhat the loss holds beside the objective. All are off by default.\n",
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
    rows = [
        f"| `{name}` | {_sets(PRESETS[name])} | {about.trl} | {about.choose} | {about.source} |"
        for name, about in ABOUT.items()
    ]
    head = ["| preset | sets | TRL's name | choose it where | source |", "|---|---|---|---|---|"]
    return "\n".join(["## Presets\n\nWhat a preset does not set has its own default.\n", *head, *rows, ""])


def _sets(preset: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name} = {toml_value(value)}`" for name, value in preset.items()) or "nothing"


def _variants(part: str, table: Mapping[str, Any]) -> str:
    default = LearnerSection.model_fields[part].default
    parts = []
    for name, variant in table.items():
        reads = [setting for setting, readers in READERS.items() if name in readers.get(part, ())]
        own = [setting for setting in reads if setting not in ("reward_clip", "kl_in_reward")]
        title = f'`{part} = "{name}"`{", the default" if name == default else ""}'
        beside = "--learner.correction decoupled " if part == "proximal" else ""  # which reads it
        parts.append(_part(title, variant, own, f"{beside}--learner.{part} {name}{_preset_bounds(name, own)}"))
    return "\n".join(parts)


def _preset_bounds(variant: str, own: Sequence[str]) -> str:
    """Options for what the preset of a variant's name has of the settings that it reads: the defaults are another
    objective's."""
    preset = PRESETS.get(variant, {})
    return "".join(f" --learner.{name} {toml_value(preset[name])}" for name in own if name in preset)


def _part(title: str, of: Any, settings: Any, options: str) -> str:
    reads = f"Settings: {', '.join(f'`{name}`' for name in settings)}. " if settings else ""
    return f"### {title}\n\n{_text(of)}\n\n{reads}`slipstream up run.toml {options}`\n"


def _text(of: Any) -> str:
    """A docstring as markdown, without what it says of figures: docs/metrics.md has them."""
    text = re.sub(r"\s*\bSums?:\s.*?(?=\n\n|\Z)", "", inspect.getdoc(of) or "", flags=re.DOTALL)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(_escaped(paragraph) for paragraph in paragraphs if paragraph)


def _escaped(paragraph: str) -> str:
    """Stars outside of code are times signs."""
    parts = paragraph.split("`")
    parts[::2] = [part.replace("*", r"\*").replace("_", r"\_") for part in parts[::2]]
    return "`".join(parts)


SETTINGS_INTRODUCTION = """# Settings

Every setting of a run file, from `protocol/config/sections/` by `python -m docs.generate settings`. Any of
them can be given on the command line, as `--section.key value`. `slipstream config run.toml`
prints a run file whole and checks it.
"""

_SIGNS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def settings_page() -> str:
    parts = [SETTINGS_INTRODUCTION]
    for section, field in RunConfig.model_fields.items():
        table = field.annotation
        assert isinstance(table, type)
        assert issubclass(table, BaseModel)
        rows = [_row(key, setting) for key, setting in table.model_fields.items()]
        parts.append(
            "\n".join(
                [f"## `[{section}]`", "", "| setting | default | meaning | why |", "|---|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    why = str(extra.get("why", "")) if isinstance(extra, dict) else ""
    bounds = _setting_bounds(field)
    meaning = f"{field.description}{f' ({bounds})' if bounds else ''}"
    cells = (f"`{key}`", _default(field), meaning, why)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "to be set"
    return "none" if field.default is None else f"`{toml_value(field.default)}`"


def _setting_bounds(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(toml_value(value) for value in get_args(field.annotation))
    found = []
    for bound in field.metadata:
        for kind, (sign, name) in _SIGNS.items():
            if isinstance(bound, kind):
                found.append(f"{sign} {_number(getattr(bound, name))}")
    return ", ".join(found)


def _number(value: float) -> str:
    """Powers of two and ten as such, where they are long."""
    if isinstance(value, int) and value >= 1024 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return re.sub(r"^1(,000){2,}$", lambda match: f"10^{3 * match[0].count(',')}", text)


PAGES = {"settings": settings_page, "algorithms": algorithms_page}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
