"""Child processes: each in a process group of its own, with its output in a log file, and none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.first_error import first_error
from deploy.programs import Program
from deploy.run import watchdog

POLL_S = 0.05

# What SIGKILL does not end within this time hangs in the kernel, and nobody can end it.
KILLED_WITHIN_S = 5.0

TAIL_BYTES = 64 * 1024

MAX_LINE = 400

# Colours and whatever else would act on a terminal.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Child:
    """One process from its start to its end."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.program = program
        self.name = program.name
        self.pid = process.pid
        self.log = log
        self._log_start = log_start
        self._process = process
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """The exit code, 128 + n for signal n; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._ended.set()
        return 128 - code if code < 0 else code

    async def wait(self) -> int:
        """The exit code, once `Children.reap` has seen the end."""
        await self._ended.wait()
        code = self.poll()
        assert code is not None
        return code

    def signal(self, number: int) -> bool:
        """Send a signal, 0 for none, to the process and all that it started; False: none of them is left."""
        self.poll()  # a process that has ended counts until its code is read
        return watchdog.signal_group(self.pid, number)

    def tail(self) -> list[str]:
        """The end of what it has logged, fit for a terminal."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
            return [_CONTROL.sub("", line)[:MAX_LINE] for line in text.splitlines()]
        return []

    def first_error(self) -> str | None:
        """What its tail says went wrong first."""
        return first_error(self.tail())


class Children:
    """Starts child processes and ends them, grandchildren included; what has not ended `grace_s` after SIGTERM is
    killed. Use it as a context manager. A watchdog ends them if this process is killed outright.
    """

    def __init__(self, grace_s: float) -> None:
        self.living: list[Child] = []
        self._grace_s = grace_s

    def __enter__(self) -> Self:
        self._watchdog = self._new_watchdog()
        return self

    def _new_watchdog(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(self._grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(KILLED_WITHIN_S)  # all children have ended: it has nothing to do
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()

    def start(self, program: Program, log_dir: Path, stdout: int | None = None) -> Child:
        """`stdout`: the terminal for a program that writes to it; None: this process's. Raises `OSError` where the
        process cannot be started or its log not be written."""
        log_dir.mkdir(exist_ok=True)
        log = log_dir / f"{program.name}.log"
        with log.open("ab") as file, _on_cores(program.cores):
            log_start = log.stat().st_size
            process = subprocess.Popen(
                program.command,
                env={**os.environ, **program.env},
                stdin=subprocess.DEVNULL,
                stdout=stdout if program.terminal == "stdout" else file,
                stderr=None if program.terminal == "stderr" else file,
                start_new_session=True,
            )
        self._tell_watchdog(f"+{process.pid}\n")
        child = Child(program, process, log, log_start)
        self.living.append(child)
        return child

    def reap(self) -> None:
        """Look which children have ended, and wake those who wait for one: to be called on SIGCHLD."""
        for child in self.living:
            child.poll()
        if self._watchdog.poll() is not None:
            self._watchdog = self._new_watchdog()
            for child in self.living:
                self._tell_watchdog(f"+{child.pid}\n")

    async def end(self, children: Collection[Child], grace_s: float | None = None) -> None:
        """End them and all that they started. Where a child has ended already, what it left behind."""
        for child in children:
            child.signal(signal.SIGTERM)
        if not await _gone(children, self._grace_s if grace_s is None else grace_s):
            for child in children:
                child.signal(signal.SIGKILL)
            await _gone(children, KILLED_WITHIN_S)
        for child in children:
            child.poll()
            self.living.remove(child)
            self._tell_watchdog(f"-{child.pid}\n")

    def _tell_watchdog(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; `reap` starts a new one
            self._watchdog.stdin.write(line.encode())


def describe_end(name: str, code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"{name} ended with code {code} ({signal.Signals(code - 128).name})"
    return f"{name} ended with code {code}"


async def _gone(children: Collection[Child], within_s: float) -> bool:
    """Grandchildren are not ours to wait for: their end can only be polled."""
    deadline = time.monotonic() + within_s
    while [child for child in children if child.signal(0)]:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


@contextlib.contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """What is started meanwhile runs on `cores`; a child keeps its parent's affinity."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
