"""A checkpoint is whole or not there, whenever its writer is killed, and a full disk costs nothing but the attempt."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointError, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.model.policy import Policy
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import LearnerSection, ModelSection

# What a save asks of the operating system through Python; libraries of C and Rust write between two of them.
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
TOUCHES = (*CHANGES, "open", "shutil.copyfile", "shutil.rmtree", "fsync")
KILLED = 9


@pytest.fixture
def trainer(make_policy: Callable[..., Policy]) -> PolicyTrainer:
    return PolicyTrainer(make_policy(), LearnerSection(), 64)


def save(folder: Path, trainer: PolicyTrainer, model_path: Path, step: int, keep: int = 1, **more: Any) -> None:
    sources = Sources(ModelSection(path=str(model_path)))
    checkpoint.save(folder, CheckpointInfo(step, step), trainer, sources, keep, **more)


def killed_at(touch: int, touches: Sequence[str], work: Callable[[], None]) -> bool:
    """Do `work` in a process that ends on the spot when it touches the disk for this time; false where it came to its
    end before."""
    child = os.fork()
    if not child:
        count, fsync = 0, os.fsync

        def touched(event: str) -> None:
            nonlocal count
            count += event in touches
            if event in touches and count == touch:
                os._exit(KILLED)

        def flushed(descriptor: Any) -> None:
            touched("fsync")
            fsync(descriptor)

        os.fsync = flushed
        sys.addaudithook(lambda event, _: touched(event))
        try:
            work()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def check_whole(folder: Path, steps: tuple[int, ...]) -> None:
    """The newest is one of `steps`, and can be loaded, by transformers too."""
    found = checkpoint.latest(folder)
    assert found is not None
    assert found.info.step in steps
    assert set(torch.load(found.path / "trainer.pt", weights_only=True)) == {"optim", "optimiser", "schedule", "random"}
    AutoModelForCausalLM.from_pretrained(found.model_path)


@pytest.mark.parametrize(
    ("again", "touches", "fewest"),
    [(False, TOUCHES, 40), (True, CHANGES, 10)],
    ids=["a new step", "a step that is there from another time line"],
)
def test_killed_at_any_moment_it_leaves_a_whole_one_or_the_one_before(
    trainer: PolicyTrainer, model_path: Path, tmp_path: Path, again: bool, touches: Sequence[str], fewest: int
) -> None:
    touch = kills = 0
    while True:
        touch += 1
        folder = tmp_path / str(touch)
        save(folder, trainer, model_path, 1, keep=2)
        if again:
            save(folder, trainer, model_path, 2, keep=2)
        if not killed_at(touch, touches, partial(save, folder, trainer, model_path, 2)):
            break
        kills += 1
        check_whole(folder, (1, 2))
        save(folder, trainer, model_path, 3)
        assert [path.name for path in places.folder(folder).iterdir()] == ["step-000003"], "something is left behind"
    check_whole(folder, (2,))
    assert kills >= fewest, "the moments are not those of a save"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond so many bytes fails, as on a full disk, wherever the write comes from."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 20_000, 80_000])
def test_a_full_disk_is_told_and_gets_back_what_the_attempt_took(
    trainer: PolicyTrainer, model_path: Path, tmp_path: Path, size: int
) -> None:
    save(tmp_path, trainer, model_path, 1)
    with files_of_at_most(size), pytest.raises(CheckpointError, match=r"step-000002 cannot be written: "):
        save(tmp_path, trainer, model_path, 2)
    assert [path.name for path in places.folder(tmp_path).iterdir()] == ["step-000001"]
    check_whole(tmp_path, (1,))


def test_the_best_stays_however_old_it_is(trainer: PolicyTrainer, model_path: Path, tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save(tmp_path, trainer, model_path, step, keep=2, spared={999_998})
    assert list(places.complete(tmp_path)) == [999_998, 1_000_000, 1_000_001]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.info.step == 1_000_001
    checkpoint.prune(tmp_path, 1)
    assert list(places.complete(tmp_path)) == [1_000_001]
