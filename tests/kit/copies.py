"""Starts programs and functions in milliseconds, as copies of one process that has imported what they import.

That process, the original, is `tests/kit/original.py`. It begins with the first copy, imports for each copy what has
not been imported yet, and forks. All processes of one run of the tests share it. It ends its copies when the tests end.
It also takes note of the end of orphans of its copies, which not every machine's first process does at once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.kit.original import CODE, LENGTH, Request, receive

# Modules read these variables on import, so they have the values of vLLM's servers. There is one thread, because a copy
# cannot use the OpenMP threads of its original.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# Holds the address of the original for this process and those that it forks.
ADDRESS = "SLIPSTREAM_TEST_COPIES"
ROOT = Path(__file__).parents[2]
# Long enough to import vLLM on a busy machine.
STARTS_WITHIN_S = 240.0


class Copy:
    """Is a running copy, with the methods of `subprocess.Popen` that tests use. It leads its own session.

    It is killed, with its process group, once this object or its process is gone.

    Args:
        needs: Modules to import before the fork.
        request: What it does.
        streams: File descriptors of its stdin, stdout and stderr.
        pipes: Further ones for a function.
    """

    def __init__(
        self, needs: Sequence[str], request: Request, streams: tuple[int, int, int], pipes: Sequence[int] = ()
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._socket = _connect()
        self._socket.settimeout(STARTS_WITHIN_S)
        # The copy alone imports what the request names.
        data = pickle.dumps((tuple(needs), pickle.dumps(request)))
        socket.send_fds(self._socket, [LENGTH.pack(len(data))], [*streams, *pipes])
        self._socket.sendall(data)
        (self.pid,) = CODE.unpack(receive(self._socket, CODE.size))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self._socket.settimeout(timeout)
                try:
                    (self.returncode,) = CODE.unpack(receive(self._socket, CODE.size))
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired("a copy", timeout or 0.0) from None
                self._socket.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedCopy(Copy):
    """Is a copy whose output is read by this process.

    Args:
        stdout: Descriptor of its stdout; None for a pipe.
        is_merged: Whether its stderr goes where its stdout goes, to a pipe.

    Attributes:
        stdout: Stream of its stdout; None if that goes elsewhere.
        stderr: Stream of its stderr, which may be that of its stdout.
    """

    def __init__(
        self, needs: Sequence[str], request: Request, stdout: int | None = None, is_merged: bool = False
    ) -> None:
        output, their_output = os.pipe() if stdout is None else (None, os.dup(stdout))
        errors, their_errors = (None, os.dup(their_output)) if is_merged else os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            super().__init__(needs, request, (nothing, their_output, their_errors))
        finally:
            for file in (nothing, their_output, their_errors):
                os.close(file)
        streams = [None if end is None else os.fdopen(end, encoding="utf-8") for end in (output, errors)]
        self.stdout, stderr = streams[0], streams[1] or streams[0]
        assert stderr is not None
        self.stderr: IO[str] = stderr

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of its output, once it has ended. Where both are one stream, all of it is the first text."""
        read: dict[IO[str], str] = {}
        streams = {stream for stream in (self.stdout, self.stderr) if stream is not None}
        readers = [threading.Thread(target=lambda of: read.update({of: of.read()}), args=(of,)) for of in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return read.pop(self.stdout, "") if self.stdout else "", read.pop(self.stderr, "")


def start_function(
    needs: Sequence[str], function: Callable[..., None], *arguments: Any, pipes: Sequence[int] = ()
) -> Copy:
    """Call a function in a copy, with this process's output.

    Args:
        needs: Modules to import before the fork.
        function: A function of a module, which can be pickled.
        *arguments: Its first arguments.
        pipes: File descriptors to pass on; those that the copy has for them are the last arguments.
    """
    authkey = bytes(multiprocessing.current_process().authkey)
    request = Request(function, arguments, dict(os.environ), os.getcwd(), authkey=authkey)
    return Copy(needs, request, (0, 1, 2), pipes)


def start_program(needs: Sequence[str], command: Sequence[str], env: Mapping[str, str], log: Path) -> Copy:
    """Start a Python program.

    Args:
        needs: Modules to import before the fork.
        command: A command line with `-m MODULE`.
        env: Its whole environment but for `ENVIRONMENT`.
        log: File to which its output is appended.
    """
    program, *arguments = command[command.index("-m") + 1 :]
    request = Request(program, tuple(arguments), {**env, **ENVIRONMENT}, os.getcwd())
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        return Copy(needs, request, (nothing.fileno(), output.fileno(), output.fileno()))


def _connect() -> socket.socket:
    """Connect to the original, which is started if there is none."""
    if ADDRESS not in os.environ:
        start_original()
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            connection.connect(os.environ[ADDRESS])
            return connection
        except (FileNotFoundError, ConnectionRefusedError):  # it has just been started
            assert time.monotonic() < deadline, "the original of all copies does not start"
            time.sleep(0.01)


def start_original() -> None:
    """Start the original for this process and those that it will fork. It imports nothing yet."""
    address = tempfile.mkdtemp(prefix="slipstream-copies-") + "/socket"
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.kit.original", address], env=env, stdin=subprocess.PIPE, cwd=ROOT
    )
    # The pipe to its input closes with the last process that has it.
    _originals.append(process)
    os.environ[ADDRESS] = address


_originals: list[subprocess.Popen[bytes]] = []
