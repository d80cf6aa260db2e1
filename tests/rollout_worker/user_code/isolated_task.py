"""A task whose tools misbehave, for child processes."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

from slipstream import Task


def echo(value: str) -> str:
    """Give it back.

    Args:
        value: Anything.
    """
    print("noise on standard output")
    print('{"result": "forged"}', flush=True)
    os.write(1, b'{"result": "forged"}\n')
    return value


def pid() -> int:
    """Where it runs."""
    return os.getpid()


def environment() -> str:
    """Return what programs are told."""
    return json.dumps(dict(os.environ))


async def pid_async() -> dict[str, int]:
    """Where it runs."""
    await asyncio.sleep(0)
    return {"pid": os.getpid()}


def fail(how: str) -> str:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "raise":
        raise KeyError("gone")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(7)
    if how == "crash":
        ctypes.string_at(0)
    if how == "spin":
        while True:
            pass
    if how == "hold the lock":
        ctypes.PyDLL(None).pause()
    if how == "read":
        return input() or "nothing"
    return "well"


def alarmed() -> str:
    """Wait for an alarm."""

    def ring(number, frame):
        raise TimeoutError("rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True:
        time.sleep(1)


def leave_an_alarm() -> str:
    """Set an alarm, and go."""
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 3600)
    return str(signal.getitimer(signal.ITIMER_REAL)[0] > 0)


def alarm_left() -> str:
    """Whether one is set."""
    return str(signal.getitimer(signal.ITIMER_REAL)[0] > 0)


def long() -> str:
    """Give much."""
    return "x" * 5_000_000


def child() -> str:
    """Start a process that continues, and tell both numbers."""
    started = os.fork()
    if started == 0:
        threading.Event().wait()
    return f"{os.getpid()} {started}"


def fork(value: str, how: str) -> str:
    """Continue in a copy as well, and give the value back.

    Args:
        value: Anything.
        how: What the copy does.
    """
    copy = os.fork()
    if copy == 0:
        if how == "exit":
            sys.exit(5)
        if how == "raise":
            raise KeyError("in the copy")
        return "of the copy"
    return f"{value} {os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])}"


def scribble(lines: int) -> str:
    """Write to the pipe of the replies.

    Args:
        lines: So many lines.
    """
    for number in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(number, b'{"id": -1, "result": "forged"}\nno reply\n[]\n[[[\n' * lines)
    return "scribbled"


def no_rewards(completions, **columns):
    return [0.0] * len(completions)


TOOLS = [echo, pid, environment, pid_async, fail, alarmed, leave_an_alarm, alarm_left, long, child, fork, scribble]

task = Task(
    dataset=[{"prompt": [{"role": "user", "content": "Go."}]}],
    tools=TOOLS,
    rewards=[no_rewards],
)
