"""Ranks of which one runs out of memory in a step: the run ends, and the batch is not met again."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from rich.console import Console

from slipstream.learner import loop
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.packing import RankRows
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.skipping import FILE_NAME, OutOfMemory
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.weight_sync.publisher import Publisher
from tests.kit.learner import FakeQueue, endless
from tests.kit.ranks import Ranks
from tests.learner.ranks.test_rank_checkpoints import run_file
from tests.learner.test_loop import FakePublisher


def run_out_at(step: int, here: int, rank: int) -> None:
    """In the process of rank `here` the memory does not hold that step."""
    if rank != here:
        return
    count, forward = 0, PolicyTrainer._step

    def failing(self: PolicyTrainer, share: RankRows) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(self, share)

    PolicyTrainer._step = failing  # type: ignore[method-assign]


def train(trainer: PolicyTrainer, config: RunConfig) -> tuple[str | None, list[str], dict[str, str]]:
    """Train, and return what ended the run, the groups that were trained, and those that were dropped."""
    queue = FakeQueue(endless())
    publisher = FakePublisher(queue)
    progress = TerminalProgress(config.learner.steps, console=Console(file=io.StringIO()))
    said = None
    try:
        with BlockingQueueClient(cast(QueueClient, queue)) as client, Stop(20.0) as stop:
            loop.train(config, trainer, client, cast(Publisher, publisher), progress, stop)
    except OutOfMemory as error:
        said = str(error)
    return said, queue.trained, queue.dropped


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("most", [3, 0])
def test_a_rank_that_runs_out_of_memory_ends_the_run_and_leaves_the_batch_out(
    tmp_path: Path, rank: int, most: int
) -> None:
    here = run_file(tmp_path, "test", ranks=2, skip_bad_batches=most)
    with Ranks(here, first=partial(run_out_at, 3, rank)) as ranks:
        said, trained, dropped = ranks.call(train, here)
    assert said is not None
    assert said.startswith("step 3: the device's memory does not hold the step, whose largest row has")
    assert f"({'rank 1: ' if rank else ''}CUDA out of memory. Tried to allocate 2.00 GiB.): lower" in said
    assert "--resume" in said
    assert trained == ["t0", "t1", "t2", "t3"]
    assert dropped == (dict.fromkeys(["t4", "t5"], "out_of_memory") if most else {})
    if most:
        (line,) = (here.run_dir / FILE_NAME).read_bytes().splitlines()
        assert msgspec.json.decode(line)["groups"] == ["t4", "t5"]
