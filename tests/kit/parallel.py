"""Runs tests side by side, in copies of the one process that has collected them.

`pytest --copies N` collects once, which takes as long as importing torch, and forks N copies. Each takes the tests of
one file after another, so that fixtures of a module are made once. Of the groups that are many processes themselves, so
many run at once that each gets on. A copy that dies fails the test that it ran, and a new copy takes its other tests.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

FORK = multiprocessing.get_context("fork")
DEATH_SEEN_WITHIN_S = 1.0
HEAVY = 2
PR_SET_PDEATHSIG = 1


class ParallelRun:
    """Runs a session's tests in copies of this process.

    Args:
        session: The session, whose tests are collected.
        copies: Number of copies.
        group_of: Returns the group of a test. One copy runs all tests of a group; groups are begun in the order of
            their first tests.
        is_heavy: Whether a test is among those of which no more than `HEAVY` groups run at once.
    """

    def __init__(
        self,
        session: pytest.Session,
        copies: int,
        group_of: Callable[[pytest.Item], str],
        is_heavy: Callable[[pytest.Item], bool] = lambda item: False,
    ) -> None:
        self._session = session
        self._copies = copies
        groups: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            groups.setdefault(group_of(item), []).append(index)
        self._waiting = deque(groups.values())
        self._is_heavy = is_heavy
        self._living: dict[Connection, _Copy] = {}
        self._stop: BaseException | None = None

    def run(self) -> None:
        """Run all tests.

        Raises:
            Failed: As many tests failed as `--maxfail` allows.
            Interrupted: A plugin ended the session.
        """
        gc.collect()
        gc.freeze()  # a collection of garbage in a copy leaves the memory that all copies share alone
        try:
            while self._living or (self._waiting and not self._stop):
                while len(self._living) < self._copies and not self._stop and self._next() is not None:
                    self._fork()
                for pipe in connection.wait(list(self._living), DEATH_SEEN_WITHIN_S):
                    assert isinstance(pipe, Connection)
                    self._hear(self._living[pipe])
                # A pipe stays open after a death while a child of the dead copy holds it.
                for copy in [copy for copy in self._living.values() if not copy.process.is_alive()]:
                    self._hear(copy)
                self._look_for_a_stop()
        finally:
            for copy in self._living.values():
                copy.process.terminate()
            for copy in self._living.values():
                copy.process.join()
            gc.unfreeze()
        if self._stop:
            raise self._stop

    def _look_for_a_stop(self) -> None:
        """Tell all copies to end after the tests that they run, if the session is to end early."""
        if self._stop:
            return
        if self._session.shouldfail:
            self._stop = self._session.Failed(self._session.shouldfail)
        elif self._session.shouldstop:
            self._stop = self._session.Interrupted(self._session.shouldstop)
        if self._stop:
            for copy in self._living.values():
                copy.send(None)

    def _fork(self) -> None:
        ours, theirs = FORK.Pipe()
        not_theirs = [ours, *self._living]
        process = FORK.Process(target=_run_groups, args=(self._session, theirs, not_theirs))
        process.start()
        theirs.close()
        self._living[ours] = _Copy(ours, process)

    def _hear(self, copy: _Copy) -> None:
        """Take one message of a copy, or its death."""
        try:
            if not copy.pipe.poll():
                raise EOFError
            kind, *content = copy.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._bury(copy)
            return
        hook = self._session.config.hook
        if kind == "next":
            copy.heavy = False
            if (group := None if self._stop else self._next()) is not None:
                self._waiting.remove(group)
                copy.heavy = self._is_heavy_group(group)
            copy.send(group)
        elif kind == "start":
            copy.runs = True
            item = self._session.items[copy.pending[0]]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content[0])
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            _record_warning(self._session.config, *content)
        elif kind == "finish":
            item = self._session.items[copy.pending.pop(0)]
            copy.runs = False
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _next(self) -> list[int] | None:
        """Return the first group that may begin now. Where only heavy ones are left, who runs the others takes them."""
        heavy = sum(copy.heavy for copy in self._living.values())
        return next((group for group in self._waiting if heavy < HEAVY or not self._is_heavy_group(group)), None)

    def _is_heavy_group(self, group: list[int]) -> bool:
        return self._is_heavy(self._session.items[group[0]])

    def _bury(self, copy: _Copy) -> None:
        """Report the test that a dead copy ran as failed, and give its other tests back."""
        del self._living[copy.pipe]
        copy.process.join()
        if copy.runs:
            item = self._session.items[copy.pending.pop(0)]
            text = f"the process that ran this test ended with {copy.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        elif copy.process.exitcode:
            self._session.shouldfail = f"a copy of pytest ended with {copy.process.exitcode} between tests"
        if copy.pending:
            self._waiting.appendleft(copy.pending)


class _Copy:
    """Is what the original knows of a copy.

    Attributes:
        pending: Indices of the tests that it has and that have not ended.
        runs: Whether it runs the first of them now.
        heavy: Whether they are heavy.
    """

    def __init__(self, pipe: Connection, process: BaseProcess) -> None:
        self.pipe = pipe
        self.process = process
        self.pending: list[int] = []
        self.runs = False
        self.heavy = False

    def send(self, group: list[int] | None) -> None:
        self.pending += group or []
        with suppress(BrokenPipeError):  # it has ended
            self.pipe.send(group)


def _run_groups(session: pytest.Session, pipe: Connection, not_ours: Sequence[Connection]) -> None:
    """Run groups of tests in this copy until the original has no more."""
    with suppress(AttributeError, OSError):  # elsewhere than on Linux it ends with its test
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in not_ours:
        other.close()
    plugins = session.config.pluginmanager
    # The original prints, and counts failures.
    for name in ("terminalreporter", "lfplugin", "stepwiseplugin", "_junitxml"):
        if (plugin := plugins.get_plugin(name)) is not None:
            plugins.unregister(plugin)
    plugins.register(_Terminal(session.config), "terminalreporter")
    plugins.register(_Reporter(session.config, pipe))
    plugins.unregister(session)
    # Output that is captured goes to a file, which copies must not share.
    capture = plugins.get_plugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()
    ended = False
    with suppress(KeyboardInterrupt):  # the original hears it too
        while not ended and (group := _next_group(pipe)):
            for index, following in zip(group, [*group[1:], None], strict=True):
                if ended := pipe.poll():  # the session ends early
                    break
                pipe.send(("start",))
                # After a group only fixtures of the session stay.
                next_item = session if following is None else session.items[following]
                session.items[index].config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=next_item)
                pipe.send(("finish",))
    session._setupstate.teardown_exact(None)
    capture.stop_global_capturing()


def _next_group(pipe: Connection) -> list[int]:
    pipe.send(("next",))
    return pipe.recv() or []


class _Reporter:
    """Sends what the hooks of this copy are told to the original."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        told = warning_message
        text = f"{told.category.__name__}: {told.message}"
        self._pipe.send(("warning", text, told.filename, told.lineno, when, nodeid))


def _record_warning(config: pytest.Config, text: str, file: str, line: int, when: Any, nodeid: str) -> None:
    message = warnings.WarningMessage(UserWarning(text), UserWarning, file, line)
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
    )


class _Terminal:
    """Is what pytest-timeout asks for a terminal: this copy's stderr, which is captured with the test's."""

    def __init__(self, config: pytest.Config) -> None:
        self._tw = create_terminal_writer(config, sys.__stderr__)
