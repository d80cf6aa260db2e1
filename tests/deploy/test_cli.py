"""The command line where nothing is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from protocol.config import load
from tests.kit.ports import free_port


def test_i7_a_worker_without_a_queue_says_at_once_whom_it_waits_for(run_file: Path) -> None:
    """And ends cleanly, waiting or not."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "deploy.cli", "worker", str(run_file), "--queue", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as worker:
        assert worker.stderr is not None
        try:
            assert f"for the queue at {url}" in worker.stderr.readline()
            assert f"waiting for the queue at {url}, for up to 300 s" in worker.stderr.readline()
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 128 + signal.SIGTERM
            assert "Traceback" not in worker.stderr.read()
        finally:
            worker.kill()


def test_up_supervises_the_run_of_its_arguments(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, bool]] = []
    monkeypatch.setattr(cli, "supervise", lambda config, resume: seen.append((config, resume)))
    monkeypatch.setattr(sys, "argv", ["slipstream", "up", str(run_file), "--learner.steps", "7", "--resume"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    ((config, resume),) = seen
    assert (config, resume) == (load(run_file, ["--learner.steps", "7"]), True)


def test_each_command_is_one_line_of_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["slipstream", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    lines = capsys.readouterr().out.partition("Commands")[2].splitlines()
    names = [line.split()[1] for line in lines if line.startswith("│")]
    assert names == ["config", "queue", "worker", "learner", "vllm", "up", "status", "ledger"]
