"""The command line as a person types it, for the tests of each scheduler."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

SMALL = ("--cluster.head_cpus", "2", "--cluster.server_cpus", "2", "--cluster.worker_cpus", "1")


class Typed(subprocess.Popen[str]):
    """A command that is stopped where the test that waits for it fails: its run would not end by itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.poll() is None:
            self.terminate()
        super().__exit__(kind, error, trace)


def slipstream(*words: str) -> Typed:
    command = [sys.executable, "-P", "-m", "deploy.cli", *words]
    return Typed(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output(*words: str) -> tuple[int, str]:
    process = slipstream(*words)
    said, _ = process.communicate(timeout=200)
    return process.returncode, said


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)
