"""Ends processes whose owner is gone and could not end them itself: the process groups of isolated tools, MCP servers,
and the processes of `slipstream up`.

Invariant: when the owner is gone, every process group that it added and did not remove is ended.

An owner ends its process groups itself, but it cannot after SIGKILL. The processes cannot either: one that holds the
interpreter lock runs no code that could notice. Each owner therefore has one small guard process, to which
`ProcessGuard` reports the groups. The guard does not reach a process that made a session or its own group.

Where a library starts a process and tells nobody its number, as that of MCP does, `guarded_command` puts a guard around
the one command.

The file runs as a program and uses nothing but the standard library, so that it takes little memory next to a run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_POLL_S = 0.1

_PROGRAM = (sys.executable, "-I", "-S", __file__)


class ProcessGuard:
    """Controls the guard process from its owner. The process starts with the first group. Any thread may call.

    Args:
        grace_s: Seconds from SIGTERM to SIGKILL. If it is 0, groups are killed at once.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process identifier of the guard, or None before it starts."""
        return None if self._process is None else self._process.pid

    def add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            if self._process is None or self._process.poll() is not None:  # Nobody yet, or somebody ended it.
                self._start()
            else:
                self._tell(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """Forget a group that has ended, because the system may soon give its number to another group."""
        with self._lock:
            self._groups.discard(group)
            self._tell(b"-%d\n" % group)

    def replace_if_ended(self) -> None:
        """Start another guard process if somebody ended the last one."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._start()

    def close(self, within_s: float = 5.0) -> None:
        """End the guard process, which ends the groups that were not removed. Late guard processes are killed."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        # In its own session, so that a signal to the owner's group does not end the guard first.
        self._process = subprocess.Popen(
            [*_PROGRAM, str(os.getpid()), str(self._grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self._tell(b"".join(b"+%d\n" % group for group in self._groups))

    def _tell(self, lines: bytes) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # Somebody killed the guard.
                self._process.stdin.write(lines)


def guarded_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and ends with it, by its exit code.

    Start it as the leader of a process group. It kills the group when this process is gone. On systems other than Linux
    it does not notice that.
    """
    return [*_PROGRAM, str(os.getpid()), "--run", *command]


def signal_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group, 0 to none. Returns False if no process is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS, for a group of zombies.
        return False
    return True


def _guard(owner: int, grace_s: float) -> None:
    """Collect groups until the input or the owner ends, then end the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched = [0, *_end_of(owner)]  # The owner is watched too, because a copy of it may hold the input open.
    gone = os.getppid() != owner  # It ended before it could be watched. What it wrote is still read.
    groups: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select(watched, [], [], 0.0 if gone else None)
        data = os.read(0, 65536) if 0 in ready else b""
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    deadline = time.monotonic() + grace_s
    if grace_s:
        groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)


def _run(owner: int, command: Sequence[str]) -> int:
    """Run a command in this process's group, and kill the group if the owner ends first. Returns the exit code."""
    # The whole group gets this signal, and this process must wait while the command ends. It has a handler and is not
    # ignored, because the command would inherit that.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    ends = _end_of(owner)
    if os.getppid() != owner:
        return 1
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if ends:
        ended, _, _ = select.select([*ends, *_end_of(process.pid)], [], [])
        if ends[0] in ended:
            os.killpg(os.getpgrp(), signal.SIGKILL)
    code = process.wait()
    return 128 - code if code < 0 else code


def _end_of(pid: int) -> list[int]:
    """Return a descriptor that can be read when the process has ended. Only Linux has them; elsewhere none is
    returned."""
    with contextlib.suppress(OSError, AttributeError):
        return [os.pidfd_open(pid)]
    return []


if __name__ == "__main__":
    if sys.argv[2] == "--run":
        sys.exit(_run(int(sys.argv[1]), sys.argv[3:]))
    _guard(int(sys.argv[1]), float(sys.argv[2]))
