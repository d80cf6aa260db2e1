"""`slipstream doctor`: what is there is told, and what is broken with its remedy."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path

import psutil
import pytest

from deploy.commands import setup
from protocol.config import load
from tests.kit.ports import free_port


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_what_is_installed_here_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    code = setup.examine(None)
    out = capsys.readouterr().out
    assert code == 0, out
    facts = {line.split("  ")[0].strip() for line in out.splitlines()}
    assert {"slipstream", "python", "torch", "transformers", "accelerate", "CPU cores", "memory", "GPUs"} <= facts


def test_a_torchvision_that_fits_another_torch_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert setup.examine(None) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken: ")]
    assert "operator torchvision::nms does not exist" in line
    assert "pip uninstall torchvision torchaudio torchcodec" in line


def test_a_version_that_is_too_old_and_a_package_that_is_missing_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["rich>=1000", "no-such-package>=2", 'not-this-platform; sys_platform == "other"', 'x; extra == "test"']
    monkeypatch.setattr(setup, "requires", lambda name: needed)
    assert setup.examine(None) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken: ")]
    assert [fault.split(", and ")[1] for fault in faults] == [
        "rich>=1000 is needed; pip install 'rich>=1000'",
        "no-such-package>=2 is needed; pip install 'no-such-package>=2'",
    ]


def test_a_taken_port_is_told_with_its_holder(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = free_port()
        setup.examine(load(run_file, ["--queue.port", str(port), "--vllm.port", str(free)]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["vllm.port", str(free), "free"] in lines
    (told,) = [line for line in lines if line[:2] == ["queue.port", str(port)]]
    assert told[2:6] == ["taken", "by", "process", f"{os.getpid()}:"]
    # As it is called: a runner of tests may give itself a title.
    assert psutil.Process().cmdline()[0].split()[0] in " ".join(told)
