"""Runs rank 0 and its followers in other processes, so that the process of the tests keeps its one rank.

with Ranks(config) as ranks:
    state = ranks.call(some_function, argument)   # some_function(trainer, argument), in the process of rank 0

All ranks are copies of one process that has imported the learner, because importing torch takes seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slipstream.protocol.config import RunConfig
from tests.kit.copies import Copy, start_function

# Long enough for all ranks to load torch on a busy machine.
ANSWERS_WITHIN_S = 240.0
STDERR = 2
LEARNER_MODULES = ("slipstream.learner.run", "slipstream.learner.__main__", "tests.kit.ranks")
ROOT = Path(__file__).parents[2]


class Ranks:
    """Runs as many ranks as the run file says while the context is open. `call` runs one function at a time.

    Args:
        config: The run file.
        resume: Whether to start from the run's newest checkpoint.
        first: Called in each process with its rank, before the rank begins. Not called if `fresh`.
        fresh: Whether to start each process as the learner itself does, which imports everything there.
    """

    def __init__(
        self,
        config: RunConfig,
        resume: bool = False,
        first: Callable[[int], object] | None = None,
        fresh: bool = False,
    ) -> None:
        self._ours, self._theirs = multiprocessing.Pipe()
        self._settings = (config.model_dump_json(), resume, first, fresh)
        self._process: Copy | subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        pipe = self._theirs.fileno()
        if self._settings[-1]:
            command = [sys.executable, "-m", "tests.kit.ranks", str(pipe)]
            self._process = subprocess.Popen(command, pass_fds=[pipe], env={**os.environ, "PYTHONPATH": str(ROOT)})
            self._ours.send((bytes(multiprocessing.current_process().authkey), self._settings))
        else:
            self._process = start_function(LEARNER_MODULES, _lead, *self._settings, pipes=[pipe])
        self._theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        with suppress(OSError):  # it has been killed
            self._ours.send(None)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(trainer, *arguments)` in the process of rank 0 and return its result.

        Raises:
            AssertionError: The function failed, with its traceback, or did not end within `ANSWERS_WITHIN_S` seconds.
        """
        self._ours.send((function, arguments))
        assert self._ours.poll(ANSWERS_WITHIN_S), f"{function.__name__} does not end"
        ok, answer = self._ours.recv()
        assert ok, answer
        return answer


def _lead(run_file: str, resume: bool, first: Callable[[int], object] | None, fresh: bool, fd: int) -> None:
    pipe = Connection(fd)
    config = RunConfig.model_validate_json(run_file)
    if not fresh:
        # Followers must be forked before this process has a thread.
        waiting: list[WaitingFollower] = []
        for rank in range(1, config.learner.ranks):
            waiting.append(WaitingFollower(rank, first, [pipe, *(of.stdin for of in waiting)]))
        from slipstream.learner.ranks import launch

        launch.start_rank = lambda rank, environment: waiting[rank - 1].begin(environment)  # type: ignore
        if first is not None:
            first(0)
    from slipstream.learner.ranks import launch
    from slipstream.learner.run import build_trainer
    from slipstream.learner.start import starting_point

    with launch.lead_team(config, launch.this_rank(config)) as team:
        trainer = build_trainer(config, starting_point(config, resume), team)
        while (work := pipe.recv()) is not None:
            function, arguments = work
            try:
                pipe.send((True, function(trainer, *arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


class WaitingFollower:
    """Runs a copy of this process that becomes a follower when it gets its environment. It has methods of a `Popen`.

    Args:
        rank: Its rank.
        first: Called in the copy with the rank, before the follower begins.
        not_there: Pipes of other processes to close in the copy, so that those processes notice when a pipe ends.
    """

    def __init__(self, rank: int, first: Callable[[int], object] | None, not_there: list[Any]) -> None:
        reads, writes = os.pipe()
        self.stdin = os.fdopen(writes, "wb")
        self._reaping = threading.Lock()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_follow, args=(rank, first, reads, [self.stdin, *not_there]), daemon=True
        )
        self._process.start()
        os.close(reads)

    def begin(self, environment: Mapping[str, str]) -> Self:
        self.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
        self.stdin.flush()
        return self

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("a follower", timeout or 0.0)
        with self._reaping:  # several threads wait, and only one of them would get the exit code
            self._process.join()
            assert self._process.exitcode is not None
            return self._process.exitcode


def _follow(rank: int, first: Callable[[int], object] | None, reads: int, not_here: list[Any]) -> None:
    from slipstream.learner.__main__ import follow_rank_0

    for pipe in not_here:
        pipe.close()
    sys.stdin = os.fdopen(reads)
    told = sys.stdin.readline()
    if not told:  # rank 0 has ended, or never began
        return
    os.environ.update(json.loads(told) | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.dup2(STDERR, 1)
    if first is not None:
        first(rank)
    sys.exit(follow_rank_0())


def _lead_afresh(fd: int) -> None:
    pipe = Connection(fd)
    multiprocessing.current_process().authkey, settings = pipe.recv()
    run_file, resume, first, fresh = settings
    _lead(run_file, resume, first, fresh, os.dup(fd))


if __name__ == "__main__":
    _lead_afresh(int(sys.argv[1]))
