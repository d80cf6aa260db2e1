"""Build and warm-start the tiny policy of this example: `python build_model.py --out FOLDER [--seed N]`.

A two-layer Qwen3 of 0.4 M parameters learns the format from correct conversations until it would solve 90 % of
the prompts, then a mix with flawed ones gives it bad habits (no tool, wrong arguments, malformed calls,
misquotes), which leave it at about 40 %. RL has to remove them. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from demonstrations import Demonstration, correct, mixed  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from task import multiply  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import get_json_schema  # noqa: E402

VOCABULARY = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
TOOLS = [get_json_schema(multiply)]
BATCH = 64
MAX_CLEAN_STEPS = 600
FLAWED_STEPS = 50


class Example(NamedTuple):
    """Token ids of a whole conversation, and which of them the assistant wrote."""

    ids: list[int]
    written: list[bool]


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose digits stay single, with a Qwen-like chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    rng = random.Random(seed)
    corpus = [
        plain.apply_chat_template([*demo.prompt, *demo.turns], tools=TOOLS, tokenize=False)
        for demo in (mixed(rng) for _ in range(200))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL + TAGS,
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


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_theta=1e4,
        initializer_range=0.02,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(demo: Demonstration, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Piece by piece, as the rollout worker appends it: prompt, then each turn and what follows it."""
    ids: list[int] = []
    written: list[bool] = []
    text = ""
    for count in range(len(demo.turns) + 1):
        generates = count < len(demo.turns) and demo.turns[count]["role"] == "assistant"
        whole = tokenizer.apply_chat_template(
            [*demo.prompt, *demo.turns[:count]], tools=TOOLS, tokenize=False, add_generation_prompt=generates
        )
        by_assistant = count > 0 and demo.turns[count - 1]["role"] == "assistant"
        piece = whole[len(text) :]
        if by_assistant:
            piece = piece.removesuffix("\n")
        text += piece
        piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += piece_ids
        written += [by_assistant] * len(piece_ids)
    return Example(ids, written)


def token_losses(model: Qwen3ForCausalLM, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-probs [N, T] of the next tokens and the mask of those that the assistant wrote.

    The tools' description opens every conversation and is most of it, so it runs through the model once, and
    the conversations go on from its keys and values.
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
    """Probability that sampling at temperature 1 writes exactly the demonstrated turns, in the mean."""
    losses, _ = token_losses(model, examples)
    return torch.exp(-losses.sum(1)).mean().item()


def train(
    model: Qwen3ForCausalLM,
    draw: Callable[[], Example],
    steps: int,
    learning_rate: Callable[[int], float],
    after_step: Callable[[int], bool],
) -> None:
    """AdamW on the assistant's tokens; ends after `steps`, or earlier when `after_step` returns true."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step)
        losses, written = token_losses(model, [draw() for _ in range(BATCH)])
        loss = losses.sum() / written.sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if after_step(step):
            return


def warm_start(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer(seed)
    model = build_model(seed)
    rng = random.Random(seed)
    held_out = random.Random(seed + 1_000_000)
    judges = [encode(correct(held_out), tokenizer) for _ in range(128)]
    columns = (TextColumn("warm start"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("clean demonstrations", total=100)

        def good_enough(step: int) -> bool:
            if step % 10:
                return False
            rate = success_rate(model, judges)
            progress.update(bar, completed=min(rate / 0.9, 1) * 80, description=f"clean, solves {rate:4.0%}")
            return rate >= 0.9

        def show(step: int) -> bool:
            progress.update(bar, completed=80 + 20 * (step + 1) / FLAWED_STEPS, description="flawed demonstrations")
            return False

        train(
            model,
            lambda: encode(correct(rng), tokenizer),
            MAX_CLEAN_STEPS,
            lambda step: 2e-3 * min(1.0, (step + 1) / 20),
            good_enough,
        )
        flat = int(FLAWED_STEPS * 0.6)
        train(
            model,
            lambda: encode(mixed(rng), tokenizer),
            FLAWED_STEPS,
            lambda step: 1e-3 * min(1.0, (FLAWED_STEPS - step) / (FLAWED_STEPS - flat)),
            show,
        )
        progress.update(bar, description=f"done, solves {success_rate(model, judges):.0%}")
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.out / "config.json").is_file():
        print(f"{arguments.out}: already built")
        return
    model, tokenizer = warm_start(arguments.seed)
    unfinished = arguments.out.with_name(arguments.out.name + f".tmp{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, arguments.out)
    print(f"{arguments.out}: built with seed {arguments.seed}")


if __name__ == "__main__":
    main()
