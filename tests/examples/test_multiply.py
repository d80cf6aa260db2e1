"""The multiply example: its task, and the demonstrations that its warm start learns from."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from protocol.config import load
from rollout_worker.task.task import load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "multiply"


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    """`build_model.py`, with the modules beside it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import build_model

        yield build_model
    finally:
        sys.path.remove(str(EXAMPLE))


def test_the_run_file_names_a_task_that_loads() -> None:
    (EXAMPLE / "models").mkdir(exist_ok=True)
    config = load(EXAMPLE / "run.toml", ["--model.path", "no/model"])
    task = load_task(config.task)
    assert len(task.dataset) == 4096
    assert task.tools[0](12, 12) == 144


def test_the_reward_wants_the_product_and_nothing_else() -> None:
    from examples.multiply.task import accuracy

    said = ["144", " 144", "144.", "143", ""]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    assert accuracy(completions, answer=[144] * len(said)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_flawed_demonstrations_earn_nothing_and_correct_ones_all(build: ModuleType) -> None:
    import demonstrations
    from task import accuracy

    rng = random.Random(0)
    rewards: Counter[float] = Counter()
    for _ in range(500):
        demo = demonstrations.mixed(rng)
        a, b = (int(word.strip(".")) for word in demo.prompt[0]["content"].split() if word.strip(".").isdigit())
        rewards[accuracy([demo.turns], answer=[a * b])[0]] += 1
    assert rewards[0.0] / 500 == pytest.approx(demonstrations.FLAWED_SHARE, abs=0.07)


def test_f18_demonstrations_are_tokenised_as_the_worker_appends_them(build: ModuleType) -> None:
    tokenizer = build.build_tokenizer(seed=0)
    rng = random.Random(1)
    for _ in range(50):
        demo = build.mixed(rng)
        whole = tokenizer.apply_chat_template([*demo.prompt, *demo.turns], tools=build.TOOLS, tokenize=False)
        ids = tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
        example = build.encode(demo, tokenizer)
        assert example.ids == ids
        written = [i for i, by_assistant in zip(example.ids, example.written, strict=True) if by_assistant]
        assert written.count(tokenizer.eos_token_id) == sum(turn["role"] == "assistant" for turn in demo.turns)


def test_the_loss_over_shared_prefixes_is_that_of_whole_conversations(build: ModuleType) -> None:
    import torch

    tokenizer, model = build.build_tokenizer(seed=0), build.build_model(seed=0)
    rng = random.Random(2)
    examples = [build.encode(build.mixed(rng), tokenizer) for _ in range(4)]
    losses, written = build.token_losses(model, examples)
    for row, example in enumerate(examples):
        ids = torch.tensor([example.ids])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        nll = -logprobs.gather(1, ids[0, 1:, None])[:, 0][torch.tensor(example.written[1:])]
        torch.testing.assert_close(losses[row][written[row]], nll, atol=1e-5, rtol=1e-5)
