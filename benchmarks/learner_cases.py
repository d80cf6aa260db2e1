"""Defines the batches and models that `benchmarks.learner` compares on. Every way gets the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np
import torch

from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import Sample
from tests.kit.learner import step_rollouts
from tests.kit.model import tiny_model

GROUP_SIZE = 8


@dataclass(frozen=True)
class Batch:
    """Holds the samples of one optimiser step, of rollouts in groups of 8.

    Attributes:
        raw: Number of tokens if nothing were shared.
    """

    samples: list[Sample]
    rollouts: StepRollouts

    @property
    def raw(self) -> int:
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True)
class Shape:
    """Describes groups of 8 rollouts by their lengths.

    Attributes:
        groups: Number of groups.
        prompt: Tokens of the group's common prompt. 0 shares none: half of each rollout is then its own prompt.
        completions: Maps a number of rollouts to the tokens of each completion.
        distinct: Number of completions of a group that differ.
    """

    groups: int
    prompt: int
    completions: Callable[[int], list[int]]
    distinct: int = GROUP_SIZE

    def smaller(self, parts: int) -> Shape:
        return replace(self, groups=max(1, self.groups // parts))


def _all(tokens: int) -> Callable[[int], list[int]]:
    return lambda count: [tokens] * count


def _log_uniform(count: int) -> list[int]:
    """Return `count` lengths from 32 to 2,048 tokens, evenly over the logarithm, in random order."""
    lengths = np.exp(log(32) + (np.arange(count) + 0.5) / count * log(64)).astype(int)
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


CASES = {
    # 128 x 160 tokens. 60 % of them are the group's prompt; completions are random tokens.
    "short": Shape(16, 96, _all(64)),
    # The same, but half of each group's completions are equal, as in a task with few answers.
    "short_half_equal": Shape(16, 96, _all(64), distinct=GROUP_SIZE // 2 + 1),
    # 64 rollouts of 32 to 2,048 tokens; nothing is shared.
    "mixed": Shape(8, 0, _log_uniform),
    # That of examples/pretrained: 8 groups that share a prompt.
    "sums": Shape(8, 34, _all(12)),
    # The group's prompt is 4 times the completion.
    "long_prompt": Shape(4, 800, _all(200)),
}


@dataclass(frozen=True)
class Size:
    """Describes a random Qwen3, and how much smaller its batches are so that a step takes seconds.

    Attributes:
        dtype: Type of the weights. None: bfloat16 on a GPU, float32 on a CPU.
    """

    parts: int
    config: dict[str, Any]
    dtype: torch.dtype | None = None

    def build(self, attention: str, device: torch.device) -> Any:
        """Build the model, with the same weights at each call."""
        dtype = self.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = tiny_model(initializer_range=0.02, attn_implementation=attention, **self.config)
        return model.to(device, dtype).eval()


SIZES = {
    # That of examples/multiply.
    "0.4M": Size(1, {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
    "7M": Size(
        4,
        {
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 768,
            "head_dim": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    # The shape of SmolLM2-135M, that of examples/pretrained.
    "135M": Size(
        1,
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "head_dim": 64,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    # The shape of Qwen3-0.6B, for a GPU.
    "0.6B": Size(
        1,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "head_dim": 128,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
}


def batch(shape: Shape, vocabulary: int) -> Batch:
    """Make a batch with random rewards and the behaviour log-probs of a random model.

    Some ratios therefore lie outside of the clip.

    Args:
        shape: Lengths of the rollouts.
        vocabulary: Number of token ids.
    """
    random = np.random.default_rng(0)
    samples = [
        _sample(tokens, prompt, random, rollout, vocabulary)
        for rollout, (tokens, prompt) in enumerate(_token_ids(shape, random, vocabulary))
    ]
    return Batch(samples, step_rollouts(samples, GROUP_SIZE))


def _token_ids(
    shape: Shape, random: np.random.Generator, vocabulary: int
) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    lengths = iter(shape.completions(shape.groups * GROUP_SIZE))
    for _ in range(shape.groups):
        prompt = random.integers(0, vocabulary, shape.prompt)
        for place in range(GROUP_SIZE):
            length = next(lengths)
            if place < shape.distinct:
                completion = random.integers(0, vocabulary, length)
            yield np.concatenate([prompt, completion]), shape.prompt or length // 2


def _sample(
    token_ids: np.ndarray[Any, Any], prompt: int, random: np.random.Generator, rollout: int, vocabulary: int
) -> Sample:
    sampled = np.arange(len(token_ids)) >= prompt
    behaviour = random.normal(-log(vocabulary), 0.2, len(token_ids))
    return Sample(
        token_ids.astype(np.int32),
        np.where(sampled, behaviour, 0.0).astype(np.float32),
        weights=sampled.astype(np.float32),
        staleness=np.zeros(len(token_ids), dtype=np.int32),
        fresh=sampled,
        rollout=rollout,
        group=rollout // GROUP_SIZE,
    )
