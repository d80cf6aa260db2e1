"""Kills what isolated tools have started when their worker is killed outright.

A worker ends its children's process groups itself, but not after SIGKILL, and the children get no chance then: the
kernel kills them, so that even one that holds the interpreter lock ends. So one small process for a worker is told of
each group, and kills those that are left when the worker is gone. It does not reach a process that made a session or
a group of its own. Run as a program, with nothing but the standard library.
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
    """The guard, as its worker sees it. It is started with the first group. Any thread may call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def add(self, group: int) -> None:
        with self._lock:
            if self._process is None:
                # In a session of its own, so that what is sent to the worker's group does not end it first.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._tell(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """It was killed: its number may be another's soon."""
        with self._lock:
            self._tell(b"-%d\n" % group)

    def close(self) -> None:
        """End it, and the groups that were not removed."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _tell(self, line: bytes) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # somebody killed it
                os.write(self._process.stdin.fileno(), line)


def main(worker: int) -> None:
    """Until the input ends, or the process `worker` does, of which a copy may hold the input open."""
    watched = []
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
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
