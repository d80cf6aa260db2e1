"""Kills the processes that isolated tools started if their worker is killed outright.

Invariant: when the worker is gone, every process group that it added and did not remove is killed.

A worker ends the process groups of its children itself, but it cannot after SIGKILL. The children cannot either: the
kernel kills them, so that even one that holds the interpreter lock ends. Each worker therefore has one small guard
process. The worker reports each group to it, and the guard kills the groups that are left when the worker is gone. It
does not reach a process that made a session or a group of its own.

The file runs as a program and uses nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading


class GroupGuard:
    """Controls the guard process from the worker. The process starts with the first group. Any thread may call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def add(self, group: int) -> None:
        with self._lock:
            if self._process is None:
                # In a session of its own, so that a signal to the worker's group does not end the guard first.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._tell(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """Forget a group that was killed, because the system may soon give its number to another group."""
        with self._lock:
            self._tell(b"-%d\n" % group)

    def close(self) -> None:
        """End the guard, which kills the groups that were not removed."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _tell(self, line: bytes) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # Somebody killed the guard.
                os.write(self._process.stdin.fileno(), line)


def main(worker: int) -> None:
    """Collect groups until the input or the worker ends, then kill the groups that are left.

    The worker is watched too, because a copy of it may hold the input open.

    Args:
        worker: Process identifier of the worker.
    """
    watched = []
    with contextlib.suppress(OSError, AttributeError):  # Only Linux has pidfd_open.
        watched.append(os.pidfd_open(worker))
    groups: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, *watched], [], [])
        data = os.read(0, 65536) if 0 in ready else b""
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
