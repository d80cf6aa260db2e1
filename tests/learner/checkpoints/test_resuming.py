"""What a run continues from, where a disk has damaged a checkpoint or another learner has written one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slipstream.learner.checkpoints import resuming
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.run import build_trainer, run
from slipstream.protocol import checkpoints as places
from slipstream.protocol.client import QueueError
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import RunPosition, SessionStart
from tests.kit.learner import FakeQueue, endless, status
from tests.learner.test_loop import FakePublisher, config_for, signal_in_step, train

SAFETENSORS = "model/model.safetensors"


@pytest.fixture(scope="module")
def made(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("made")
    train(config_for(model_path, folder), FakeQueue(endless()))
    return folder / "test"


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "test"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def at(step: int, version: int, *sessions: tuple[int, int], session: int = 2) -> RunPosition:
    return RunPosition(version, step, 9, session, None, None, False, [SessionStart(*of) for of in sessions])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("state.json", cut),
        ("state.json", Path.unlink),
        ("trainer.pt", cut),
        ("trainer.pt", Path.unlink),
        (SAFETENSORS, cut),
        (SAFETENSORS, Path.unlink),
        ("model/config.json", cut),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    run_dir: Path, name: str, damage: Callable[[Path], None]
) -> None:
    said: list[str] = []
    newest = places.complete(run_dir)[4]
    damage(newest / name)
    found = resuming.choose(run_dir, say=said.append)
    assert found is not None
    assert found.info.step == 2
    (told,) = said
    assert told.startswith(f"{newest} is not taken: it is damaged, {name.partition('/')[0]} cannot be read (")
    assert told.endswith("; it is moved to unused-step-000004")


@pytest.mark.parametrize(("name", "damage"), [("trainer.pt", cut), ("state.json", Path.unlink)])
def test_a_run_without_a_whole_checkpoint_does_not_begin_again_unasked(
    run_dir: Path, name: str, damage: Callable[[Path], None]
) -> None:
    for path in places.complete(run_dir).values():
        damage(path / name)
    with pytest.raises(
        ConfigError, match=r"step-000004: it is damaged.*step-000002: it is damaged.*move these away, and .* --resume"
    ):
        resuming.choose(run_dir)


def test_a_file_that_breaks_between_the_look_and_the_load_is_named_with_the_remedy(
    run_dir: Path, model_path: Path, tmp_path: Path
) -> None:
    found = resuming.choose(run_dir)
    assert found is not None
    cut(found.path / "trainer.pt")
    with pytest.raises(
        ConfigError, match=r"step-000004/trainer.pt is damaged .*move .*step-000004 away, and .*--resume"
    ):
        build_trainer(config_for(model_path, tmp_path), found)


@pytest.mark.parametrize(
    ("step", "sessions", "versions"),
    [
        (3, [(0, 0)], [3]),
        (8, [(0, 9)], [17]),
        (8, [(0, 0), (5, 9)], [12]),
        (5, [(0, 0), (5, 9)], [5, 9]),
        (5, [(0, 0), (8, 9)], [5]),
        (5, [(5, 9)], None),
        (3, [(5, 9)], None),
        (3, [], None),
    ],
)
def test_the_versions_that_a_step_made(step: int, sessions: list[tuple[int, int]], versions: list[int] | None) -> None:
    assert resuming.versions_of(step, [SessionStart(*of) for of in sessions]) == versions


@pytest.mark.parametrize(
    ("position", "why"),
    [
        (at(8, 17, (0, 9)), "it has version 4, and step 4 of the run that continues made version 13"),
        (at(3, 12, (0, 9)), "the queue knows steps up to 3 only"),
        (at(6, 6, (0, 0), session=1), None),
        (at(4, 9, (0, 0), (4, 9)), None),
        (at(4, 9, (4, 9)), None),
        (at(0, 0, session=0), None),
    ],
)
def test_a_checkpoint_of_a_time_line_that_was_given_up_is_not_taken(
    run_dir: Path, position: RunPosition, why: str | None
) -> None:
    """Both are of a session that counted its versions from 0; of the older one, nothing else is known here."""
    assert resuming.astray(CheckpointInfo(4, 4), position) == (
        why and f"{why}: a learner wrote it that another had taken the place of, or it is another run's"
    )
    if why is None:
        assert resuming.choose(run_dir, position) == Checkpoint(places.complete(run_dir)[4], info(run_dir, 4))


def info(run_dir: Path, step: int) -> CheckpointInfo:
    return msgspec.json.decode((places.complete(run_dir)[step] / "state.json").read_bytes(), type=CheckpointInfo)


class Succeeded(FakeQueue):
    """From step `begins_at` on another learner has begun."""

    def __init__(self) -> None:
        super().__init__(endless())
        self.begins_at: int | None = 3
        self.shown = status()

    async def position(self) -> RunPosition:
        found = self.copy()
        if self.begins_at is not None and found.step >= self.begins_at:
            found.session += 1
        return found


@pytest.fixture
def succeeded(monkeypatch: pytest.MonkeyPatch) -> Succeeded:
    queue = Succeeded()
    monkeypatch.setattr("slipstream.learner.run.QueueClient", lambda url, token: queue)
    monkeypatch.setattr("slipstream.learner.run.Publisher", lambda config, url, ranks: FakePublisher(queue))
    return queue


def test_a_learner_that_another_took_the_place_of_leaves_no_checkpoint(
    succeeded: Succeeded,
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After a signal, as when it wakes up to it."""
    signal_in_step(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(SystemExit):
        run(config_for(model_path, tmp_path))
    assert list(places.complete(tmp_path / "test")) == [2]
    told = capsys.readouterr().out
    assert "stopped after step 3; there is no checkpoint of it: another learner has begun, session 2" in told
    assert "--resume" not in told


def test_a_learner_that_another_took_the_place_of_writes_no_checkpoint_that_is_due(
    succeeded: Succeeded, model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(QueueError, match="another learner has begun, and no checkpoint of step 4 is written"):
        run(config_for(model_path, tmp_path))
    assert list(places.complete(tmp_path / "test")) == [2]


def test_a_queue_that_does_not_say_whose_turn_it_is_costs_no_checkpoint(
    succeeded: Succeeded, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> RunPosition:
        raise QueueError("away")

    succeeded.position = away  # type: ignore[method-assign]
    signal_in_step(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(SystemExit):
        run(config_for(model_path, tmp_path))
    assert list(places.complete(tmp_path / "test")) == [2, 3]


def test_a_resume_passes_over_what_a_learner_of_before_wrote_and_sets_it_aside(
    succeeded: Succeeded, run_dir: Path, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4 of the run that continues made version 9; the checkpoint of step 4 is of the time line before."""
    succeeded.begins_at = None
    succeeded.now = at(4, 9, (0, 0), (2, 7))
    run(config_for(model_path, tmp_path, steps=5, checkpoint_every=5), resume=True)
    assert [(of.step, of.resume) for of in succeeded.begun] == [(2, True)]
    told = " ".join(capsys.readouterr().out.split())
    assert "step-000004 is not taken: it has version 4, and step 4 of the run that continues made version 9" in told
    assert "resuming from step 2 of 5" in told
    names = sorted(path.name for path in places.folder(run_dir).iterdir())
    assert names == ["step-000002", "step-000005", "unused-step-000004"]
