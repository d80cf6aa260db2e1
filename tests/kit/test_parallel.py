"""Tests that run side by side: all run once, each failure is reported, and a copy that dies takes one test with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES, OWN_SERVERS, TESTS

ROOT = Path(__file__).parents[2]

LIVES = """
import warnings
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    yield made
    print("unmade")

@pytest.mark.parametrize("number", range(5))
def test_one_of_a_file(made, number):
    with pytest.raises(FileExistsError if number else ZeroDivisionError):
        (made / "once").touch(exist_ok=False)
        raise ZeroDivisionError

def test_that_warns():
    warnings.warn("take care", FutureWarning)
"""
FAILS = """
def test_that_prints_and_fails():
    print("a last word")
    assert 1 + 1 == 3
"""
DIES = """
import os

def test_before(): ...

def test_that_ends_its_process():
    os._exit(7)

def test_after(): ...
"""
WAITS = """
import time
from pathlib import Path

def test_that_waits_for_the_other_file():
    Path("{mine}").touch()
    while not Path("{other}").exists():
        time.sleep(0.01)
"""

# Of whole runs no three are there at once.
COUNTS = """
import time
from pathlib import Path

def test_that_is_one_of_two():
    Path("{mine}").touch()
    for _ in range(20):
        assert len([*Path("{mine}").parent.glob("run-*")]) <= 2
        time.sleep(0.02)
    Path("{mine}").unlink()
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, source in files.items():
        (folder / f"test_{name}.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(folder)]
    return subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", *options, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_test_runs_once_and_a_copy_that_dies_fails_only_the_test_that_it_ran(tmp_path: Path) -> None:
    done = run(tmp_path, "--copies", "2", lives=LIVES, fails=FAILS, dies=DIES)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "2 failed, 8 passed, 1 warning" in done.stdout
    assert "_ test_that_ends_its_process _" in done.stdout
    assert "the process that ran this test ended with 7" in done.stdout
    assert "a last word" in done.stdout
    assert "FutureWarning: take care" in done.stdout


def test_files_run_at_the_same_time(tmp_path: Path) -> None:
    first, second = (
        WAITS.format(mine=tmp_path / mine, other=tmp_path / other) for mine, other in (("a", "b"), ("b", "a"))
    )
    done = run(tmp_path, "--copies", "2", first=first, second=second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_after_as_many_failures_as_allowed_no_other_file_is_begun(tmp_path: Path) -> None:
    waits = WAITS.format(mine=tmp_path / "begun", other=tmp_path / "begun")
    done = run(tmp_path, "--copies", "2", "--maxfail", "1", a=FAILS, b=FAILS, c=waits)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "!! stopping after " in done.stdout
    assert not (tmp_path / "begun").exists()


def test_the_files_that_begin_first_exist() -> None:
    assert [name for name in (*LONG_FILES, *OWN_SERVERS) if not (TESTS / name).is_file()] == []


def test_of_whole_runs_two_are_tried_at_once_beside_the_others(tmp_path: Path) -> None:
    (folder := tmp_path / "e2e").mkdir()
    for name in OWN_SERVERS:
        source = COUNTS.format(mine=tmp_path / f"run-{Path(name).stem}")
        (folder / Path(name).name).write_text(source, encoding="utf-8")
    done = run(tmp_path, "--copies", "4", lives=LIVES)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert f"{6 + len(OWN_SERVERS)} passed" in done.stdout
