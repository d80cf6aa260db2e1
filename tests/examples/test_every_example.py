"""What holds for every example that builds its own policy: run file, demonstrations, tokenizer, warm start."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.protocol.config import load as load_config
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.task.environment_instance import interface_of, tools_of
from slipstream.rollout_worker.task.task import load_task
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.deploy.typed import output
from tests.examples.conftest import EXAMPLES, modules_of

# One that sees, and one whose model is pretrained, have tests of their own.
OTHERS = ("colours", "pretrained")
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/build_model.py") if path.parent.name not in OTHERS)


class Opened(NamedTuple):
    """tokenizer: as the example builds it; folder: a model of the example, not trained."""

    name: str
    recipe: Any
    tokenizer: Any
    model: Any
    folder: Path


@pytest.fixture(scope="module", params=NAMES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with modules_of(request.param) as load:
        recipe = load("build_model").RECIPE
        policy = load("tiny_policy.policy")
        tokenizer, model = policy.build_tokenizer(recipe, seed=0), policy.build_model(recipe, seed=0)
        folder = tmp_path_factory.mktemp(request.param)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        yield Opened(request.param, recipe, tokenizer, model, folder)


def test_the_run_file_is_printed_whole(example: Opened) -> None:
    code, said = output("config", str(EXAMPLES / example.name / "run.toml"), "--model.path", str(example.folder))
    assert code == 0, said
    assert "[learner]" in said


def test_every_token_has_an_id_that_the_model_knows(example: Opened) -> None:
    assert len(example.tokenizer) <= example.recipe.vocabulary


def test_demonstrations_are_tokenised_as_the_worker_appends_them(example: Opened) -> None:
    """The prompt, each turn as the policy would sample it, and what follows it, by the worker's own chat format."""
    from tiny_policy.policy import encode

    config = load_config(EXAMPLES / example.name / "run.toml", ["--model.path", str(example.folder)])
    schemas = example.recipe.schemas
    assert _tools(load_task(config.task)) in (schemas, None)
    chat = build_chat_format(config, schemas)
    rng = random.Random(1)
    for _ in range(20):
        demo = example.recipe.mixed(rng)
        ids = encode(demo, example.tokenizer, schemas).ids
        appended = asyncio.run(_appended(chat, demo, ids))
        assert appended == ids


def _tools(task: Any) -> list[Any] | None:
    """The schemas of a task's tools; None where an agent names its own."""
    if task.environment is not None:
        instance = task.environment()
        return ToolBox(tools_of(interface_of(instance), instance)).schemas
    return None if task.agent is not None else ToolBox(task.tools).schemas


async def _appended(chat: Any, demo: Any, ids: list[int]) -> list[int]:
    """As an episode's segment grows, where its turns are those of the demonstration."""
    grown = await chat.prompt_ids(demo.prompt)
    turns = list(demo.turns)
    while turns:
        said = turns.pop(0)
        assert ids[: len(grown)] == grown
        turn = ids[len(grown) : ids.index(chat.tokenizer.eos_token_id, len(grown)) + 1]
        assert chat.parse(grown, turn).message().get("tool_calls") == said.get("tool_calls")
        answers = []
        while turns and turns[0]["role"] != "assistant":
            answers.append(turns.pop(0))
        grown += turn + (await chat.suffix_ids(grown, turn, answers) if answers else [])
    return grown


def test_only_what_the_policy_writes_is_taught(example: Opened) -> None:
    from tiny_policy.policy import encode

    rng = random.Random(3)
    for _ in range(50):
        demo = example.recipe.mixed(rng)
        ids, written = encode(demo, example.tokenizer, example.recipe.schemas)
        taught = [token for token, is_taught in zip(ids, written, strict=True) if is_taught]
        turns = sum(turn["role"] == "assistant" for turn in demo.turns)
        assert taught.count(example.tokenizer.eos_token_id) == turns - demo.given


def test_the_loss_over_shared_prefixes_is_that_of_whole_conversations(example: Opened) -> None:
    import torch
    from tiny_policy.policy import encode
    from tiny_policy.warm_start import token_losses

    rng = random.Random(2)
    drawn = [encode(example.recipe.mixed(rng), example.tokenizer, example.recipe.schemas) for _ in range(4)]
    losses, written = token_losses(example.model, drawn)
    for row, (ids, taught) in enumerate(drawn):
        logprobs = torch.log_softmax(example.model(input_ids=torch.tensor([ids])).logits[0, :-1], -1)
        nll = -logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0][torch.tensor(taught[1:])]
        torch.testing.assert_close(losses[row][written[row]], nll, atol=1e-5, rtol=1e-5)


def test_correct_demonstrations_earn_everything_and_flawed_ones_nothing(example: Opened) -> None:
    """By the task's own reward, and the answers of its own rows."""
    config = load_config(EXAMPLES / example.name / "run.toml", ["--model.path", str(example.folder)])
    task = load_task(config.task)
    if not task.rewards:
        pytest.skip("its environment or its agent gives the reward, and has its own test")
    answers = {row["prompt"][0]["content"]: row["answer"] for _, row in task.rows.sample(4096)}

    def rewards(draw: Any) -> list[float]:
        rng = random.Random(0)
        drawn = [demo for demo in (draw(rng) for _ in range(4000)) if demo.prompt[0]["content"] in answers][:300]
        asked = [answers[demo.prompt[0]["content"]] for demo in drawn]
        return task.rewards[0]([demo.turns for demo in drawn], answer=asked)

    assert set(rewards(example.recipe.correct)) == {1.0}
    mixed = rewards(example.recipe.mixed)
    assert set(mixed) == {0.0, 1.0}
    flawed = sys.modules["demonstrations"].FLAWED_SHARE
    deviation = (flawed * (1 - flawed) / len(mixed)) ** 0.5
    assert 1 - sum(mixed) / len(mixed) == pytest.approx(flawed, abs=4 * deviation)


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    with modules_of("multiply") as load:
        recipe, policy, warm_start = (
            load("build_model").RECIPE,
            load("tiny_policy.policy"),
            load("tiny_policy.warm_start"),
        )
        tokenizer, rng = policy.build_tokenizer(recipe, seed=0), random.Random(0)
        batch = [policy.encode(recipe.correct(rng), tokenizer, recipe.schemas) for _ in range(8)]
        changed = {}
        for muon in (False, True):
            model = policy.build_model(recipe, seed=0)
            before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            warm_start.train(model, lambda: batch, 1, lambda _: 1e-3, lambda _: False, muon=muon)
            changed[muon] = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    for name, adamws in changed[False].items():
        assert adamws.abs().max() > 0, name
        same = bool((adamws == changed[True][name]).all())
        assert same == (".layers." not in name or adamws.ndim == 1), name


def test_without_a_terminal_a_warm_start_says_in_lines_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with modules_of("multiply") as load:
        module = load("tiny_policy.progress_line")
        now = [0.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        with module.ProgressLine() as told:
            for percent in range(0, 101, 5):
                now[0] += 4.0
                told.update(percent, "clean")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warm start: 10 %, clean, 12 s"
    assert lines[-1] == "warm start: 100 %, clean, 84 s"
    assert len(lines) == 7
    with module.ProgressLine() as told:
        for percent in (40, 25, 60):
            now[0] += 20.0
            told.update(percent, "clean")
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["40", "40", "60"]
