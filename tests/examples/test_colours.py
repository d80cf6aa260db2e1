"""The example whose policy sees: run files, demonstrations as the worker would see them, rewards, warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.protocol.config import RunConfig
from slipstream.protocol.config import load as load_config
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.task.row_reader import plain_columns
from slipstream.rollout_worker.task.task import load_task
from slipstream.rollout_worker.tools.base import as_content
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.vision.processor import processor_of
from tests.examples.conftest import EXAMPLES

NAME = "colours"
Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def folder(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, not trained."""
    recipe, vision = load("build_model").RECIPE, load("tiny_policy.vision")
    tokenizer = load("tiny_policy.policy").build_tokenizer(recipe, 0, vision.TOKENS)
    found = tmp_path_factory.mktemp(NAME)
    parts = (vision.build_model(recipe, tokenizer, 0), tokenizer, vision.build_processor(load("task").SIDE))
    for part in parts:
        part.save_pretrained(found)
    return found


def config(folder: Path, file: str = "run.toml") -> RunConfig:
    return load_config(EXAMPLES / NAME / file, ["--model.path", str(folder)])


@pytest.mark.parametrize("file", ["run.toml", "boxes.toml"])
def test_run_files_name_tasks_whose_rows_show_images(folder: Path, file: str) -> None:
    run = config(folder, file)
    task = load_task(run.task)
    row = task.row_for(0, 0, False)
    columns = plain_columns(row.columns, processor_of(run))
    assert columns["colour"] in ("red", "green", "blue", "yellow", "purple", "orange")


async def test_demonstrations_are_tokenised_as_the_worker_appends_them(load: Load, folder: Path) -> None:
    """The prompt, each turn as the policy would sample it, and what follows it, with images in both."""
    run = config(folder)
    images = processor_of(run)
    recipe, vision = load("build_model").RECIPE, load("tiny_policy.vision")
    chat = build_chat_format(run, recipe.schemas)
    assert ToolBox(load_task(config(folder, "boxes.toml").task).tools).schemas == recipe.schemas
    processor, rng = vision.build_processor(load("task").SIDE), random.Random(1)
    tools_seen = 0
    for _ in range(20):
        demo = recipe.mixed(rng)
        sight = vision.see(demo, chat.tokenizer, processor, recipe.schemas)
        grown = await chat.prompt_ids(plain_columns({"prompt": demo.prompt}, images)["prompt"])
        if len(demo.turns) > 1:
            tools_seen += 1
            turn = sight.ids[len(grown) : sight.ids.index(chat.tokenizer.eos_token_id, len(grown)) + 1]
            answer = {**demo.turns[1], "content": as_content(demo.turns[1]["content"], images)}
            grown += turn + (await chat.suffix_ids(grown, turn, [answer]) or [])
        assert sight.ids[: len(grown)] == grown
        last = sight.ids[len(grown) :]
        assert chat.parse(grown, last).content == demo.turns[-1]["content"]
        assert sum(sight.written) >= len(last)
    assert 0 < tools_seen < 20


def test_correct_demonstrations_earn_everything_and_mixed_ones_less(load: Load) -> None:
    task, demonstrations = load("task"), load("demonstrations")
    rng = random.Random(0)
    for _ in range(20):
        box = rng.randint(0, 999)
        colour, _picture = task.picture_of(box)
        assert task.named([[{"role": "assistant", "content": colour}]], [colour]) == [1.0]
    answers = [demonstrations._answer("red", rng, demonstrations.WRONG) for _ in range(2000)]
    share = answers.count("red") / len(answers)
    assert share == pytest.approx(1 - demonstrations.WRONG * 5 / 6, abs=0.05)


def test_the_warm_start_lowers_the_loss_of_what_is_taught(load: Load) -> None:
    vision, recipe = load("tiny_policy.vision"), load("build_model").RECIPE
    from dataclasses import replace

    short = replace(recipe, clean_steps=24, flawed_steps=0, batch=8)
    model, tokenizer, processor = vision.warm_start(short, load("task").SIDE, seed=0)
    fresh = vision.build_model(recipe, tokenizer, 0)
    rng = random.Random(5)
    sights = [vision.see(recipe.correct(rng), tokenizer, processor, recipe.schemas) for _ in range(16)]
    assert vision.token_losses(model, sights)[0].sum() < 0.6 * vision.token_losses(fresh, sights)[0].sum()
