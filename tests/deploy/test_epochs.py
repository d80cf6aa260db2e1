"""`learner.epochs` in place of steps: counted where the task is loaded, told at the start, and handed on as steps."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from slipstream.deploy import cli
from slipstream.deploy.checks import preflight
from slipstream.deploy.run import run_directory
from slipstream.protocol.config import ConfigError, RunConfig, load, to_toml
from tests.deploy.conftest import TASK
from tests.kit import config

STREAM = TASK.replace("rows = [", "rows = lambda: iter([").replace('3."}]}]', '3."}]}])')


@pytest.mark.parametrize(
    ("passes", "rows", "groups", "steps"),
    [(1, 640, 16, 40), (3, 640, 16, 120), (1, 641, 16, 41), (0.5, 640, 16, 20), (0.1, 640, 16, 4), (0.001, 1, 16, 1)],
)
def test_a_pass_is_each_row_once_and_the_last_step_is_whole(passes: float, rows: int, groups: int, steps: int) -> None:
    assert run_directory.steps_for_epochs(passes, rows, groups) == steps


def with_epochs(passes: float = 2.0) -> RunConfig:
    return config(learner={"epochs": passes, "groups_per_step": 4})


def test_the_processes_get_steps() -> None:
    counted = run_directory.with_steps_for_epochs(with_epochs(), rows=10)
    assert (counted.learner.steps, counted.learner.epochs) == (5, None)
    assert (
        run_directory.describe_steps(with_epochs(), 10)
        == "learner.epochs = 2: 10 rows in steps of 4 groups are 5 steps"
    )
    assert run_directory.with_steps_for_epochs(config(), rows=None) == config()


def test_an_iterable_cannot_be_counted(run_file: Path) -> None:
    (run_file.parent / "task.py").write_text(STREAM, encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"learner.epochs = 2: the data set is an iterable.*give learner.steps instead"
    ):
        preflight.check_run(load(run_file, ["--learner.epochs", "2.0"]), resume=False)
    assert preflight.check_run(load(run_file), resume=False).rows is None


def test_the_preflight_counts_the_rows(run_file: Path) -> None:
    assert preflight.check_run(load(run_file, ["--learner.epochs", "2.0"]), resume=False).rows == 1


def write_run_file(folder: Path, *lines: str) -> Path:
    file = folder / "run.toml"
    file.write_text("\n".join(['model.path = "org/name"', 'task.path = "task.py:task"', *lines]), encoding="utf-8")
    return file


def test_steps_and_epochs_in_one_file_are_refused(tmp_path: Path) -> None:
    both = write_run_file(tmp_path, "learner.steps = 5", "learner.epochs = 2.0")
    with pytest.raises(
        ConfigError, match=r"learner.steps = 5 and learner.epochs = 2 both say when the run ends: leave"
    ):
        load(both)
    with pytest.raises(ConfigError, match=r"learner.steps = 7 and learner.epochs = 3 both"):
        load(write_run_file(tmp_path), ["--learner.steps", "7", "--learner.epochs", "3.0"])


@pytest.mark.parametrize(
    ("line", "override", "steps", "passes"),
    [
        ("learner.steps = 5", ["--learner.epochs", "2.0"], 100, 2.0),
        ("learner.epochs = 2.0", ["--learner.steps", "5"], 5, None),
    ],
)
def test_the_command_line_takes_the_place_of_the_files_other_one(
    tmp_path: Path, line: str, override: list[str], steps: int, passes: float | None
) -> None:
    learner = load(write_run_file(tmp_path, line), override).learner
    assert (learner.steps, learner.epochs) == (steps, passes)


def test_a_run_file_with_epochs_is_printed_without_steps_and_read_back(tmp_path: Path) -> None:
    config = load(write_run_file(tmp_path, "learner.epochs = 2.0"))
    text = to_toml(config)
    assert "steps" not in tomllib.loads(text)["learner"]
    (tmp_path / "printed.toml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "printed.toml") == config


@pytest.mark.parametrize("settings", [["--learner.epochs", "3.0"], []])
def test_slipstream_learner_counts_the_rows_of_the_task(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    started: list[RunConfig] = []
    monkeypatch.setattr("slipstream.learner.run.run", lambda config, *_: started.append(config))
    rows = '[{"prompt": [{"role": "user", "content": "a"}]}] * 40'
    (run_file.parent / "task.py").write_text(TASK.replace("dataset=rows", f"dataset={rows}"), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["slipstream", "learner", str(run_file), *settings])
    with pytest.raises(SystemExit):
        cli.main()
    (config,) = started
    assert (config.learner.steps, config.learner.epochs) == ((8, None) if settings else (100, None))
    assert ("40 rows in steps of 16 groups are 8 steps" in capfd.readouterr().out) == bool(settings)
