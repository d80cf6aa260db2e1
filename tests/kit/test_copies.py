"""Copies end as programs do, and neither they nor what they start outlives its use."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.deploy.stage import is_running, until
from tests.kit.copies import PipedCopy
from tests.kit.original import Request

LIMIT_S = 60.0


def started(folder: Path, script: str, *arguments: str) -> PipedCopy:
    (folder / "a program.py").write_text(script, encoding="utf-8")
    env = {**os.environ, "WORD": "a word"}
    return PipedCopy(["decimal"], Request(str(folder / "a program.py"), arguments, env, str(folder)))


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('it went wrong')", 1, "it went wrong\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_copy_ends_as_a_program(tmp_path: Path, end: str, code: int, error: str) -> None:
    script = f"import os, signal, sys\nprint(os.environ['WORD'], os.getcwd(), sys.argv[1:], flush=True)\n{end}"
    copy = started(tmp_path, script, "1", "2")
    out, err = copy.communicate(LIMIT_S)
    assert (copy.wait(), out) == (code, f"a word {tmp_path} ['1', '2']\n")
    assert err.endswith(error)


def test_it_has_the_modules_that_were_asked_for(tmp_path: Path) -> None:
    out, _ = started(tmp_path, "import sys\nprint('decimal' in sys.modules)").communicate(LIMIT_S)
    assert out == "True\n"


def test_it_is_killed_once_nobody_has_it(tmp_path: Path) -> None:
    copy = started(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)")
    assert copy.stdout is not None
    pid = int(copy.stdout.readline())
    assert pid == copy.pid
    del copy
    until(lambda: not is_running(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the first process of the machine")
def test_the_end_of_an_orphan_is_noticed(tmp_path: Path) -> None:
    script = "import subprocess\nprint(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    copy = started(tmp_path, script)
    assert copy.stdout is not None
    orphan = int(copy.stdout.readline())
    assert copy.wait(LIMIT_S) == 0
    os.killpg(copy.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{orphan}").exists())
