"""The sealed sandbox's helper: `python -I -S sealed_program.py SECONDS CPU_SECONDS MEMORY_BYTES OUTPUT_BYTES` reads
programs, one JSON string a line, and answers each.

It forks for each program. The fork permanently gives up everything except computing and printing, and only then runs
the program: the kernel refuses all system calls except those of `_ALLOWED`. A program therefore has no files and no
network, and no other processes to start or to kill. Nothing remains when the fork has ended. Python itself does not
confine the code that `exec` runs: its means do not hold, and are not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
from typing import NamedTuple

# A program can import only loaded modules, because it cannot open files. So load these beforehand.
for _module in ("collections", "datetime", "decimal", "fractions", "itertools", "math", "re", "statistics", "string"):
    importlib.import_module(_module)

# Computing and printing need these system calls. The numbers are those on x86_64 and on aarch64.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
# Each machine's position in the table above, and its number in a filter.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL, _ALLOW, _REFUSE = 0x80000000, 0x7FFF0000, 0x00050001  # _REFUSE fails the call with EPERM.


class Limits(NamedTuple):
    """Bounds of a program: wall-clock and CPU time, address space, and what is read of its output."""

    seconds: float
    cpu_seconds: int
    memory_bytes: int
    output_bytes: int


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def main() -> None:
    limits = Limits(float(sys.argv[1]), *map(int, sys.argv[2:]))
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), limits)) + "\n")
        answers.flush()


def run(code: str, limits: Limits) -> dict[str, str]:
    """Run a program in a sealed fork.

    Args:
        code: Python.
        limits: What it may use.

    Returns:
        {"output": text that the program wrote}, or {"refused": reason why nothing was run}.
    """
    written = os.memfd_create("output")
    sealed, seals = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_program(code, written, seals, limits)
    os.close(seals)
    process = os.pidfd_open(pid)
    late = not select.select([process], [], [], limits.seconds)[0]
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    problem = os.read(sealed, 1000).decode()
    output = os.pread(written, limits.output_bytes, 0).decode(errors="replace").strip()
    for fd in (written, sealed, process):
        os.close(fd)
    if problem:
        return {"refused": problem}
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if late or ended_by == signal.SIGKILL:  # Killed by this process, or by the limit on CPU time.
        output += "\nerror: the program takes too long"
    elif ended_by:
        output += f"\nerror: the program was ended by signal {ended_by}"
    elif exit_code := os.WEXITSTATUS(status):
        output += f"\n(it ended with code {exit_code})"
    return {"output": output.strip()}


def _be_the_program(code: str, written: int, seals: int, limits: Limits) -> None:
    """Seal the fork, run the program in it, and exit. Does not return."""
    try:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(1, 0)  # The program has nothing to read.
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.dup2(seals, 3)
        os.closerange(4, 1024)
        random.seed()
        printed = sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", errors="replace")
        _limit(limits)
        _seal()
        os.close(3)
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    problem, exit_code = b"", 0
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:  # as Python ends: with a number, or with 1 and a text
        if isinstance(ended.code, int):
            exit_code = ended.code & 0xFF
        elif ended.code is not None:
            problem, exit_code = _text(ended).removeprefix(b"SystemExit: "), 1
    except BaseException as error:
        problem = _text(error)
    # The program may have broken everything that is used here.
    with contextlib.suppress(BaseException):
        printed.flush()
    with contextlib.suppress(BaseException):
        os.write(2, problem)
    os._exit(exit_code)


def _text(error: BaseException) -> bytes:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ").encode(errors="replace")[:1000]
    except BaseException:
        return b"error: the program failed"


def _limit(limits: Limits) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 2 * limits.output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _seal() -> None:
    """Make the kernel refuse every system call that is not in `_ALLOWED`. Nothing can undo it.

    Raises:
        OSError: If the kernel does not accept the filter.
    """
    place, machine = _MACHINES[platform.machine()]
    numbers = [numbers[place] for numbers in _ALLOWED.values()]
    instructions = [
        (_LOAD, 0, 0, 4),  # The machine.
        (_IF_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # The number of the call.
        *((_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    filters = _Filter(len(instructions), ctypes.cast(program, ctypes.c_void_p))
    if _PRCTL(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _PRCTL(_PR_SET_SECCOMP, 2, ctypes.byref(filters)):
        raise OSError(ctypes.get_errno(), "seccomp")


_PRCTL = ctypes.CDLL(None, use_errno=True).prctl

if __name__ == "__main__":
    main()
