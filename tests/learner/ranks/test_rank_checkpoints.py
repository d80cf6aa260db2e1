"""What several ranks leave behind is what one would, whether each holds all weights or a part; a model's tied output
layer included."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from slipstream.learner import loop
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.ranks import liveness
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.ranks.team import Team
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.run import build_trainer
from slipstream.learner.start import starting_point
from slipstream.learner.training import state_files
from slipstream.learner.training.trainer import STATE, PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.weight_sync.publisher import Publisher
from tests.kit import LEARNER, config
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.learner import FakeQueue, endless
from tests.kit.model import tiny_model
from tests.kit.ranks import Ranks
from tests.learner.test_loop import FakePublisher

# A reference that moves is a part of checkpoints.
LEARNS: dict[str, Any] = {
    "steps": 4,
    "checkpoint_every": 2,
    "learning_rate": 1e-3,
    "kl_coef": 0.1,
    "reference_sync_steps": 1,
    "clip_low": 0.99,
    "clip_high": 100.0,
    "delta": "none",
}


STOPS = [(False, signal.SIGTERM), (True, signal.SIGINT)]


def run_file(folder: Path, name: str, **learner: Any) -> RunConfig:
    path = folder / "model"
    if not path.exists():
        tiny_model(tie_word_embeddings=True).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    run = {"dir": str(folder), "name": name}
    return config(LEARNER, model={"path": str(path)}, run=run, learner={**LEARNS, **learner})


def hang_and_stop(number: signal.Signals) -> None:
    """The other ranks stand still, and a signal comes when the main thread waits for them in a collective. With less
    patience after it: that they have it is `test_rank_alarm`'s."""
    liveness.SIGNAL_GRACE_S = 4.0
    for child in psutil.Process().children():
        child.suspend()
    threading.Timer(2.0, lambda: os.kill(os.getpid(), number)).start()


def train(
    trainer: PolicyTrainer,
    config: RunConfig,
    resume: bool = False,
    stop_in: int | None = None,
    hangs: bool = False,
    number: signal.Signals = signal.SIGTERM,
) -> dict[str, Any]:
    """The loop with a queue in memory; stop_in: a signal comes while this step computes; hangs: and the other ranks
    stand still. What the publisher was given, by version, what the queue was told of checkpoints, and the exit code."""
    queue = FakeQueue(endless(), version=0)
    publisher = FakePublisher(queue)
    progress = TerminalProgress(config.learner.steps, console=Console(file=io.StringIO()))
    checkpoint = starting_point(config, resume)
    steps = [checkpoint.info.step if checkpoint else 0]
    scheduled = trainer.accelerator.backward

    def backward(loss: torch.Tensor) -> None:
        scheduled(loss)
        if stop_in == steps[0] + 1:
            trainer.accelerator.backward = scheduled
            hang_and_stop(number) if hangs else os.kill(os.getpid(), number)

    trainer.accelerator.backward = backward
    trainer.optimiser.optimizer.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    code = 0
    try:
        with BlockingQueueClient(cast(QueueClient, queue)) as client, Stop(100.0) as stop:
            loop.train(config, trainer, client, cast(Publisher, publisher), progress, stop, checkpoint, resume)
    except SystemExit as stopped:
        code = int(str(stopped.code))
    told = [entry[1] for entry in queue.log if entry[0] == "checkpointed"]
    return {"weights": publisher.weights, "checkpointed": told, "code": code}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    settings = run_file(folder, "alone")
    return settings, train(build_trainer(settings, None), settings)


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "sharded"])
def several(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[RunConfig, dict[str, Any]]]:
    settings = run_file(folder, f"several-{request.param}", ranks=2, shard_weights=request.param)
    with Ranks(settings) as ranks:
        yield settings, ranks.call(train, settings)


def close(found: Any, right: Any, where: str = "") -> None:
    """The same but for rounding, which Adam's first steps make larger."""
    if isinstance(right, torch.Tensor):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5, msg=lambda said: f"{where}: {said}")
    elif isinstance(right, dict):
        assert list(found) == list(right), where
        for name in right:
            close(found[name], right[name], f"{where} {name}")
    elif isinstance(right, list | tuple):
        assert len(found) == len(right), where
        for place, pair in enumerate(zip(found, right, strict=True)):
            close(*pair, f"{where} {place}")
    else:
        assert found == right, where


def whole_state(checkpoint: checkpoints.Checkpoint) -> dict[str, Any]:
    """What trainers keep, without random states, as one rank reads it."""
    kept = torch.load(checkpoint.path / "trainer.pt", weights_only=True)
    state = {name: kept[name] for name in STATE}
    parts = checkpoint.path / checkpoints.PARTS
    assert parts.is_dir() == ("parts" in kept)
    found: dict[str, Any] = state_files.read_back(
        state, parts if "parts" in kept else None, Team(), None, torch.device("cpu")
    )
    return found


def test_what_is_published_is_what_one_rank_publishes(several: Any, alone: Any) -> None:
    (_, found), (_, right) = several, alone
    assert len(found["weights"]) == 5
    close(found["weights"], right["weights"])


def test_checkpoints_are_those_of_one_rank(several: Any, alone: Any) -> None:
    (settings, found), (one, right) = several, alone
    assert found["checkpointed"] == right["checkpointed"] == [2, 4]
    ours, theirs = checkpoints.latest(settings.run_dir), checkpoints.latest(one.run_dir)
    assert ours is not None
    assert theirs is not None
    states = [whole_state(of) for of in (ours, theirs)]
    close(*states)
    weights = [AutoModelForCausalLM.from_pretrained(of.model_path).state_dict() for of in (ours, theirs)]
    close(dict(weights[0]), dict(weights[1]))
    assert not list(places.folder(settings.run_dir).glob(".*")), "nothing is left unfinished"


@pytest.mark.parametrize(("shard", "number"), STOPS, ids=["whole", "sharded"])
def test_ranks_go_on_after_a_signal_where_one_rank_stood_and_the_other_way_round(
    folder: Path, shard: bool, number: signal.Signals, alone: Any
) -> None:
    """One rank makes two steps, two ranks continue and are stopped in step 4, one rank makes it."""
    first = run_file(folder, f"mixed-{shard}", steps=2)
    train(build_trainer(first, None), first)
    settings = run_file(folder, first.run.name, ranks=2, shard_weights=shard)
    with Ranks(settings, resume=True) as ranks:
        stopped = ranks.call(train, settings, True, 4, False, number)
    assert stopped["code"] == 128 + number
    # Parts of the weights are not left half-way through a step: it is ended first.
    assert stopped["checkpointed"] == ([4] if shard else [3])
    last = run_file(folder, first.run.name)
    train(build_trainer(last, starting_point(last, True)), last, True)
    ours, (one, _) = checkpoints.latest(last.run_dir), alone
    theirs = checkpoints.latest(one.run_dir)
    assert ours is not None
    assert theirs is not None
    assert ours.info.step == theirs.info.step == 4
    weights = [AutoModelForCausalLM.from_pretrained(of.model_path).state_dict() for of in (ours, theirs)]
    close(dict(weights[0]), dict(weights[1]))


@pytest.mark.parametrize(("shard", "number"), STOPS, ids=["whole", "sharded"])
def test_a_signal_ends_the_run_though_a_rank_hangs_and_what_one_rank_holds_is_written(
    folder: Path, shard: bool, number: signal.Signals
) -> None:
    settings = run_file(folder, f"hangs-{shard}", ranks=2, shard_weights=shard)
    with Ranks(settings) as ranks:
        stopped = ranks.call(train, settings, False, 4, True, number)
    assert stopped["code"] == 128 + number
    assert stopped["checkpointed"] == ([2] if shard else [2, 3])
