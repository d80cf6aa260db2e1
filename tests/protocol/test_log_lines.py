"""A log says what is alike a few times, and then how often."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipstream.protocol import log_lines
from slipstream.protocol.log_lines import ALIKE, WITHIN_S, Repeated


class Log:
    """A logger with a filtered handler, and its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = self._emit  # type: ignore[method-assign]
        self.repeated = Repeated(self.handler, lambda: self.now)
        self.handler.addFilter(self.repeated)
        self.logger = logging.getLogger("tests.log_lines")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.handlers = [self.handler]

    def _emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.logger.handlers = []
    log.logger.propagate = True


def test_of_lines_that_differ_in_numbers_a_few_are_written_and_the_rest_counted(log: Log) -> None:
    for number in range(1700):
        log.now = number / 1000
        log.logger.warning("request cmpl-%x to port %d failed", 0xA000 + number, number)
    log.logger.warning("something else")
    assert len(log.lines) == ALIKE + 1
    log.now = WITHIN_S + 1
    log.logger.info("the next line of any kind does not have to be a warning: this one comes first")
    log.logger.warning("the server is gone")
    assert log.lines[ALIKE:] == [
        "WARNING something else",
        "INFO the next line of any kind does not have to be a warning: this one comes first",
        "WARNING and 1,695 more like it in 31 s: request cmpl-a000 to port 0 failed",
        "WARNING the server is gone",
    ]


def test_what_comes_now_and_then_and_what_is_no_warning_is_written_each_time(log: Log) -> None:
    for number in range(20):
        log.now = number * WITHIN_S / 4
        log.logger.warning("step %d is late", number)
        for step in range(10):
            log.logger.info("step %d", step)
    assert sum("is late" in line for line in log.lines) == 20
    assert sum("INFO step" in line for line in log.lines) == 200
    assert not any("more like it" in line for line in log.lines)


def test_another_level_and_an_error_of_another_text_are_not_alike(log: Log) -> None:
    for _ in range(ALIKE):
        log.logger.warning("no answer")
    log.logger.error("no answer")
    log.logger.warning("no answer from a")
    assert log.lines[ALIKE:] == ["ERROR no answer", "WARNING no answer from a"]


def test_the_last_lines_of_a_flood_are_counted_without_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the process continues, and when it ends."""
    program = """
import logging, sys, threading
from slipstream.protocol import log_lines
log_lines.WITHIN_S = float(sys.argv[1])
log_lines.set_up()
for number in range(40):
    logging.warning("number %d", number)
for timer in [of for of in threading.enumerate() if isinstance(of, threading.Timer)]:
    if log_lines.WITHIN_S < 1:
        timer.join()
        logging.info("it continues")
"""
    for within_s, last in (("0.2", "INFO root: it continues"), ("60", "WARNING root: and 35 more like it in")):
        ran = subprocess.run([sys.executable, "-c", program, within_s], capture_output=True, text=True, timeout=60)
        lines = [line.split(" ", 2)[2] for line in ran.stderr.splitlines()]
        assert ran.returncode == 0, ran.stderr
        assert len(lines) == ALIKE + (2 if within_s == "0.2" else 1)
        assert lines[ALIKE].startswith("WARNING root: and 35 more like it in")
        assert lines[-1].startswith(last)


def test_a_log_that_goes_somewhere_already_is_left_as_it_is() -> None:
    before = list(logging.getLogger().handlers)
    assert before, "pytest has handlers of its own"
    log_lines.set_up()
    assert logging.getLogger().handlers == before
