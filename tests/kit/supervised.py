"""Starts and ends child processes for tests of whole runs, as the supervisor does.

Waits have no fixed limit. They end when nothing moves any more, so that a slow machine does not fail a test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.deploy.run.processes import SLIPSTREAM, Child, Children, Program
from tests.kit.copies import start_program

GRACE_S = 20.0
# A run in which nothing moves for this time hangs, even on a machine with ten other tasks.
STILL_S = 180.0
LOG_SHOWN = 4000


class Patience:
    """Ends a wait once what `moves` returns has not changed for `STILL_S`: a fixed limit would fail a slow machine."""

    def __init__(self, moves: Callable[[], object]) -> None:
        self._moves = moves
        self._last: object = None
        self._moved_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        now, last = time.monotonic(), self._moves()
        if last != self._last:
            self._last, self._moved_at = last, now
        return now - self._moved_at > STILL_S


class Processes:
    """Starts child processes by name.

    Args:
        children: Owns the processes.
        log_dir: Folder with a log for each process.
        needs: Modules to import before each process is forked as a copy; empty to start new interpreters.
    """

    def __init__(self, children: Children, log_dir: Path, needs: Sequence[str] = ()) -> None:
        self._children = children
        self._log_dir = log_dir
        self._needs = needs
        self.running: dict[str, Child] = {}

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Child:
        """Start a process. `env` is added to this process's environment."""
        program = Program(name, "worker", command, env or {})
        if not self._needs:
            child = self._children.start(program, self._log_dir)
        else:
            log = self._log_dir / f"{name}.log"
            log.touch()
            process = start_program(self._needs, command, {**os.environ, **program.env}, log)
            child = Child(program, process, log, log.stat().st_size)
            self._children.living.append(child)
        self.running[name] = child
        return child

    def slipstream(self, name: str, *arguments: str) -> Child:
        return self.start(name, *SLIPSTREAM, *arguments)

    def kill(self, name: str) -> None:
        """Kill a process and its whole process group with SIGKILL."""
        child = self.running.pop(name)
        child.signal(signal.SIGKILL)
        asyncio.run(self._children.end([child]))

    def log(self, name: str) -> str:
        return (self._log_dir / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the end of every log, for a test that failed."""
        return "\n".join(f"--- {name}\n{self.log(name)[-LOG_SHOWN:]}" for name in self.running)

    def logged(self) -> int:
        """Return the bytes of all logs, which grow while any process works."""
        # A checkpoint may be deleted meanwhile, which `Path.rglob` does not stand.
        named = (Path(folder, name) for folder, _, names in os.walk(self._log_dir) for name in names)
        return sum(file.stat().st_size for file in named if file.suffix == ".log")

    def wait(self, name: str, moves: Callable[[], object]) -> int:
        """Wait until a process ends.

        The test fails if another process fails first, or if `moves` returns the same for `STILL_S` seconds.

        Args:
            name: Name of the process.
            moves: Returns a value that changes while the run makes progress.

        Returns:
            The exit code.
        """
        patience = Patience(moves)
        while not patience.is_over:
            code = self.running[name].poll()
            if code is not None:
                return code
            for other, child in self.running.items():
                if child.poll() not in (None, 0):
                    pytest.fail(f"{other} ended with {child.poll()}:\n{self.log(other)[-LOG_SHOWN:]}")
            time.sleep(0.1)
        pytest.fail(f"{name} does not end:\n{self.logs()}")


@contextmanager
def processes(log_dir: Path, needs: Sequence[str] = ()) -> Iterator[Processes]:
    """Give a context for child processes. At its end all of them are ended."""
    with Children(GRACE_S) as children:
        try:
            yield Processes(children, log_dir, needs)
        finally:
            asyncio.run(children.end(list(children.living)))
