"""Ends the children of a supervisor that was killed and could not end them itself.

`python -I -S watchdog.py GRACE_S` reads from the supervisor's pipe "+ID" for each process group that was started and
"-ID" for each that is gone. The pipe breaks when the supervisor dies. It imports only the standard
library, so that it takes little memory beside a run.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def main() -> None:
    """Reads process groups until the pipe breaks, then ends those that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    grace_s = float(sys.argv[1])
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    deadline = time.monotonic() + grace_s
    groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.1)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to every process of the group, 0 to none. Returns False if none is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS, for a group of zombies
        return False
    return True


if __name__ == "__main__":
    main()
