"""TRL's `rollout_func`: the script's own loop is played in the workers, and what it samples is what trains."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.trl import GRPOConfig, GRPOTrainer
from slipstream.trl.experimental.openenv import generate_rollout_completions
from tests import kit
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

ROWS = [{"prompt": [{"role": "user", "content": "Say a word."}], "answer": "words"}]
REPLIES = scripted(TOKENIZER, lambda text, index: "more" if "Again." in text else "words")
CONFIG = kit.config(kit.WORKER, rollout={"max_episode_tokens": 400}, vllm={"max_model_len": 1000})
AGAIN = "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """As scripts with an environment of their own write it: what comes back is put after the answer."""
    assert len(prompts) * trainer.num_generations == 1
    made: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won")}
    for prompt in prompts:
        (first,) = generate_rollout_completions(trainer, [prompt])
        said = trainer.processing_class.encode(AGAIN, add_special_tokens=False)
        before = [*first["prompt_ids"], *first["completion_ids"], *said]
        _, ids, logprobs, _ = trainer.vllm_generation.generate([before], None, 1)
        made["prompt_ids"].append(first["prompt_ids"])
        made["completion_ids"].append([*first["completion_ids"], *said, *ids[0]])
        made["logprobs"].append([*first["logprobs"], *[0.0] * len(said), *[one[0] for one in logprobs[0]]])
        made["env_mask"].append([1] * len(first["completion_ids"]) + [0] * len(said) + [1] * len(ids[0]))
        made["won"].append(0.5)
    return made


seen: list[dict[str, Any]] = []


def reward(prompts: Any, completions: Any, won: Any, answer: Any, **_: Any) -> list[float]:
    seen.append({"prompts": prompts, "completions": completions, "answer": answer})
    return list(won)


async def awaited(completion_ids: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def trainer_of(model_folder: Path, function: Any, **changes: Any) -> GRPOTrainer:
    given = {
        "reward_funcs": [reward, awaited],
        "args": GRPOConfig("out", max_steps=1),
        "train_dataset": ROWS,
        **changes,
    }
    return GRPOTrainer(str(model_folder), rollout_func=function, processing_class=Tokenizer(), **given)


class Tokenizer:
    """The tests' tokenizer, with a name."""

    name_or_path = "org/tokenizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


async def test_i4_what_it_samples_trains_and_what_it_returns_is_for_the_rewards(model_folder: Path) -> None:
    seen.clear()
    task = trainer_of(model_folder, two_turns).task
    run = await roll(task, fake(REPLIES), config=CONFIG)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        assert TOKENIZER.decode(segment.token_ids).endswith(f"words<|im_end|>{AGAIN}more<|im_end|>")
        assert TOKENIZER.decode(segment.token_ids[segment.loss_mask]) == "words<|im_end|>more<|im_end|>"
        assert (rollout.turns, rollout.finish_reason) == (2, "stop")
        length = len(segment.token_ids) - segment.loss_mask.tolist().index(True)
        assert rollout.reward_components == {"reward": 0.5, "awaited": float(length)}
    (called,) = seen
    assert called["prompts"][0] == ROWS[0]["prompt"]
    assert called["answer"] == ["words", "words"]
    ((message,), _) = called["completions"]
    assert (message["role"], message["content"].startswith("words")) == ("assistant", True)


async def test_an_answer_that_is_not_in_what_it_returns_is_told_once(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def best_of_two(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        (lost,) = generate_rollout_completions(trainer, prompts, generation_overrides={"max_completion_length": 1})
        return {"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]], "won": [lost["logprobs"][0]]}

    with caplog.at_level(logging.WARNING):
        run = await roll(trainer_of(model_folder, best_of_two, reward_funcs=reward).task, fake(REPLIES), config=CONFIG)
    assert run.queue.failures == {}
    assert caplog.text.count("that is not in the completion_ids it returned") == 1


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ({"prompt_ids": [[1]], "completion_ids": [[2]]}, r"must return keys \['logprobs'\] in its output dict"),
        (None, "must return keys"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[2]] * 8, "logprobs": [[0.0]] * 8},
            "8 completions for 1 prompt",
        ),
    ],
    ids=str,
)
async def test_what_it_returns_wrongly_is_said(model_folder: Path, output: Any, says: str) -> None:
    def wrong(prompts: list[Any], trainer: Any) -> Any:
        generate_rollout_completions(trainer, prompts)
        return output

    run = await roll(trainer_of(model_folder, wrong).task, fake(REPLIES), config=CONFIG)
    (failures,) = run.queue.failures.values()
    assert re.search(says, str(failures)), failures


def test_it_has_no_tools_and_no_environment_beside_it(model_folder: Path) -> None:
    def tool(a: int) -> int:
        """Return it.

        Args:
            a: A number.
        """
        return a

    with pytest.raises(ConfigError, match=r"rollout_func=\.\.\., tools=\.\.\.\): a rollout_func runs its own loop"):
        trainer_of(model_folder, two_turns, tools=[tool])
