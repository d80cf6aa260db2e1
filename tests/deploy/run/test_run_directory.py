"""The run directory before a start: who may have it, what an earlier start left, and the run file in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.deploy.run import run_directory
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteReader, SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.deploy.conftest import save_checkpoint


def holding(run_file: Path, *, store: int | None = None, checkpoint: bool = False) -> RunConfig:
    """A run directory with a store whose run made so many steps, and a checkpoint."""
    config = load(run_file)
    config.run_dir.mkdir(parents=True)
    if store is not None:
        opened = SqliteStore(config.run_dir / FILE_NAME)
        if store:
            opened.acquire()
            opened.commit(Changes(run=RunState(version=store, step=store)))
        opened.close()
        (config.run_dir / "logs").mkdir()
        (config.run_dir / "logs" / "learner.log").write_text("what went wrong", encoding="utf-8")
    if checkpoint:
        save_checkpoint(run_file)
    return config


@pytest.mark.parametrize(
    ("store", "checkpoint", "resume", "refused"),
    [
        (None, False, False, None),
        (None, False, True, "--resume: .*small holds nothing to continue from, .* start it without --resume"),
        (0, False, False, None),
        (0, False, True, "--resume: .*small holds nothing to continue from"),
        (7, False, False, "already holds a run of 7 steps, without a checkpoint; begin again at its first step by"),
        (7, False, True, None),
        (
            7,
            True,
            False,
            "already holds a run; continue with it by --resume, or choose another name: --run.name small-2",
        ),
        (7, True, True, None),
        (None, True, False, "already holds a run; continue with it by --resume"),
        (None, True, True, "it is empty, beside .*step-000001; .*slipstream queue new"),
    ],
)
def test_what_a_directory_holds_decides_whether_a_start_must_resume(
    run_file: Path, store: int | None, checkpoint: bool, resume: bool, refused: str | None
) -> None:
    config = holding(run_file, store=store, checkpoint=checkpoint)
    if refused is None:
        run_directory.check_run_directory(config, resume)
        return
    with pytest.raises(ConfigError, match=refused):
        run_directory.check_run_directory(config, resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_store_that_has_lost_its_run_is_no_start_that_made_no_step(run_file: Path, resume: bool) -> None:
    """As one whose log was deleted after a kill: its files were put aside, or it was told to start without --resume."""
    config = holding(run_file, store=0)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1, "version": 1}\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"it is empty, beside .*metrics\.jsonl.*; put the run's own store or a backup"
    ):
        run_directory.check_run_directory(config, resume)


@pytest.mark.parametrize(
    ("store", "checkpoint", "says"),
    [
        (None, False, "fix it and start again: it made no step, so the run's name is free"),
        (0, False, "fix it and start again: it made no step, so the run's name is free"),
        (7, False, "it made no checkpoint: begin again at its first step with --resume"),
        (7, True, "continue from its newest checkpoint with --resume"),
    ],
)
def test_resume_is_advised_only_where_there_is_something_to_resume(
    run_file: Path, store: int | None, checkpoint: bool, says: str
) -> None:
    assert run_directory.to_go_on(holding(run_file, store=store, checkpoint=checkpoint), "--resume") == says


def test_after_a_trainer_of_the_users_own_the_step_of_its_own_checkpoint_is_named(run_file: Path) -> None:
    config = holding(run_file, store=7)
    own = config.model_copy(update={"learner": config.learner.model_copy(update={"script": "train.py"})})
    assert run_directory.to_go_on(own, "--resume").endswith("from the step that it gives to join(step=)")
    with pytest.raises(
        ConfigError, match=r"a run of 7 steps; continue from your script's own checkpoint by --resume, or"
    ):
        run_directory.check_run_directory(own, resume=False)


def test_a_start_that_made_no_step_leaves_the_name_free_and_its_logs_behind(run_file: Path) -> None:
    for number in (1, 2):
        config = load(run_file)
        if number == 1:
            holding(run_file, store=0)
        else:
            SqliteStore(config.run_dir / FILE_NAME).close()
        with run_directory.held_alone(config):
            run_directory.check_run_directory(config, resume=False)
            aside = run_directory.clear(config)
            assert run_directory.clear(config) is None, "there is nothing left to move"
        assert aside == config.run_dir / f"failed-start-{number}"
        assert (aside / FILE_NAME).exists()
        assert sorted(path.name for path in config.run_dir.iterdir()) == [
            *(f"failed-start-{start}" for start in range(1, number + 1)),
            "launcher.lock",
            "queue.lock",
        ]
    assert (config.run_dir / "failed-start-1" / "logs" / "learner.log").read_text() == "what went wrong"


def test_nothing_is_moved_under_a_queue_that_runs(run_file: Path) -> None:
    config = holding(run_file, store=0)
    store = SqliteStore(config.run_dir / FILE_NAME)
    try:
        with pytest.raises(ConfigError, match=r"small/queue\.db is in use by another queue: stop that one"):
            run_directory.clear(config)
        assert (config.run_dir / FILE_NAME).exists()
    finally:
        store.close()


def test_steps_are_counted_over_all_starts_of_a_run(tmp_path: Path) -> None:
    """A resume from the first step has the version continue."""
    store = SqliteStore(tmp_path / FILE_NAME)
    assert SqliteReader(tmp_path / FILE_NAME).run_state().version == 0
    store.acquire()
    store.commit(Changes(run=RunState(version=9, step=0)))
    assert SqliteReader(tmp_path / FILE_NAME).run_state().version == 9, "next to the queue that has it open"
    store.close()
    (tmp_path / "no-store").write_text("something else", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as a run's store"):
        SqliteReader(tmp_path / "no-store").run_state()


@pytest.mark.parametrize("parent", ["file", "/proc/self"])
def test_a_directory_that_cannot_be_written_is_found_before_anything_starts(run_file: Path, parent: str) -> None:
    """By trying: root may write where permissions forbid it, and still not everywhere."""
    (run_file.parent / "file").touch()
    config = load(run_file, ["--run.dir", str(run_file.parent / parent)])
    with pytest.raises(ConfigError, match=r"run.dir = .*: .*/small cannot be written: .*; choose another run.dir"):
        run_directory.check_run_directory(config, resume=False)


def test_metrics_that_cannot_be_read_are_told_in_one_line(run_file: Path) -> None:
    config = load(run_file)
    (config.run_dir / "metrics.jsonl").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: Is a directory; move it away"),
        run_directory.kept_if_no_step_is_made(config),
    ):
        pass


def test_the_written_run_file_loads_from_anywhere_and_holds_no_secret(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_file.parent)
    secrets = ["--queue.token", "hunter2", "--queue.store", "postgresql://me:hunter2@db/runs"]
    config = load("run.toml", ["--run.dir", "here", *secrets, "--learner.steps", "7"])
    written = run_directory.write_resolved(config)
    monkeypatch.chdir(tmp_path)
    again = load(run_file.parent / written)
    assert again.run_dir == run_file.parent / "here" / "small"
    assert (again.model, again.task, again.learner) == (config.model, config.task, config.learner)
    assert (again.queue.token, again.queue.store) == (None, "postgresql://me@db/runs")
    assert "hunter2" not in (run_file.parent / written).read_text()


def test_a_run_directory_has_one_launcher_at_a_time(run_file: Path) -> None:
    """A second one would put its own ports into the run file that the first restarts its processes with."""
    config = load(run_file)
    with run_directory.held_alone(config):
        with (
            pytest.raises(ConfigError, match=r"is in use by another launcher; stop that one, or .* --run.name small-2"),
            run_directory.held_alone(config),
        ):
            pytest.fail("held twice")
        with run_directory.held_alone(load(run_file, ["--run.name", "small-2"])):
            pass
    with run_directory.held_alone(config):
        pass


def test_whether_another_launcher_has_it_is_seen_before_anything_is_checked(run_file: Path) -> None:
    config = load(run_file)
    run_directory.check_unused(config)
    assert not config.run_dir.exists(), "a look makes nothing"
    with run_directory.held_alone(config), pytest.raises(ConfigError, match="in use by another launcher"):
        run_directory.check_unused(config)
    run_directory.check_unused(config)
