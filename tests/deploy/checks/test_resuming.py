"""`slipstream up --resume`: a start that makes no step leaves its settings, and one with nothing to do says so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.deploy.checks import preflight
from slipstream.deploy.run import run_directory
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.deploy.conftest import save_checkpoint
from tests.deploy.stage import STAYS, Stage, until

STEP = 'echo \'{{"step": {0}, "version": {0}}}\' >>"{1}/metrics.jsonl"; '


@pytest.fixture
def stage(tmp_path: Path, run_file: Path) -> Iterator[Stage]:
    """Give the stage of a run that has made step 1."""
    folder = tmp_path / "a stage"
    folder.mkdir()
    stage = Stage(folder, run_file)
    stage.play(learner=STEP.format(1, stage.run_dir) + "exit 0")
    assert stage.run().returncode == 0
    save_checkpoint(run_file)
    yield stage
    if stage.process and stage.process.poll() is None:
        stage.process.kill()


def steps_of(stage: Stage) -> int:
    return load(stage.run_dir / "run.toml").learner.steps


def test_a_resume_that_the_learner_refuses_leaves_the_run_s_settings(stage: Stage) -> None:
    before = (stage.run_dir / "run.toml").read_bytes()
    stage.play(learner='grep -q "steps = 20 " "$2" && exit 2; exit 0')
    result = stage.run("--resume", "--learner.steps", "20")
    assert result.returncode == 2, "the processes of this start have its settings"
    assert (stage.run_dir / "run.toml").read_bytes() == before


def test_a_resume_that_is_stopped_before_its_first_step_leaves_them_too(stage: Stage) -> None:
    stage.play(learner=STAYS)
    process = stage.start("--resume", "--learner.steps", "20")
    until(lambda: len(stage.calls("learner")) == 2)
    assert steps_of(stage) == 20
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert steps_of(stage) == 100


@pytest.mark.parametrize(
    "last", ["exit 3", "trap '{}exit 0' TERM; touch ready; sleep 300 & wait"], ids=["fails", "on its way out"]
)
def test_one_that_makes_a_step_makes_its_settings_the_run_s(stage: Stage, last: str) -> None:
    step = STEP.format(2, stage.run_dir)
    if "trap" in last:
        (stage.folder / "last.sh").write_text(step, encoding="utf-8")
        stage.play(learner=last.format("source ./last.sh; "))
        process = stage.start("--resume", "--learner.steps", "20")
        until((stage.folder / "ready").exists)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    else:
        stage.play(learner=step + last)
        assert stage.run("--resume", "--learner.steps", "20").returncode == 3
    assert steps_of(stage) == 20


def over(run_file: Path, made: int, *given: str, finished: bool = True) -> RunConfig:
    """A run that has made so many steps."""
    config = load(run_file, [*given])
    config.run_dir.mkdir(parents=True, exist_ok=True)
    store = SqliteStore(config.run_dir / FILE_NAME)
    store.acquire()
    store.commit(Changes(run=RunState(version=made, step=made, finished=finished)))
    store.close()
    save_checkpoint(run_file, made)
    return config


@pytest.mark.parametrize(
    ("steps", "finished", "made"), [("15", True, 15), ("12", True, 15), ("18", True, None), ("15", False, None)]
)
def test_a_run_is_over_where_it_has_made_the_steps_that_are_asked_for_and_has_ended(
    run_file: Path, steps: str, finished: bool, made: int | None
) -> None:
    config = over(run_file, 15, "--learner.steps", steps, finished=finished)
    assert run_directory.finished(config) == made


def test_a_run_that_is_over_starts_nothing_and_says_how_many_steps_it_made(stage: Stage, run_file: Path) -> None:
    before = (stage.run_dir / "run.toml").read_bytes()
    over(run_file, 15)
    calls = len(stage.calls())
    result = stage.run("--resume", "--learner.steps", "12")
    assert result.returncode == 0, result.stderr
    assert "small is finished: it has made 15 steps, and learner.steps = 12; raise that to continue\n" in result.stdout
    assert len(stage.calls()) == calls
    assert (stage.run_dir / "run.toml").read_bytes() == before


def test_all_of_its_steps_is_said_where_no_others_are_asked_for() -> None:
    assert (
        checkpoints.nothing_to_do("lo", 15, 15)
        == "lo is finished: it has made all of its 15 steps; raise learner.steps to continue"
    )


def test_no_server_is_asked_about_a_run_that_is_over_and_its_adapter_is(run_file: Path) -> None:
    servers = ("--vllm.servers", '["http://127.0.0.1:9"]')
    config = over(run_file, 15, "--learner.steps", "15", *servers)
    preflight.check_run(config, resume=True)
    more = load(run_file, ["--learner.steps", "18", *servers])
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9"):
        preflight.check_run(more, resume=True)
    pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    with pytest.raises(ConfigError, match=r"was made without an adapter, and lora.r is above 0"):
        preflight.check_run(load(run_file, ["--learner.steps", "15", "--lora.r", "4", *servers]), resume=True)
