"""Checks across settings: optimiser and schedule, algorithm, chat format, time-outs, quorum.

They refuse what transformers would accept silently or refuse only once the model is loaded, and settings that nothing
reads. They need neither the model nor the renderers library: which renderers and parsers exist, the worker knows
(`rollout_worker.chat.build`). Only the task knows whether a run has environments, so `check_patience` runs without them
when a run file is read, and again with them once the task is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.protocol.config.sections import (
    ChatSection,
    DemonstrationsSection,
    LearnerSection,
    QueueSection,
    VllmSection,
    WeightSyncSection,
    WorkerSection,
)
from slipstream.protocol.config.sections.algorithm import CLIPPED, WEIGHED
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.learner import SHARDED
from slipstream.protocol.config.sections.presets import PRESETS


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that does not stop the start. One that stops it is raised as a `ConfigError`.

    Attributes:
        severity: "warning" for a part that works, but probably not as intended; "error" for a part that cannot work.
        text: The fault, with the value.
        remedy: The change to make; empty if the text names it.
    """

    severity: Literal["warning", "error"]
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


# Schedules for which transformers ignores `lr_scheduler_kwargs`. It refuses what another one does not take.
_WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")

# Arguments of optimisers that have their own setting.
_OWN_SETTING = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas"}


def check_optimisation(learner: LearnerSection) -> None:
    """Check that optimiser, schedule and their arguments fit together. Raises `ValueError`."""
    _check_schedule(learner)
    if learner.shard_weights:
        check_sharded_optimisation(learner)
    for name, own in _OWN_SETTING.items():
        # AdEMAMix has three betas, and the setting takes two.
        if name in learner.optim_args and not (name == "betas" and "ademamix" in learner.optim):
            raise ValueError(
                f"learner.optim_args = {toml_value(learner.optim_args)}: {name} has its own setting; set learner.{own}"
            )


def check_sharded_optimisation(learner: LearnerSection) -> None:
    """Check that the optimiser can step on sharded weights. Raises `ValueError`."""
    if learner.optim not in SHARDED:
        raise ValueError(
            f"learner.optim = {learner.optim} with learner.shard_weights = true: it cannot step on weights that are "
            f"divided among ranks; choose one of {', '.join(sorted(SHARDED))}, or leave learner.shard_weights out"
        )


def _check_schedule(learner: LearnerSection) -> None:
    kind, given = learner.lr_scheduler_type, learner.lr_scheduler_kwargs
    if given and kind in _WITHOUT_ARGUMENTS:
        raise ValueError(
            f"learner.lr_scheduler_kwargs = {toml_value(given)}: learner.lr_scheduler_type = {kind} takes none; leave "
            f"them out"
        )
    if kind == "constant" and learner.warmup_steps:
        raise ValueError(
            f"learner.warmup_steps = {learner.warmup_steps} does nothing with learner.lr_scheduler_type = constant: "
            f"leave it out, or set learner.lr_scheduler_type = constant_with_warmup"
        )


_CORRECTED = (
    *("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    *("geometric_mask", "decoupled"),
)

# Settings that only some algorithms read: for each part of the algorithm, its variants that read the setting.
READERS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "advantage_epsilon": {"advantage": ("grpo", "batch", "gdpo"), "normalise_advantages": (True,)},
    "reward_clip": {"advantage": ("grpo", "async_grpo", "dr_grpo", "rloo", "batch")},
    "kl_in_reward": {"advantage": ("grpo", "async_grpo", "dr_grpo", "rloo", "batch")},
    "clip_low": {"objective": CLIPPED},
    "clip_high": {"objective": (*CLIPPED, *WEIGHED)},
    "delta": {"objective": CLIPPED},
    "dppo_divergence": {"objective": ("dppo",)},
    "dppo_threshold": {"objective": ("dppo",)},
    "sapo_temperature_pos": {"objective": ("sapo",)},
    "sapo_temperature_neg": {"objective": ("sapo",)},
    "vespo_k_pos": {"objective": ("vespo",)},
    "vespo_lambda_pos": {"objective": ("vespo",)},
    "vespo_k_neg": {"objective": ("vespo",)},
    "vespo_lambda_neg": {"objective": ("vespo",)},
    "correction_low": {"correction": _CORRECTED},
    "correction_high": {"correction": _CORRECTED},
    "proximal": {"correction": _CORRECTED},
    "credit_discount": {"credit": ("turn", "gigpo")},
    "gigpo_weight": {"credit": ("gigpo",)},
}

# What credit by turn cannot go with, and why.
_OF_WHOLE_ROLLOUTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "advantage": (
        ("batch", "gdpo"),
        "it compares whole rollouts of the step; choose grpo, async_grpo, dr_grpo or rloo",
    ),
    "normalise_advantages": ((True,), "it is over the step's rollouts; leave it out"),
}

# Bounds above this are wide for gspo, since the mean ratio of a rollout hardly leaves 1.
_WIDE_FOR_GSPO = 0.05


def find_algorithm_warnings(learner: LearnerSection) -> list[Finding]:
    """Find bounds of a clip that are valid but too wide for the objective."""
    bounds = {name: getattr(learner, name) for name in ("clip_low", "clip_high")}
    wide = [f"learner.{name} = {value:g}" for name, value in bounds.items() if value > _WIDE_FOR_GSPO]
    if learner.objective != "gspo" or not wide:
        return []
    papers = " and ".join(f"{name} = {PRESETS['gspo'][name]:g}" for name in bounds)
    text = (
        f'{" and ".join(wide)} with objective = "gspo": the mean ratio of a rollout hardly ever moves so far, and '
        f"nothing would be clipped"
    )
    return [Finding("warning", text, f"its paper has {papers}")]


def check_algorithm(learner: LearnerSection) -> None:
    """Check that the algorithm reads every setting that the run file chooses. Raises `ValueError`."""
    for name, readers in READERS.items():
        read = any(getattr(learner, part) in variants for part, variants in readers.items())
        if learner.chooses(name) and not read:
            chosen = ", ".join(f"{part} = {toml_value(getattr(learner, part))}" for part in readers)
            wanted = " or ".join(f"{part} = {toml_value(v)}" for part, variants in readers.items() for v in variants)
            value = toml_value(getattr(learner, name))
            raise ValueError(f"learner.{name} = {value} does nothing with {chosen}: leave it out, or set {wanted}")
    if learner.credit != "episode":
        _check_credit(learner)


def _check_credit(learner: LearnerSection) -> None:
    """Refuse what reads or changes the reward of a whole rollout, which no turn has. Raises `ValueError`."""
    refused = {name: why for name, (values, why) in _OF_WHOLE_ROLLOUTS.items() if getattr(learner, name) in values}
    if learner.reward_clip is not None:
        refused["reward_clip"] = (
            "it bounds the rewards of rollouts, and turns would count as before; bound them yourself"
        )
    if learner.kl_in_reward and learner.kl_coef:
        refused["kl_in_reward"] = "it changes the rewards of rollouts; leave it out, and the KL is in the loss"
    for name, why in refused.items():
        value = toml_value(getattr(learner, name))
        raise ValueError(
            f"learner.{name} = {value} cannot go with learner.credit = {toml_value(learner.credit)}: {why}"
        )


def check_demonstrations(learner: LearnerSection, demonstrations: DemonstrationsSection) -> None:
    """Check that there is something to mix into each step. Raises `ValueError`."""
    if not learner.demonstrations_coef:
        return
    coefficient = f"learner.demonstrations_coef = {learner.demonstrations_coef:g}"
    if demonstrations.path is None:
        raise ValueError(f"{coefficient} needs conversations: name them with demonstrations.path, or leave it out")
    if learner.script is not None:
        raise ValueError(
            f"{coefficient} does nothing with learner.script, whose trainer has its own loss: leave one of them out"
        )


# Parameters of transformers' `apply_chat_template`, and what rendering sets itself: no variables of a template.
RESERVED = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("conversation", "conversations", "tokenize", "padding", "truncation", "max_length", "self"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)

_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")


def check_chat(chat: ChatSection) -> None:
    """Check the settings of the chat format. Raises `ValueError` with setting, reason and remedy."""
    if chat.template == Path():
        raise ValueError('chat.template = "": names nothing; leave it out for the default')
    if ".py:" in chat.parser and not _FILE.fullmatch(chat.parser):
        raise ValueError(
            f"chat.parser = {chat.parser}: the file is named without a function; write it as path/to/file.py:function"
        )
    if taken := sorted(RESERVED & chat.chat_template_kwargs.keys()):
        raise ValueError(
            f"chat.chat_template_kwargs: {', '.join(taken)} cannot be set by the run file, as rendering sets it; leave "
            f"it out"
        )
    given: dict[str, Any] = {"chat.renderer": chat.renderer, "chat.renderer_options": chat.renderer_options}
    renderers = {name: value for name, value in given.items() if value}
    templates = template_settings(chat)
    if chat.format == "template":
        unread, chosen = renderers, {"chat.format": "template"}
    elif chat.format == "renderer":
        unread, chosen = templates, {"chat.format": "renderer"}
    else:
        unread, chosen = templates if renderers else {}, renderers
    for name, value in unread.items():
        beside, other = next(iter(chosen.items()))
        raise ValueError(
            f"{name} = {value} does nothing with {beside} = {other}: a run uses either a template or a renderer; leave "
            f"one of them out"
        )


def template_settings(chat: ChatSection) -> dict[str, Any]:
    """Return the given settings that only a template reads."""
    settings = {"chat.template": chat.template, "chat.parser": chat.parser, "chat.tools": chat.tools}
    return {name: value for name, value in settings.items() if value not in (None, "auto", "template")}


# A part of a wait: the setting, and its seconds.
_Part: TypeAlias = tuple[str, float]


def ticket_max_age_s(queue: QueueSection, worker: WorkerSection) -> float:
    """Resolve `queue.ticket_max_age_s`: "auto" is twice the time-outs of environment, episode and rewards.

    Twice, since an environment is made and reset, and both it and reward functions may reward.
    """
    if queue.ticket_max_age_s != "auto":
        return queue.ticket_max_age_s
    return 2 * (worker.environment_timeout_s + worker.episode_timeout_s + worker.reward_timeout_s)


def check_patience(
    queue: QueueSection, worker: WorkerSection, learner: LearnerSection, environments: bool = False
) -> None:
    """Check that tickets, leases and learner wait long enough for the longest group. Raises `ValueError`.

    Args:
        environments: Whether episodes run in environments.
    """
    episode = [("worker.episode_timeout_s", worker.episode_timeout_s)]
    group = [*episode, ("worker.reward_timeout_s", worker.reward_timeout_s)]
    if environments:
        made_and_reset = ("2 x worker.environment_timeout_s", 2 * worker.environment_timeout_s)
        episode = [made_and_reset, *group]  # get_reward is the episode's own
        group = [made_and_reset, *episode[1:2], ("2 x worker.reward_timeout_s", 2 * worker.reward_timeout_s)]
    age_s = ticket_max_age_s(queue, worker)
    if age_s < _sum(episode):
        raise ValueError(
            f"queue.ticket_max_age_s = {age_s:g} is less than {_listed(episode)}: the longest episodes would lose "
            f"their ticket before they end; raise queue.ticket_max_age_s to {_sum(episode):g} or more, or lower "
            f"{_settings(episode)}"
        )
    if learner.stall_timeout_s <= _sum(group):
        raise ValueError(
            f"learner.stall_timeout_s = {learner.stall_timeout_s:g} is not more than {_listed(group)}: the learner "
            f"would give up while a group may still come; raise learner.stall_timeout_s above {_sum(group):g}, or "
            f"lower {_settings(group)}"
        )


def _sum(parts: list[_Part]) -> float:
    return sum(seconds for _, seconds in parts)


def _listed(parts: list[_Part]) -> str:
    texts = [f"{name} = {seconds:g}" for name, seconds in parts]
    return f"{', '.join(texts[:-1])} and {texts[-1]} together" if len(texts) > 1 else texts[0]


def _settings(parts: list[_Part]) -> str:
    return " or ".join(name.removeprefix("2 x ") for name, _ in parts)


def find_quorum_warnings(weight_sync: WeightSyncSection, vllm: VllmSection) -> list[Finding]:
    """Find a quorum above the number of servers, which is only right if more servers join."""
    there = len(vllm.servers) if vllm.servers else vllm.count
    # With vllm.count = 0 all join by themselves, as those of a cluster do.
    if weight_sync.quorum <= max(1, there):
        return []
    named = f"the {there} of vllm.servers" if vllm.servers else f"vllm.count = {there}"
    text = (
        f"weight_sync.quorum = {weight_sync.quorum} with {named}: the first step waits until "
        f"{weight_sync.quorum - there} more have joined (`slipstream vllm run.toml --join URL`), and without them the "
        f"run ends after vllm.start_timeout_s = {vllm.start_timeout_s:g} s"
    )
    return [Finding("warning", text, f"if none are to join, lower weight_sync.quorum to {max(1, there)}")]
