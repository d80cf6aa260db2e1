"""Which checkpoints a run keeps, and what it does when one cannot be written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.learner import checkpoint_keeper, start
from slipstream.learner.checkpoint_keeper import best_of, is_due, spared
from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointError, CheckpointInfo
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.records import EvaluationRecord
from slipstream.learner.run import build_trainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.checkpoints import Best
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import LeaseAck, RunPosition
from slipstream.protocol.status import Evaluation
from tests.kit import LEARNER, config
from tests.kit.learner import FakeQueue, endless
from tests.learner.report.test_evaluations import Queue, done
from tests.learner.test_loop import config_for, train


def judged(step: int, reward: float | None, **changes: Any) -> EvaluationRecord:
    return EvaluationRecord(step, done(step, reward=reward, **changes))


def test_the_best_is_the_highest_reward_of_a_checkpoint_s_own_evaluation() -> None:
    found = [judged(10, 0.2), judged(20, 0.7), judged(25, 0.9), judged(30, 0.7), judged(40, None)]
    assert best_of({10, 20, 30, 40}, found) == Best(20, 0.7)
    assert best_of({10, 30}, found) == Best(30, 0.7)
    assert best_of({40, 50}, found) is None
    assert best_of({10, 20}, [judged(10, 0.2), judged(20, 0.9, ended="deadline")]) == Best(10, 0.2)


def test_what_may_yet_be_the_best_stays() -> None:
    assert spared({10, 20, 30}, Best(10, 0.5), pending=[20, 99]) == {10, 20}
    assert spared({10}, None, pending=[]) == set()


class Rewarding(Queue):
    """Evaluations end `late` steps after they were asked for, with these rewards by step."""

    def __init__(self, rewards: dict[int, float], late: int = 0) -> None:
        super().__init__(endless())
        self.rewards, self.late = rewards, late

    async def evaluations(self, wait_s: float = 0.0) -> list[Evaluation]:
        for step, found in self.all.items():
            over = self.now.step >= step + self.late or wait_s > 0
            if found.ended is None and over:
                self.all[step] = done(step, reward=self.rewards[step])
        return list(self.all.values())


def keeping(model_path: Path, tmp_path: Path, steps: int) -> RunConfig:
    values = config_for(model_path, tmp_path, steps=steps, checkpoint_every=1, keep_checkpoints=1).model_dump()
    values["learner"]["keep_best"], values["eval"]["every"] = True, 1
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("late", [0, 3])
def test_the_best_checkpoint_stays_is_written_down_and_told(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Evaluations that come late find their checkpoint, too."""
    said: list[str] = []
    monkeypatch.setattr(TerminalProgress, "say", lambda _, text, whole=False: said.append(text))
    here = keeping(model_path, tmp_path, 6)
    train(here, Rewarding({1: 0.1, 2: 0.8, 3: 0.3, 4: 0.8, 5: 0.2, 6: 0.4}, late))
    assert list(places.complete(here.run_dir)) == [2, 6]
    assert places.best(here.run_dir) == Best(2, 0.8)
    told = [text for text in said if "best checkpoint" in text]
    assert told[-1] == "the best checkpoint so far is that of step 2: its evaluation gave reward 0.800"

    more = keeping(model_path, tmp_path, 8)
    queue = Rewarding({7: 0.5, 8: 0.9}, late)
    queue.now = RunPosition(6, 6, 6, 1, 6, None, False)
    said.clear()
    train(more, queue, resume=True)
    assert list(places.complete(here.run_dir)) == [8]
    assert places.best(here.run_dir) == Best(8, 0.9)
    assert len([text for text in said if "best checkpoint" in text]) == 1


@pytest.mark.parametrize(("every", "judged_every"), [(0, 5), (5, 0), (4, 6)])
def test_a_best_that_no_evaluation_could_tell_is_refused(every: int, judged_every: int) -> None:
    evaluation = {"every": judged_every} if judged_every else {}
    settings = {"keep_best": True, "checkpoint_every": every}
    with pytest.raises(
        ValueError, match=rf"keep_best = true .*checkpoint_every = {every} and eval.every = {judged_every}"
    ):
        config(LEARNER, learner=settings, eval=evaluation)
    config(LEARNER, learner={"keep_best": True, "checkpoint_every": 20}, eval={"every": 10})


class Reported(FakeQueue):
    """Remembers what the learner told with its steps."""

    def __init__(self) -> None:
        super().__init__(endless())
        self.told: dict[int, list[str]] = {}

    async def ack(self, lease_id: str, ack: LeaseAck) -> RunPosition:
        if ack.step is not None and ack.report is not None:
            self.told[ack.step] = [f"{of.kind}: {of.text}" for of in ack.report.notices]
        return await super().ack(lease_id, ack)


def full_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full when the checkpoints of these steps are flushed."""
    flush = checkpoint._flush

    def flushed(root: Path) -> None:
        if any(root.name.endswith(places.name_of(step)) for step in steps):
            raise OSError(28, "No space left on device")
        flush(root)

    monkeypatch.setattr(checkpoint, "_flush", flushed)


def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fill the disk of the queue's store: SmolLM2-135M on 3.5 GB lost its queue to it; 2026-11-28."""
    warned: list[str] = []
    monkeypatch.setattr(TerminalProgress, "warn", lambda _, text: warned.append(text))
    usage = shutil.disk_usage(tmp_path)
    full = usage._replace(free=1000)
    monkeypatch.setattr(
        checkpoint_keeper.shutil,
        "disk_usage",
        lambda of: full if "step-000001" in str([*Path(of).iterdir()]) else usage,
    )
    here = config_for(model_path, tmp_path, steps=2, checkpoint_every=1)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .* took .* MB, and 0 MB are free in"):
        train(here, FakeQueue(endless()))
    assert list(places.complete(here.run_dir)) == [1]
    assert "step 1's stays the newest" in warned[-1]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(TerminalProgress, "warn", lambda _, text: warned.append(text))
    full_at(monkeypatch, 2, 6)
    queue = Reported()
    here = config_for(model_path, tmp_path, steps=8, checkpoint_every=2)
    train(here, queue)
    assert [entry[1] for entry in queue.log if entry[0] == "checkpointed"] == [4, 8]
    first, second = (text for text in warned if "cannot be written" in text)
    assert "step-000002 cannot be written: [Errno 28] No space left on device; there is none yet" in first
    assert (
        "step 4's stays the newest, and the next is tried after step 8 or in 10 min: make room on that disk" in second
    )
    assert queue.told[3] == [f"checkpoint: {first}"], "the queue's notices have it with the next step"
    assert queue.told[7] == [f"checkpoint: {second}"]
    assert {step for step, told in queue.told.items() if told} == {3, 7}
    assert sorted(path.name for path in places.folder(here.run_dir).iterdir()) == ["step-000004", "step-000008"]


def test_at_the_end_a_full_disk_ends_the_run_which_can_be_gone_on_with(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, 4)
    queue = FakeQueue(endless())
    here = config_for(model_path, tmp_path, steps=4, checkpoint_every=2)
    with pytest.raises(CheckpointError, match=r"step-000004 cannot be written: .*No space left.*--resume"):
        train(here, queue)
    assert "finished" not in queue.log
    monkeypatch.undo()
    train(here, queue, resume=True)
    assert list(places.complete(here.run_dir)) == [2, 4]


CHANGES: Sequence[tuple[str, dict[str, Any]]] = [
    ("learner.learning_rate = 0.5 (was 0.001)", {"learning_rate": 0.5}),
    ("learner.warmup_steps = 7 (was 0)", {"warmup_steps": 7}),
    ("learner.betas = [0.8, 0.7] (was [0.9, 0.95])", {"betas": (0.8, 0.7)}),
    ("learner.weight_decay = 0.3 (was 0.0)", {"weight_decay": 0.3}),
    ("learner.max_grad_norm = 9.0 (was 1.0)", {"max_grad_norm": 9.0}),
    ("learner.kl_coef = 0.1 (was 0.0)", {"kl_coef": 0.1}),
]


@pytest.mark.parametrize(("told", "changed"), CHANGES, ids=[told.split(" ")[0] for told, _ in CHANGES])
def test_whatever_a_resume_changes_is_named_and_used(
    model_path: Path, tmp_path: Path, told: str, changed: dict[str, Any]
) -> None:
    """Whatever the optimiser's state remembers of it."""
    before = config_for(model_path, tmp_path, steps=2)
    train(before, FakeQueue(endless()))
    after = config_for(model_path, tmp_path, steps=2, **changed)
    found = start.starting_point(after, resume=True)
    assert found is not None
    assert start.changed(after, found.info) == [told]
    resumed, fresh = build_trainer(after, found), build_trainer(after, None)
    assert resumed.schedule.last_epoch == 2
    for ours, new in zip(resumed.optimiser.param_groups, fresh.optimiser.param_groups, strict=True):
        kept = {name: value for name, value in ours.items() if name not in ("params", "lr")}
        assert kept == {name: value for name, value in new.items() if name not in ("params", "lr")}
        warmup = after.learner.warmup_steps
        assert ours["lr"] == pytest.approx(after.learner.learning_rate * (3 / warmup if warmup else 1))


def test_a_checkpoint_knows_when_it_was_made(model_path: Path, tmp_path: Path) -> None:
    here = config_for(model_path, tmp_path, steps=3, checkpoint_every=1, keep_checkpoints=2)
    train(here, FakeQueue(endless()))
    for step in (2, 3):
        path, info = (found := checkpoint.of_step(here.run_dir, step)).path, found.info
        files = [each for each in path.rglob("*") if each.is_file() and each.name not in (places.STATE, "README.md")]
        size = sum(each.stat().st_size for each in files)
        assert info == CheckpointInfo(step, step, start.settings(here), "", size, info.written_s)
        assert 0 < info.written_s < 60


@pytest.mark.parametrize(
    ("settings", "step", "age_s", "step_s", "due"),
    [
        ({"checkpoint_every": 20, "checkpoint_minutes": 0}, 40, 0, 1, True),
        ({"checkpoint_every": 20, "checkpoint_minutes": 0}, 41, 1e6, 1e3, False),
        ({"checkpoint_every": 0, "checkpoint_minutes": 10}, 40, 590, 5, False),
        ({"checkpoint_every": 0, "checkpoint_minutes": 10}, 40, 590, 11, True),
        ({"checkpoint_every": 0, "checkpoint_minutes": 10}, 1, 700, 700, True),
        ({"checkpoint_every": 0, "checkpoint_minutes": 0}, 40, 1e6, 1e3, False),
    ],
)
def test_a_checkpoint_is_due_by_step_and_by_age(
    settings: dict[str, float], step: int, age_s: float, step_s: float, due: bool
) -> None:
    """One that would be too old after another such step is written now."""
    assert is_due(config(LEARNER, learner=settings).learner, step, age_s, step_s) is due


def test_checkpoints_by_time_count_from_the_session_s_own_start(model_path: Path, tmp_path: Path) -> None:
    here = config_for(model_path, tmp_path, steps=4, checkpoint_every=0, checkpoint_minutes=1e-5, keep_checkpoints=9)
    train(here, FakeQueue(endless()))
    assert list(places.complete(here.run_dir)) == [1, 2, 3, 4]
