"""Runs programs within limits of time, memory and output.

Invariant: a program that exceeds its time is killed with all that it started, and what it writes beyond the limit is
read and thrown away.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from slipstream.rollout_worker.user_code.values import encodable

_READ_BYTES = 1 << 16
# Seconds for a killed program's pipes to close.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a program.

    Attributes:
        seconds: Wall-clock time.
        memory_mb: Memory; None for no limit.
        output_characters: Output that is kept: the first and the last half.
    """

    seconds: float = 30.0
    memory_mb: int | None = 512
    output_characters: int = 20_000


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a program.

    Attributes:
        output: What it wrote, to stdout and stderr.
        exit_code: Negative for a signal; None where its time was over.
    """

    output: str
    exit_code: int | None

    @property
    def text(self) -> str:
        """The output, and after it how the program ended where it did not end well."""
        if self.exit_code == 0:
            return self.output
        how = "its time was over" if self.exit_code is None else f"it ended with code {self.exit_code}"
        return f"{self.output}\n({how})".lstrip("\n")


class Kept:
    """Keeps the beginning and the end of a stream."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._head, self._tail, self._size = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def text(self) -> str:
        tail = self._tail[-self._half :]
        left_out = self._size - len(self._head) - len(tail)
        note = f"\n... ({left_out} bytes left out) ...\n" if left_out else ""
        return encodable(self._head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace"))


def run_program(
    command: Sequence[str],
    limits: Limits,
    *,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    limits_memory: bool = True,
) -> Ran:
    """Run a program to its end, or to a limit.

    Args:
        command: The program and its arguments.
        limits: What it may use.
        stdin: Its input.
        environment: Its environment variables; None for this process's.
        folder: Its working directory.
        limits_memory: Whether the limit of memory is set here, for each of its processes.

    Raises:
        RuntimeError: It cannot be started.
    """
    process = start_program(command, limits if limits_memory else None, environment, folder)
    kept = Kept(limits.output_characters)
    assert process.stdin is not None
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, kept), daemon=True)
    writer = threading.Thread(target=_write, args=(process.stdin, stdin), daemon=True)
    reader.start()
    writer.start()
    ends = time.monotonic() + limits.seconds
    exit_code: int | None = None
    try:
        exit_code = process.wait(limits.seconds)
        reader.join(max(0.0, ends - time.monotonic()))  # its own child may still write
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_program(process)
        reader.join(_GRACE_S)
    return Ran(kept.text, exit_code)


def own_variables() -> dict[str, str]:
    """Return this process's environment variables, without those of Slipstream, among which are its tokens."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}


def start_program(
    command: Sequence[str],
    limits: Limits | None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, with pipes to it.

    Raises:
        RuntimeError: It cannot be started.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be started: {error}") from None
    if limits is not None and limits.memory_mb is not None and sys.platform == "linux":
        most = limits.memory_mb << 20
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
    return process


def end_program(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all that it started, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


class HelperPool:
    """Processes that answer one request at a time, each started when it is first needed. One that has ended, or with
    which something went wrong, is replaced.

    Args:
        start: Starts one, with pipes to it.
        count: Maximum number of them.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], count: int) -> None:
        self._start = start
        self.idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(count):
            self.idle.put(None)

    @contextlib.contextmanager
    def one(self) -> Iterator[subprocess.Popen[bytes]]:
        """Wait for one that is idle. It is ended where the context ends with an error."""
        helper = self.idle.get()
        try:
            if helper is None or helper.poll() is not None:
                helper = self._start()
            yield helper
        except BaseException:
            if helper is not None:
                _end_helper(helper)
                helper = None
            raise
        finally:
            self.idle.put(helper)

    def close(self) -> None:
        """End the idle ones."""
        for _ in range(self.idle.qsize()):
            helper = self.idle.get()
            if helper is not None:
                _end_helper(helper)
            self.idle.put(None)


def _end_helper(helper: subprocess.Popen[bytes]) -> None:
    end_program(helper)
    if helper.stdout is not None:
        helper.stdout.close()


def _read(stream: IO[bytes], kept: Kept) -> None:
    with contextlib.suppress(OSError, ValueError), stream:
        while data := os.read(stream.fileno(), _READ_BYTES):
            kept.add(data)


def _write(stream: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError, ValueError), stream:
        stream.write(text.encode("utf-8", "replace"))
