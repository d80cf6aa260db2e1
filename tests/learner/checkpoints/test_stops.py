"""Signals at every moment of a run: what is on the disk afterwards, what was said, and where a resume begins."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.ranks import stopping
from slipstream.learner.run import run
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.client import Unreachable
from tests.kit.learner import FakeQueue
from tests.learner.test_loop import FakePublisher, config_for, in_place, milestones, signal_in_step, train

__all__ = ["in_place"]

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
RESUME = "slipstream up my.toml --resume"


class Moment(NamedTuple):
    """The `nth` call of `owner.name`, at which the signal comes.

    Attributes:
        kept: Steps whose checkpoints are on the disk afterwards.
        said: Part of what was said, and the last line.
    """

    owner: object
    name: str
    nth: int
    kept: list[int]
    said: tuple[str, str]


def writing(step: int) -> tuple[str, str]:
    return f"stopped after step {step}; writing a checkpoint of it: ", f"continue from step {step} with: {RESUME}"


MOMENTS = {
    "the model is loading": Moment(
        "slipstream.learner.run",
        "load_policy",
        1,
        [],
        ("stopped before it began", "start it again with: slipstream up my.toml"),
    ),
    "the first version is published": Moment(
        FakePublisher,
        "publish",
        1,
        [],
        ("stopped before the first step: there is nothing to save", "start it again with: slipstream up my.toml"),
    ),
    "groups are waited for": Moment(FakeQueue, "lease", 1, [], ("stopped before the first step", "start it again")),
    "a step is computed": Moment(PolicyTrainer, "step", 4, [2, 3], writing(3)),
    "weights change": Moment(torch.optim.AdamW, "step", 3, [2, 3], writing(3)),
    "a step is acknowledged": Moment(FakeQueue, "ack", 1, [1], writing(1)),
    "a version is published": Moment(FakePublisher, "publish", 4, [2, 3], writing(3)),
    "a checkpoint is written": Moment(
        checkpoint,
        "_flush",
        1,
        [2],
        ("stopped after step 2, which has its checkpoint", f"continue from step 2 with: {RESUME}"),
    ),
    "the last checkpoint is written": Moment(
        checkpoint,
        "_flush",
        2,
        [2, 4],
        ("stopped after step 4, which has its checkpoint", f"all steps are done; end the run with: {RESUME}"),
    ),
}


def at(monkeypatch: pytest.MonkeyPatch, moment: Moment, number: signal.Signals) -> list[None]:
    """Send the signal at a moment. Returns a list that grows with each call."""
    calls: list[None] = []
    owner = __import__(moment.owner, fromlist=["_"]) if isinstance(moment.owner, str) else moment.owner
    real: Callable[..., Any] = getattr(owner, moment.name)

    def called(*arguments: Any, **words: Any) -> Any:
        calls.append(None)
        if len(calls) == moment.nth:
            os.kill(os.getpid(), number)
        return real(*arguments, **words)

    monkeypatch.setattr(owner, moment.name, called)
    return calls


@pytest.mark.parametrize("number", [INT, TERM, HUP], ids=["int", "term", "hup"])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=list(MOMENTS))
def test_a_signal_at_any_moment_keeps_all_steps_that_are_made(
    in_place: FakeQueue,
    model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    moment: Moment,
    number: signal.Signals,
) -> None:
    settings = config_for(model_path, tmp_path, checkpoint_every=2)
    with pytest.MonkeyPatch.context() as patch:
        calls = at(patch, moment, number)
        with pytest.raises(SystemExit) as leaving:
            run(settings)
    assert leaving.value.code == 128 + number
    assert list(places.complete(settings.run_dir)) == moment.kept
    if moment.name == "_flush":
        assert len(calls) == moment.nth, "it was begun again"
    told = " ".join(capsys.readouterr().out.split())
    assert moment.said[0] in told
    assert moment.said[1] in told
    newest = max(moment.kept, default=0)
    assert [of[1] for of in milestones(in_place) if of[0] == "checkpointed"][-1:] == moment.kept[-1:]
    assert in_place.now.step == newest
    train(settings, in_place, resume=True)
    assert in_place.begun[-1].step == newest
    assert list(places.complete(settings.run_dir)) == [newest if newest == 3 else 2, 4]


@pytest.mark.parametrize("number", [INT, TERM])
def test_an_abandoned_step_gives_its_groups_back_before_the_checkpoint(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    signal_in_step(monkeypatch, 4, number)
    with pytest.raises(SystemExit):
        run(config_for(model_path, tmp_path, checkpoint_every=2))
    assert milestones(in_place)[-4:] == [("publish", 3), ("release", "1-4"), ("checkpointed", 3), "closed"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_queue_that_is_away_costs_only_a_step_that_it_was_to_acknowledge(
    in_place: FakeQueue,
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """A checkpoint of it would hold a version that the queue does not know."""
    monkeypatch.setattr("slipstream.learner.ranks.stopping.HOLD_AT_MAX_S", 0.05)
    ack = in_place.ack

    async def never(lease_id: str, told: Any) -> Any:
        if told.step == 3:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        return await ack(lease_id, told)

    in_place.ack = never  # type: ignore[method-assign]
    settings = config_for(model_path, tmp_path, checkpoint_every=2)
    with pytest.raises(SystemExit):
        run(settings)
    assert list(places.complete(settings.run_dir)) == [2]
    told = capsys.readouterr()
    assert "stopped after step 2; there is no checkpoint of step 3, since the queue does not answer" in told.out
    assert told.out.splitlines()[-1] == f"continue from step 2 with: {RESUME}"
    assert "destroyed" not in told.err


def test_a_queue_that_is_away_does_not_keep_a_checkpoint_from_being_written(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> Any:
        raise Unreachable("no answer")

    signal_in_step(monkeypatch, 4, INT)
    in_place.position = in_place.checkpointed = away  # type: ignore[method-assign]
    settings = config_for(model_path, tmp_path, checkpoint_every=0)
    with pytest.raises(SystemExit):
        run(settings)
    assert list(places.complete(settings.run_dir)) == [3]


@pytest.mark.parametrize(
    ("number", "took_s", "kept"), [(INT, 900.0, [2, 3]), (TERM, 900.0, [2]), (TERM, 1.0, [2, 3]), (TERM, 0.0, [2, 3])]
)
def test_only_a_disk_that_is_known_to_be_too_slow_for_a_limit_costs_the_checkpoint(
    in_place: FakeQueue,
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    took_s: float,
    kept: list[int],
) -> None:
    """Known from the checkpoint that the session continues from; 0: it was written by an earlier release."""
    run(config_for(model_path, tmp_path, steps=2))
    settings = config_for(model_path, tmp_path, checkpoint_every=0)
    state = places.complete(settings.run_dir)[2] / places.STATE
    info = msgspec.json.decode(state.read_bytes(), type=CheckpointInfo)
    state.write_bytes(msgspec.json.encode(msgspec.structs.replace(info, written_s=took_s)))
    monkeypatch.setattr("slipstream.learner.checkpoint_keeper.USUAL_BYTES_PER_S", 1.0)
    signal_in_step(monkeypatch, 2, number)
    in_place.now.finished = False
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(settings, resume=True)
    assert list(places.complete(settings.run_dir)) == kept
    told = " ".join(capsys.readouterr().out.split())
    assert ("there is no time for a checkpoint: it takes 900 to 1350 s" in told) == (kept == [2])
    assert told.endswith(f"continue from step {kept[-1]} with: {RESUME}")


def test_a_second_ctrl_c_names_the_checkpoint_that_is_not_complete(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, given_up = [], threading.Event()
    flush = checkpoint._flush
    settings = config_for(model_path, tmp_path, checkpoint_every=2)

    def end(code: int, text: str, on_terminal: bool) -> None:
        ended.append((code, text, list(places.complete(settings.run_dir))))
        given_up.set()

    def pressed_again(root: Path) -> None:
        if root.name.endswith("3"):
            time.sleep(stopping.ONE_PRESS_S + 0.1)
            os.kill(os.getpid(), INT)
            given_up.wait(10)
        flush(root)

    monkeypatch.setattr(checkpoint, "_flush", pressed_again)
    monkeypatch.setattr(stopping, "end_now", end)
    signal_in_step(monkeypatch, 4, INT)
    with pytest.raises(SystemExit):
        run(settings)
    (code, text, complete), *others = ended
    assert (code, complete, others) == (130, [2], [])
    assert f"the checkpoint of step 3 is not complete; continue from step 2 with: {RESUME}" in text
