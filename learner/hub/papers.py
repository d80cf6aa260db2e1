"""The papers of what a run learns by, for its model card."""

from __future__ import annotations

import re

from protocol.config import LearnerSection
from protocol.config.sections.presets import ABOUT

# Title, authors and year by arXiv's number. A paper that is not here is named by its number alone.
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


def sources(learner: LearnerSection) -> str:
    """Where the preset is from, with links."""
    source = ABOUT[learner.algorithm].source
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


def bibtex(learner: LearnerSection) -> str:
    """The preset's papers, as far as they are known by title; empty if none is."""
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
