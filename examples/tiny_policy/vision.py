"""Builds and warm-starts a tiny policy that sees: a Qwen2.5-VL of 0.6 M parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from tiny_policy.demonstration import Demonstration
from tiny_policy.policy import build_tokenizer, encode
from tiny_policy.progress_line import ProgressLine
from tiny_policy.recipe import Recipe

# Behind those of the text policies; the tokenizer gives them their ids.
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# Pixels of a patch's side, and patches that become one token.
PATCH, MERGED = 8, 4


class Sight(NamedTuple):
    """A conversation with its images.

    Attributes:
        ids: Token ids, with each image's placeholders.
        written: True for each token that the assistant wrote and is taught.
        pixels: [patches, values] of all its images.
        grids: [images, 3].
    """

    ids: list[int]
    written: list[bool]
    pixels: torch.Tensor
    grids: torch.Tensor


def build_processor(side: int) -> Qwen2VLImageProcessorPil:
    """Make a processor for images of about `side` times `side` pixels."""
    area = side * side
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, size={"shortest_edge": area, "longest_edge": 2 * area}
    )


def build_model(recipe: Recipe, tokenizer: Any, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    start, end, image, video = tokenizer.convert_tokens_to_ids(TOKENS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.hidden // 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": recipe.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "dtype": "float32",
        **ends,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": recipe.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "fullatt_block_indexes": [0, 1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="float32",
        **ends,
    )
    return Qwen2_5_VLForConditionalGeneration(config).float()


def see(demo: Demonstration, tokenizer: Any, processor: Any, tools: list[dict]) -> Sight:
    """Encode a conversation whose images stand in content parts, as the rollout worker does."""
    plain = encode(demo, tokenizer, tools)
    parts = [part for message in [*demo.prompt, *demo.turns] for part in _parts(message)]
    made = processor.preprocess([part["image"] for part in parts if part["type"] == "image"], return_tensors="pt")
    counts = iter((made["image_grid_thw"].prod(-1) // MERGED).tolist())
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids, written = [], []
    for each, taught in zip(plain.ids, plain.written, strict=True):
        times = next(counts) if each == token else 1
        ids += [each] * times
        written += [taught] * times
    return Sight(ids, written, made["pixel_values"], made["image_grid_thw"])


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def token_losses(model: Any, sights: Sequence[Sight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-probs [N, T] of the next tokens, and the mask [N, T] of those that are taught."""
    length = max(len(sight.ids) for sight in sights)
    ids = torch.tensor([sight.ids + [0] * (length - len(sight.ids)) for sight in sights])
    written = torch.tensor([sight.written + [False] * (length - len(sight.ids)) for sight in sights])[:, 1:]
    hidden = model.model(
        input_ids=ids,
        pixel_values=torch.cat([sight.pixels for sight in sights]),
        image_grid_thw=torch.cat([sight.grids for sight in sights]),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        use_cache=False,
    ).last_hidden_state[:, :-1]
    losses = torch.zeros(written.shape)
    losses[written] = F.cross_entropy(model.lm_head(hidden[written]), ids[:, 1:][written], reduction="none")
    return losses, written


@torch.no_grad()
def success_rate(model: Any, sights: Sequence[Sight]) -> float:
    """Return the mean probability that sampling at temperature 1 writes exactly the demonstrated turns."""
    losses, _ = token_losses(model, sights)
    return torch.exp(-losses.sum(1)).mean().item()


def warm_start(recipe: Recipe, side: int, seed: int) -> tuple[Any, Any, Any]:
    """Build a policy and train it by a recipe; return the model, its tokenizer and its image processor."""
    tokenizer, processor = build_tokenizer(recipe, seed, TOKENS), build_processor(side)
    model = build_model(recipe, tokenizer, seed)
    tools, rng = recipe.schemas, random.Random(seed)

    def batch(draw: Callable[[random.Random], Demonstration], of: random.Random, size: int) -> list[Sight]:
        return [see(draw(of), tokenizer, processor, tools) for _ in range(size)]

    judges = batch(recipe.correct, random.Random(seed + 1_000_000), 128)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def step(draw: Callable[[random.Random], Demonstration], learning_rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        losses, written = token_losses(model, batch(draw, rng, recipe.batch))
        model.zero_grad()
        (losses.sum() / written.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    with ProgressLine() as progress:
        for number in range(recipe.clean_steps):
            step(recipe.correct, 2e-3 * min(1.0, (number + 1) / 20))
            if number % 10 == 0:
                rate = success_rate(model, judges)
                done = min(max(rate / recipe.solves, number / recipe.clean_steps), 1)
                progress.update(done * 80, f"clean, solves {rate:4.0%}")
                if rate >= recipe.solves:
                    break
        for number in range(recipe.flawed_steps):
            step(recipe.mixed, 1e-3 * min(1.0, 2.5 * (1 - number / recipe.flawed_steps)))
            progress.update(80 + 20 * (number + 1) / recipe.flawed_steps, "flawed demonstrations")
        progress.update(100, f"done, solves {success_rate(model, judges):.0%}")
    return model, tokenizer, processor
