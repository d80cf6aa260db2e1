"""The sandbox example: programs are run, and none of them gets out, stays on or takes more than its share."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.sandboxes import Limits, SealedSandbox, sealed
from slipstream.sandboxes.base import MAX_CODE_CHARACTERS
from tests.examples.conftest import Load

NAME = "sandbox"


@pytest.fixture(scope="module")
def sandbox(load: Load) -> Iterator[Any]:
    opened = SealedSandbox(processes=1)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(sum(range(3, 17 + 1)))", "150"),
        ("print('é', 1)\nprint(2)", "é 1\n2"),
        ("import math, statistics\nprint(math.isqrt(17), statistics.mean([1, 3]))", "4 2"),
        ("1 + 1", ""),
        ("print(1)\nraise SystemExit(3)", "1\n(it ended with code 3)"),
        ("raise SystemExit", ""),
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("print((1)", "SyntaxError: '(' was never closed (program, line 1)"),
        ("print('\\ud800')", "?"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "error: the program failed"),
        ("import sys\nsys.stdout = None\nprint(1)", ""),
        ("import ctypes\nctypes.string_at(0)", "error: the program was ended by signal 11"),
    ],
)
def test_a_program_prints_and_its_error_is_told(sandbox: Any, code: str, printed: str) -> None:
    assert sandbox.run(code) == printed


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os\nos.kill(-1, 9)",
        "import os\nos.killpg(0, 9)",
        "open('/etc/passwd').read()",
        "open('/tmp/sandbox-was-here', 'w')",
        "import os\nos.unlink('/tmp/x')",
        "import os\nos.listdir('/')",
        "import os\nos.execv('/bin/sh', ['sh'])",
        "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
        "import os\nos.setuid(0)",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import _socket\n_socket.socket()",
        "import socket",
        "import subprocess",
        "import time\ntime.sleep(60)",
    ],
)
def test_the_kernel_refuses_what_is_not_computing_or_printing(sandbox: Any, code: str) -> None:
    printed = sandbox.run(code)
    assert any(text in printed for text in ("Operation not permitted", "No module named", "not allowed"))


@pytest.mark.parametrize(
    "call", ["fork()", "kill(-1, 9)", "socket(2, 1, 0)", "open(b'/etc/passwd', 0)", "ptrace(0, 0, 0, 0)"]
)
def test_calls_past_python_are_refused_too(sandbox: Any, call: str) -> None:
    assert sandbox.run(f"import ctypes\nprint(ctypes.CDLL(None).{call})") == "-1"


def test_a_memory_hog_gets_an_error(sandbox: Any) -> None:
    assert sandbox.run("a = 'x' * 10**9") == "MemoryError"
    assert sandbox.run("a = [0]\nwhile True: a += a") == "MemoryError"


def test_huge_output_is_cut(sandbox: Any) -> None:
    printed = sandbox.run("while True: print('x' * 999)")
    assert 3000 < len(printed) <= 4096


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()",
    ],
)
def test_an_endless_program_is_ended(code: str) -> None:
    sandbox = SealedSandbox(Limits(0.3, 256, 4096), processes=1)
    try:
        assert sandbox.run(code) == "error: the program takes too long"
        assert sandbox.run("print(1)") == "1"
    finally:
        sandbox.close()


def test_a_program_learns_nothing_of_this_process(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    seen = sandbox.run("import os, sys\nprint(dict(os.environ), sys.stdin.read())")
    assert "secret" not in seen
    assert sandbox.run(_OPEN_FDS) == "open fds: []"


_OPEN_FDS = """
import os
found = []
for fd in range(3, 200):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
print("open fds:", found)
"""


def test_nothing_of_a_program_is_left_over(sandbox: Any) -> None:
    sandbox.run("secret = 1\nimport math\nmath.pi = 3")
    assert sandbox.run("import math\nprint('secret' in globals(), math.pi > 3)") == "False True"


def test_programs_side_by_side_get_their_own_answers() -> None:
    sandbox = SealedSandbox(processes=3)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(sandbox.run, (f"print({n} * 2)" for n in range(60)))) == [
                str(2 * n) for n in range(60)
            ]
    finally:
        sandbox.close()


def test_a_helper_that_was_killed_is_replaced() -> None:
    sandbox = SealedSandbox(processes=1)
    try:
        assert sandbox.run("print(1)") == "1"
        helper = psutil.Process(sandbox._helpers.idle.queue[0].pid)
        helper.kill()
        helper.wait(10)
        assert sandbox.run("print(2)") == "2"
    finally:
        sandbox.close()


def test_a_long_program_is_not_run(sandbox: Any) -> None:
    assert "at most" in sandbox.run("#" * (MAX_CODE_CHARACTERS + 1))


def test_what_the_demonstrations_say_of_a_program_is_what_the_sandbox_says(sandbox: Any, load: Load) -> None:
    demonstrations = load("demonstrations")
    rng = random.Random(0)
    for _ in range(40):
        turns = demonstrations.mixed(rng).turns
        for turn, answer in itertools.pairwise(turns):
            for call in turn.get("tool_calls", ()):
                assert load("task").python(**call["function"]["arguments"]) == answer["content"]


def test_a_machine_without_the_seal_runs_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(RuntimeError, match="needs Linux on x86_64 or aarch64, and this is linux on riscv64"):
        SealedSandbox(processes=1).run("print(1)")


def test_a_program_that_cannot_be_sealed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal fails where the kernel refuses it; here, as its table of machines is empty."""
    program = Path(sealed.__file__).with_name("sealed_program.py").read_text()
    unsealed = program.replace('{"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}', "{}")
    assert unsealed != program
    (tmp_path / "sealed_program.py").write_text(unsealed)
    monkeypatch.setattr(sealed, "__file__", str(tmp_path / "sealed.py"))
    with pytest.raises(RuntimeError, match="the sandbox cannot seal a process: KeyError"):
        SealedSandbox(processes=1).run("open('/tmp/x', 'w')")


def test_the_helper_ends_with_the_process_that_started_it() -> None:
    lines = ["import os", "from slipstream.sandboxes import SealedSandbox", "s = SealedSandbox(processes=1)"]
    lines += ["s.run('1')", "print(s._helpers.idle.queue[0].pid, flush=True)"]
    code = "\n".join([*lines, "os.kill(os.getpid(), 9)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)
