"""The other ranks of a learner on one machine, as children of rank 0.

Rank 0 is the process that was started: signals, terminal and exit code are its own. A child that dies is noticed; a
child whose parent dies, however that ends, finds its standard input closed and ends as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import learner

STDERR = 2
# From the end of rank 0's work: long enough to read one command.
ENDS_WITHIN_S = 10.0


class Children:
    """Ranks 1 to `count` - 1. `on_lost` is called, on a thread, with what is known of one that ended by itself."""

    def __init__(self, count: int, environment: Mapping[str, str], on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._processes = [_start(rank, environment) for rank in range(1, count)]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def close(self) -> None:
        """End them: those that have read that there is nothing left to do end by themselves."""
        self._closing.set()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + ENDS_WITHIN_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self, rank: int) -> None:
        """End one that does not answer: then the connections to it break, and nobody waits for it."""
        self._processes[rank - 1].kill()

    def kill_all(self) -> None:
        """Right before this process ends: one that is stopped does not read that its pipe has closed."""
        for process in self._processes:
            process.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing.is_set():
            return
        self._on_lost(f"rank {rank} of the learner (process {process.pid}) {_how(code)}")


def _how(code: int) -> str:
    """How it ended, and where to look: who is killed has written nothing down."""
    if code >= 0:
        return f"ended with code {code}: what it wrote in the learner's log says why"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"was ended from outside, by {name}: where nobody did that, the machine was most likely out of memory (the "
            f"kernel's log, dmesg, says so): give the learner more, or lower learner.token_budget"
        )
    if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return f"was ended from outside, by {name}"
    return f"crashed, by {name}: what it wrote in the learner's log, if anything, says where"


def _start(rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command: Sequence[str] = (sys.executable, "-P", "-m", "learner.ranks.follower")
    paths = [str(Path(learner.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # What a terminal shows of a run is rank 0's.
    return subprocess.Popen(command, env={**os.environ, **environment, **own}, stdin=subprocess.PIPE, stdout=STDERR)
