"""What the preflight hands to the launcher."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy import preflight
from protocol.config import load
from tests.deploy.conftest import run_directory


def in_a_shell(assignments: str) -> dict[str, str]:
    """The variables as a shell reads them that evaluates `assignments`."""
    names = [line.partition("=")[0] for line in assignments.splitlines()]
    script = f"set -eu\n{assignments}\nprintf '%s\\0' " + " ".join(f'"${name}"' for name in names)
    values = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")
    return dict(zip(names, values[:-1], strict=True))


def test_the_shell_variables_come_through_a_shell_as_they_are(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "it's $HOME; `date`")
    config = load(run_file, ["--worker.count", "3", "--vllm.count", "2"])
    shown = in_a_shell(preflight.shell_variables(config))
    assert shown["RUN_DIR"] == str(run_directory(run_file))
    assert shown["RUN_FILE"] == str(run_directory(run_file) / "run.toml")
    assert shown["TOKEN"] == "it's $HOME; `date`"
    assert (shown["SERVERS"], shown["WORKERS"]) == ("2", "3")
    assert shown["QUEUE_URL"] == config.queue.url


def test_a_cpu_machine_parts_its_cores_and_a_gpu_machine_does_not(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(preflight.shutil, "which", lambda _: "/usr/bin/taskset")
    pins = ("PIN_SERVER", "PIN_OTHERS", "SERVER_THREADS", "OTHER_THREADS")
    for on_cpu, wanted in [(True, ("taskset -c 4,5", "taskset -c 6,7", "2", "2")), (False, ("", "", "", ""))]:
        monkeypatch.setattr(preflight, "on_cpu", lambda here=on_cpu: here)
        shown = in_a_shell(preflight.shell_variables(load(run_file)))
        assert tuple(shown[name] for name in pins) == wanted


def test_servers_that_run_elsewhere_are_not_launched_and_nothing_is_pinned(run_file: Path) -> None:
    shown = in_a_shell(preflight.shell_variables(load(run_file, ["--vllm.servers", '["http://10.0.0.1:8000"]'])))
    assert (shown["SERVERS"], shown["PIN_OTHERS"]) == ("0", "")


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
