"""The command line as a person types it, in a copy of a process that has imported what it imports."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from tests.kit.copies import PipedCopy
from tests.kit.original import Request

SMALL = ("--cluster.head_cpus", "2", "--cluster.server_cpus", "2", "--cluster.worker_cpus", "1")
# What the commands import.
MODULES = ("slipstream.deploy.cli", "slipstream.deploy.checks.preflight", "slipstream.deploy.commands.cluster")


class Typed(PipedCopy):
    """A command whose output and errors are one stream.

    It is stopped where the test that waits for it fails: its run would not end by itself.
    """

    def __init__(self, *words: str) -> None:
        super().__init__(
            MODULES, Request("slipstream.deploy.cli", words, dict(os.environ), os.getcwd()), is_merged=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.poll() is None:
            self.terminate()
        self.wait()
        self.stderr.close()


def output(*words: str) -> tuple[int, str]:
    """Return the exit code of a command and what it said."""
    with Typed(*words) as process:
        said, _ = process.communicate(timeout=200)
        return process.wait(), said


def read_until(process: Typed, text: str) -> str:
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)
