"""Forks copies of itself for `tests.kit.copies`: `python -m tests.kit.original SOCKET`.

This process imports what its clients need, and has no thread. A client is one connection for one copy: it sends a
request with the copy's file descriptors, and gets the copy's id and at the end its exit code.
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
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("!I")
CODE = struct.Struct("!i")


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


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes. Raises `RuntimeError` if the other end closes before."""
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
        head, files, _, _ = socket.recv_fds(client, LENGTH.size, 16)
        needs, request = pickle.loads(receive(client, *LENGTH.unpack(head)))
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
        client.sendall(CODE.pack(pid))

    def _reap(self) -> None:
        """Take note of every child that has ended, orphans of copies among them."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if client := self._clients.get(pid):
                    with suppress(OSError):
                        client.sendall(CODE.pack(os.waitstatus_to_exitcode(status)))
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
