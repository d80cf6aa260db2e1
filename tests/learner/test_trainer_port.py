"""The loop needs nothing of a trainer but the port: a bigram policy trains, is saved and resumes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest
import torch
from rich.console import Console

from slipstream.learner import loop
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.start import starting_point
from slipstream.protocol import checkpoints as places
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.weight_sync.publisher import Publisher
from tests.kit.learner import FakeQueue, endless
from tests.kit.linear_trainer import LinearTrainer
from tests.kit.messages import VOCABULARY, group
from tests.learner.test_loop import FakePublisher, config_for, lines


def train(config: RunConfig, queue: FakeQueue, resume: bool = False) -> tuple[LinearTrainer, FakePublisher]:
    publisher, checkpoint = FakePublisher(queue), starting_point(config, resume)
    trainer = LinearTrainer(VOCABULARY, None if checkpoint is None else checkpoint.model_path)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trainer)
    progress = TerminalProgress(config.learner.steps, console=Console(file=io.StringIO()))
    with BlockingQueueClient(cast(QueueClient, queue)) as client, Stop(20.0) as stop:
        published = cast(Publisher, publisher)
        loop.train(config, trainer, client, published, progress, stop, checkpoint, resume)
    return trainer, publisher


def rewarded(trainer: LinearTrainer) -> float:
    """How much likelier the rewarded rollout of a group is than the other one."""
    bad, good = (rollout.segments[0].token_ids.tolist() for rollout in group().rollouts)
    return float(trainer.score(good)[1:].sum() - trainer.score(bad)[1:].sum())


def test_a_bigram_policy_learns_and_every_version_is_published(model_path: Path, tmp_path: Path) -> None:
    trainer, publisher = train(config_for(model_path, tmp_path), FakeQueue(endless()))
    assert rewarded(trainer) > 0.5
    assert len(publisher.weights) == 5
    assert torch.equal(publisher.weights[-1]["weight"], trainer.weight)
    assert publisher.probes[-1].logprobs.tolist() == trainer.score(publisher.probes[-1].token_ids).tolist()
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4]
    assert list(places.complete(tmp_path / "test")) == [2, 4]


def test_it_resumes_at_its_checkpoint_with_the_bits_of_a_run_that_never_ended(model_path: Path, tmp_path: Path) -> None:
    whole, _ = train(config_for(model_path, tmp_path / "whole"), FakeQueue(endless()))
    half, _ = train(config_for(model_path, tmp_path / "half", steps=2), FakeQueue(endless()))
    assert not torch.equal(half.weight, whole.weight)
    queue = FakeQueue(endless(), version=2)
    resumed, _ = train(config_for(model_path, tmp_path / "half"), queue, resume=True)
    assert (queue.begun[-1].step, queue.begun[-1].version) == (2, 2)
    assert torch.equal(resumed.weight, whole.weight)


def test_a_batch_that_it_cannot_train_is_left_out(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0
    step = LinearTrainer.step

    def second_fails(self: LinearTrainer, *given: object) -> object:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            raise torch.OutOfMemoryError("no room for 2 GiB")
        return step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LinearTrainer, "step", second_fails)
    queue = FakeQueue(endless())
    train(config_for(model_path, tmp_path), queue)
    assert set(queue.dropped.values()) == {"out_of_memory"}
    assert len(lines(tmp_path / "test" / "metrics.jsonl")) == 4
