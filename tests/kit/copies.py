"""Starts programs and functions in milliseconds, as copies of one process that has imported what they import.

That process, the original, is `python -m tests.kit.copies SOCKET`. It begins with the first copy, imports for each copy
what has not been imported yet, and forks. All processes of one run of the tests share it. It ends its copies when the
tests end. It also takes note of the end of what its copies leave behind, which not every machine's first process does
at once.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import pickle
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

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
PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!I")
_CODE = struct.Struct("!i")


class Request(NamedTuple):
    """Says what a copy does.

    Attributes:
        target: A function, or the name of a module or the path of a script to run as `__main__`.
        arguments: Arguments of the function, or `sys.argv[1:]`.
        env: The whole environment.
        folder: Working directory.
        ignore: Signals to ignore.
        limit_s: Seconds after which SIGALRM ends it; 0 for no limit.
        authkey: Key by which multiprocessing lets it have tensors of its client's; of a function only.
    """

    target: Any
    arguments: tuple[Any, ...]
    env: dict[str, str]
    folder: str
    ignore: tuple[int, ...] = ()
    limit_s: int = 0
    authkey: bytes = b""


class Copy:
    """Is a running copy, with the methods of `subprocess.Popen` that tests use. It leads a session of its own.

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
        socket.send_fds(self._socket, [_LENGTH.pack(len(data))], [*streams, *pipes])
        self._socket.sendall(data)
        (self.pid,) = _CODE.unpack(_receive(self._socket, _CODE.size))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self._socket.settimeout(timeout)
                try:
                    (self.returncode,) = _CODE.unpack(_receive(self._socket, _CODE.size))
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

    Attributes:
        stdout: Stream of its stdout; None if that goes elsewhere.
        stderr: Stream of its stderr.
    """

    def __init__(self, needs: Sequence[str], request: Request, stdout: int | None = None) -> None:
        errors, their_errors = os.pipe()
        output, their_output = os.pipe() if stdout is None else (None, os.dup(stdout))
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            super().__init__(needs, request, (nothing, their_output, their_errors))
        finally:
            for file in (nothing, their_output, their_errors):
                os.close(file)
        self.stdout = None if output is None else os.fdopen(output, encoding="utf-8")
        self.stderr = os.fdopen(errors, encoding="utf-8")

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return the rest of its output, once it has ended."""
        read: dict[IO[str], str] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        readers = [threading.Thread(target=lambda of: read.update({of: of.read()}), args=(of,)) for of in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return read.get(self.stdout, "") if self.stdout else "", read[self.stderr]


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
        [sys.executable, "-P", "-m", "tests.kit.copies", address], env=env, stdin=subprocess.PIPE, cwd=ROOT
    )
    # The pipe to its input closes with the last process that has it.
    _originals.append(process)
    os.environ[ADDRESS] = address


_originals: list[subprocess.Popen[bytes]] = []


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise RuntimeError("the original of all copies has ended, or could not fork: see the output before this")
        data += part
    return data


class _Original:
    """Forks copies as clients ask, tells each client how its copy ended, and ends what a client leaves."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(128)
        self._children, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(self._children, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for file in (self._listener.fileno(), self._children, 0):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until this process's input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    return
                if key.fd == self._children:
                    os.read(self._children, 4096)
                    self._reap()
                elif key.fd == self._listener.fileno():
                    self._start(self._listener.accept()[0])
                elif key.data in self._clients:  # its client has ended, or wants no more of it
                    self._forget(key.data)
                    end_group(key.data)

    def _start(self, client: socket.socket) -> None:
        head, files, _, _ = socket.recv_fds(client, _LENGTH.size, 16)
        needs, request = pickle.loads(_receive(client, *_LENGTH.unpack(head)))
        for name in needs:
            importlib.import_module(name)
        if (pid := os.fork()) == 0:
            for other in (*self._clients.values(), client, self._listener):
                other.close()
            self._selector.close()
            _become(pickle.loads(request), files)
        for file in files:
            os.close(file)
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, pid)
        client.sendall(_CODE.pack(pid))

    def _reap(self) -> None:
        """Take note of every child that has ended, orphans of copies among them."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if client := self._clients.get(pid):
                    with suppress(OSError):
                        client.sendall(_CODE.pack(os.waitstatus_to_exitcode(status)))
                    self._forget(pid)

    def _forget(self, pid: int) -> None:
        client = self._clients.pop(pid)
        self._selector.unregister(client)
        client.close()

    def end(self) -> None:
        for pid in self._clients:
            end_group(pid)


def end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become(request: Request, files: Sequence[int]) -> None:
    """Do what is asked in this copy, and then end it as an interpreter ends."""
    code = 1
    interrupted = False
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in request.ignore:
            signal.signal(number, signal.SIG_IGN)
        signal.alarm(request.limit_s)
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.env)
        code = _run(request, files[3:])
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        interrupted = True
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _run(request: Request, pipes: Sequence[int]) -> int:
    """Return the exit code."""
    try:
        if not isinstance(request.target, str):
            multiprocessing.current_process().authkey = request.authkey
            request.target(*request.arguments, *pipes)
            return 0
        sys.argv = [request.target, *request.arguments]
        if request.target.endswith(".py"):
            sys.path.insert(0, str(Path(request.target).parent))
            runpy.run_path(request.target, run_name="__main__")
        else:
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # That a program which runs has been imported before is as it should be here.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    # Orphans of copies become children of this process.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    original = _Original(sys.argv[1])
    try:
        original.serve()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        original.end()
        os._exit(0)  # a normal exit would take seconds to unload all that was imported


if __name__ == "__main__":
    main()
