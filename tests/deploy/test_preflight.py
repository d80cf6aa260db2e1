"""The resolved run file, which all processes of a run read."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import preflight
from protocol.config import ConfigError, load


def test_the_written_run_file_loads_from_anywhere_and_holds_no_token(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_file.parent)
    config = load("run.toml", ["--run.dir", "here", "--queue.token", "hunter2", "--learner.steps", "7"])
    written = preflight.write_resolved(config)
    monkeypatch.chdir(tmp_path)
    again = load(run_file.parent / written)
    assert again.run_dir == run_file.parent / "here" / "small"
    assert (again.model, again.task, again.learner) == (config.model, config.task, config.learner)
    assert again.queue.token is None
    assert "hunter2" not in (run_file.parent / written).read_text()


def test_a_run_directory_has_one_launcher_at_a_time(run_file: Path) -> None:
    """A second one would put its own ports into the run file that the first restarts its processes with."""
    config = load(run_file)
    with preflight.held_alone(config):
        with (
            pytest.raises(ConfigError, match=r"is in use by another launcher; stop that one, or .* --run.name small-2"),
            preflight.held_alone(config),
        ):
            pytest.fail("held twice")
        with preflight.held_alone(load(run_file, ["--run.name", "small-2"])):
            pass
    with preflight.held_alone(config):
        pass
