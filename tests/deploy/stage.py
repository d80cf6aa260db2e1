"""A run whose processes are stand-ins that act as each test wants them to.

A stand-in notes how it was called and which processes it makes, then runs the script `<role>` of the stage.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slipstream.protocol.config import load
from tests.kit.copies import PipedCopy
from tests.kit.original import Request

LIMIT_S = 60.0

STAND_IN = """#!/usr/bin/env bash
cd "$STAGE"
cores=$(grep Cpus_allowed_list /proc/self/status | cut -f2)
echo "$$|${SLIPSTREAM_TOKEN:-}|${OMP_NUM_THREADS:-}|$cores|$*" >>calls
lives=$(grep -c "|$1 " calls)
source "./$1"
"""

# Each has its own child: to stop that one too is the supervisor's business.
STAYS = "sleep 300 & echo $! >>children; wait"
STUBBORN = f"trap '' TERM; {STAYS}; sleep 300"
FAILS = "sleep 300 & echo $! >>children; echo last words of $1; echo and an Error: of $1 >&2; exit 3"
WAITS_FOR_CHILDREN = "until [ $(cat children | wc -l) = {} ]; do sleep 0.05; done"

# Answers 200 to everything on a port.
ANSWERING = r"""
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.close()
"""


class Call(NamedTuple):
    pid: int
    token: str
    threads: str
    cores: str
    line: str

    @property
    def role(self) -> str:
        return self.line.split()[0]


@dataclass
class Stage:
    """The folder that the stand-ins read and write, and the supervisor that runs on it."""

    folder: Path
    run_file: Path
    process: PipedCopy | None = None

    def __post_init__(self) -> None:
        stand_in = self.folder / "stand-in"
        stand_in.write_text(STAND_IN, encoding="utf-8")
        stand_in.chmod(0o755)
        (self.folder / "answering.py").write_text(ANSWERING, encoding="utf-8")
        config = load(self.run_file)
        self.ports = {"queue": config.queue.port, "vllm": config.vllm.port}
        self.run_dir = config.run_dir
        self.logs = self.run_dir / "logs"
        self.play(queue=STAYS, vllm=STAYS, worker=STAYS, learner=STAYS, preflight="exit 0")

    def answers(self, role: str) -> str:
        """An act: it stays, and is up as the supervisor sees it."""
        return f"sleep 300 & echo $! >>children; {sys.executable} -I -S answering.py {self.ports[role]}"

    def waits_for(self, role: str) -> str:
        """A command that ends once the port of `role` is open."""
        return f"until (: </dev/tcp/127.0.0.1/{self.ports[role]}) 2>/dev/null; do sleep 0.05; done"

    def play(self, **acts: str) -> None:
        for role, act in acts.items():
            (self.folder / role).write_text(act + "\n", encoding="utf-8")

    def start(
        self, *arguments: str, ignore: Sequence[signal.Signals] = (), stdout: int | None = None, **env: str
    ) -> PipedCopy:
        """Start the supervisor, which leads its own process group as in a terminal's foreground.

        Args:
            *arguments: Further words on its command line.
            ignore: Signals that it ignores from its start.
            stdout: Descriptor of its stdout; None for a pipe.
            **env: Variables to add to this process's environment.
        """
        command = ["up", str(self.run_file), "--deploy.grace_s", "1", "--deploy.restart", "0", *arguments]
        stage = {"STAGE": str(self.folder), "STAND_IN": str(self.folder / "stand-in")}
        request = Request(
            "tests.deploy.staged_up", tuple(command), {**os.environ, **stage, **env}, os.getcwd(), tuple(ignore)
        )
        self.process = PipedCopy(["slipstream.deploy.cli"], request, stdout)
        return self.process

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, ignore=(), stdout=None, **env)
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess([], process.wait(), out, err)

    def calls(self, role: str | None = None) -> list[Call]:
        """In their order; without the preflight's."""
        file = self.folder / "calls"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        calls = [Call(int(pid), *rest) for pid, *rest in (line.split("|", 4) for line in lines)]
        return [call for call in calls if call.role != "preflight" and role in (None, call.role)]

    def children(self) -> list[int]:
        file = self.folder / "children"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        """Return the ids of the started processes that still run."""
        return [pid for pid in [*(call.pid for call in self.calls()), *self.children()] if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.02)
