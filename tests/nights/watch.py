"""Reads all that a run says: its terminal, that of processes next to it, and its status, each line with its time."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from slipstream.protocol import access

ASK_EVERY_S = 0.5
# Their logs are on other machines: a person reads the run's terminal, and its status.
UNREAD = ("far", "joined")
# Reports of steps, which tell of no fault.
_STEP = re.compile(r"^(\S+ )?step +\d+/")
# A figure, which changes as a wait lasts; not the number in a name, such as vllm-0.
_NUMBERS = re.compile(r"(?<![\w-])\d+(\.\d+)?")


@dataclass(frozen=True)
class Line:
    """`at`: seconds of `time.monotonic`; `who`: the terminal that it stood on, or `status`."""

    at: float
    who: str
    text: str

    def __str__(self) -> str:
        return f"{self.who}: {self.text}"


class Watch:
    """Collects lines from its start to `close`.

    Attributes:
        lines: Everything, in order. A line of the status stands here when it is new: it was not there, or with other
            words, half a second before.
        statuses: How often the status was read.
    """

    def __init__(self, queue_url: str, token: str) -> None:
        self.lines: list[Line] = []
        self.status: dict[str, Any] | None = None
        self.steps: list[tuple[float, int]] = []
        self._url = queue_url + access.STATUS
        self._token = token
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def read(self, name: str, process: subprocess.Popen[str]) -> None:
        """Read a process's output from now on."""

        def reading() -> None:
            assert process.stdout is not None
            with suppress(ValueError, OSError):
                for text in process.stdout:
                    self.lines.append(Line(time.monotonic(), name, text.rstrip()[:2000]))

        threading.Thread(target=reading, name=f"reads {name}", daemon=True).start()

    def add(self, who: str, text: str) -> None:
        """Add what somebody next to the run was told."""
        self.lines.append(Line(time.monotonic(), who, text))

    def first(self, pattern: str, since: float) -> Line | None:
        """The first line from `since` on that a pattern is in."""
        found = re.compile(pattern)
        lines = (
            line
            for line in self.lines
            if line.at >= since and line.who not in UNREAD and _STEP.match(line.text) is None
        )
        return next((line for line in lines if found.search(str(line))), None)

    def step(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def step_s(self) -> float:
        """What a step takes: the median of those that were made; 0 before the second."""
        made = [(after[0] - at) / (after[1] - step) for (at, step), after in pairwise(self.steps) if after[1] > step]
        return median(made) if made else 0.0

    def _ask(self) -> None:
        before: set[str] = set()
        while not self._over.wait(ASK_EVERY_S):
            self.status = status = self._status()
            if status is None:
                continue
            if not self.steps or self.steps[-1][1] != status["step"]:
                self.steps.append((time.monotonic(), status["step"]))
            # Figures of a wait change as it lasts; a notice stays as it was given.
            now = {alike(text): text for text in told(status)}
            for name in sorted(now.keys() - before):
                self.lines.append(Line(time.monotonic(), "status", now[name]))
            before = set(now)

    def _status(self) -> dict[str, Any] | None:
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {self._token}"})
        with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=2) as response:
            found: dict[str, Any] = json.load(response)
            return found
        return None


def alike(text: str) -> str:
    """Return what two lines of the status have in common that are one line to a reader."""
    return text if text.startswith("notice") else _NUMBERS.sub("0", text)


def told(status: dict[str, Any]) -> Iterator[str]:
    """What a status tells of faults, a line each."""
    for server in status["servers"]:
        if server["state"] != "serving" or server.get("waits_for"):
            why = server.get("waits_for") or ""
            yield f"server {server['name']} is {server['state']}: {server.get('reason')} {why}".rstrip()
    for worker in status["workers"]:
        if worker["does"] in ("quiet", "silent", "refused", "left", "waiting_for_servers"):
            yield f"worker {worker['worker_id']} is {worker['does']}: {worker.get('reason')}"
    for wait in status["waits"]:
        if wait["since_s"] >= 2:
            yield f"{wait['who']} waits for {wait['what']}"
    for notice in status["notices"]:
        yield f"notice {notice.get('who') or ''}: {notice['text']}"
    for cause in status["diagnosis"]:
        yield f"diagnosis {cause['about']}: {cause['text']}"
    if status["stall"]["stalled"]:
        yield f"stalled: {status['stall']['why']}"
    if status.get("gave_up"):
        yield f"gave up: {status['gave_up']}"
