"""Trains a tiny policy with supervision: on correct demonstrations until it solves the task, then on flawed ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tiny_policy.demonstration import Demonstration
from tiny_policy.policy import Example, build_model, build_tokenizer, encode
from tiny_policy.progress_line import ProgressLine
from tiny_policy.recipe import Recipe


def token_losses(model: Qwen3ForCausalLM, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the losses of the next tokens.

    The tools' description opens every conversation and is most of it. It therefore runs through the model once, and
    the conversations continue from its keys and values.

    Args:
        model: The policy.
        examples: N conversations.

    Returns:
        Negative log-probs [N, T] of the next tokens, and the mask [N, T] of the tokens that the assistant wrote.
    """
    columns = zip(*(example.ids for example in examples), strict=False)
    shared = next(place for place, ids in enumerate(columns) if len(set(ids)) > 1)
    length = max(len(example.ids) for example in examples)
    ids = torch.tensor([example.ids + [0] * (length - len(example.ids)) for example in examples])
    written = torch.tensor([example.written + [False] * (length - len(example.ids)) for example in examples])
    cache = model.model(input_ids=ids[:1, :shared], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(examples))
    hidden = model.model(input_ids=ids[:, shared:], past_key_values=cache).last_hidden_state[:, :-1]
    written = written[:, shared + 1 :]
    losses = torch.zeros(written.shape)
    losses[written] = F.cross_entropy(model.lm_head(hidden[written]), ids[:, shared + 1 :][written], reduction="none")
    return losses, written


@torch.no_grad()
def success_rate(model: Qwen3ForCausalLM, examples: list[Example]) -> float:
    """Return the mean probability that sampling at temperature 1 writes exactly the demonstrated turns."""
    losses, _ = token_losses(model, examples)
    return torch.exp(-losses.sum(1)).mean().item()


def train(
    model: Qwen3ForCausalLM,
    draw: Callable[[], list[Example]],
    steps: int,
    learning_rate: Callable[[int], float],
    after_step: Callable[[int], bool],
    muon: bool = False,
) -> None:
    """Train on the assistant's tokens.

    Args:
        model: The policy.
        draw: Draws a batch.
        steps: Maximum number of steps.
        learning_rate: AdamW's learning rate, by step.
        after_step: Runs after each step, with its number. True ends the training.
        muon: Give the layers' matrices to Muon, at twice that rate.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2] if muon else []
    by_muon = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in by_muon]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01)]
    if matrices:
        # Muon's update is scaled to the size of AdamW's (arXiv 2502.16982), so that one schedule serves both.
        optimisers.append(torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    for step in range(steps):
        for factor, optimiser in enumerate(optimisers, 1):
            for group in optimiser.param_groups:
                group["lr"] = factor * learning_rate(step)
        losses, written = token_losses(model, draw())
        loss = losses.sum() / written.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        if after_step(step):
            return


def warm_start(recipe: Recipe, seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build a policy and train it by a recipe; return the model and its tokenizer."""
    tokenizer = build_tokenizer(recipe, seed)
    model = build_model(recipe, seed)
    tools = recipe.schemas
    rng = random.Random(seed)
    held_out = random.Random(seed + 1_000_000)

    def batch(demonstration: Callable[[random.Random], Demonstration], rng: random.Random, size: int) -> list[Example]:
        return [encode(demonstration(rng), tokenizer, tools) for _ in range(size)]

    judges = batch(recipe.correct, held_out, 128)
    with ProgressLine() as progress:

        def good_enough(step: int) -> bool:
            if step % 10:
                return False
            rate = success_rate(model, judges)
            done = min(max(rate / recipe.solves, step / recipe.clean_steps), 1)
            progress.update(done * 80, f"clean, solves {rate:4.0%}")
            return rate >= recipe.solves

        def show(step: int) -> bool:
            done = (step + 1) / recipe.flawed_steps
            progress.update(80 + 20 * done, "flawed demonstrations")
            return False

        def clean_rate(step: int) -> float:
            left = 1 - step / recipe.clean_steps
            return 2e-3 * min(1.0, (step + 1) / 20, max(0.1, 2 * left) if recipe.muon else 1.0)

        train(
            model,
            lambda: batch(recipe.correct, rng, recipe.batch),
            recipe.clean_steps,
            clean_rate,
            good_enough,
            muon=recipe.muon,
        )
        steps = recipe.flawed_steps
        flat = int(steps * 0.6)
        train(
            model,
            lambda: batch(recipe.mixed, rng, recipe.batch),
            steps,
            lambda step: 1e-3 * min(1.0, (steps - step) / (steps - flat)),
            show,
        )
        progress.update(100, f"done, solves {success_rate(model, judges):.0%}")
    return model, tokenizer
