"""The command line as a person types it, for the tests of each scheduler."""

from __future__ import annotations

import subprocess
import sys

SMALL = ("--cluster.head_cpus", "2", "--cluster.server_cpus", "2", "--cluster.worker_cpus", "1")


def slipstream(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "deploy.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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
