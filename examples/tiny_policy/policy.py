"""Builds an untrained policy: a tokenizer from an example's own demonstrations, and a small Qwen3."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_policy.demonstration import Demonstration
from tiny_policy.recipe import Recipe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


class Example(NamedTuple):
    """Holds the tokens of a whole conversation.

    Attributes:
        ids: Token ids.
        written: True for each token that the assistant wrote and is taught.
    """

    ids: list[int]
    written: list[bool]


def build_tokenizer(recipe: Recipe, seed: int, further: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single digits and a Qwen-like chat template.

    Args:
        further: Special tokens besides.
    """
    tokenizer = Tokenizer(models.BPE())
    # The regex takes the first match, so the longest come first.
    whole = [*sorted(map(re.escape, recipe.whole or ()), key=len, reverse=True), r"\d"]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(whole)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.whole is None),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = TEMPLATE.read_text(encoding="utf-8")
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    rng = random.Random(seed)
    tools = recipe.schemas
    corpus = [
        plain.apply_chat_template([*demo.prompt, *demo.turns], tools=demo.tools or tools, tokenize=False)
        for demo in (recipe.mixed(rng) for _ in range(200))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[*SPECIAL, *TAGS, *further],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def build_model(recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=recipe.context,
        rope_theta=1e4,
        initializer_range=0.02,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(demo: Demonstration, tokenizer: PreTrainedTokenizerFast, tools: list[dict]) -> Example:
    """Encode a conversation piece by piece, as the rollout worker does: the prompt, then each turn and its answers."""
    text = tokenizer.apply_chat_template([*demo.prompt, *demo.turns], tools=demo.tools or tools, tokenize=False)
    # A turn runs from after its opening to its end token, and is every second piece.
    pieces = _TURN.split(text.removesuffix("\n"))
    ids: list[int] = []
    written: list[bool] = []
    for place, piece_ids in enumerate(tokenizer(pieces, add_special_tokens=False)["input_ids"]):
        ids += piece_ids
        written += [place % 2 == 1 and place // 2 >= demo.given] * len(piece_ids)
    return Example(ids, written)
