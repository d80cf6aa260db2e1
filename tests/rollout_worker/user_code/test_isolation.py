"""Tools in child processes: `worker.tool_isolation = "process"`. A child imports the task file, which takes seconds."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.protocol import reasons
from slipstream.protocol.config import TaskSection
from slipstream.rollout_worker.user_code import UserCode, UserCodeError
from slipstream.rollout_worker.user_code.isolation import ChildProcess
from tests.kit.worker import until

FILE = Path(__file__).with_name("isolated_task.py")


def boundary(limit=1, path=f"{FILE}:task"):
    return UserCode(limit, isolated=TaskSection(path=path))


def is_alive(pid):
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_i9_a_child_is_used_again_and_serves_whatever_tools_do():
    """One child for all: nothing here is worth a new one."""
    async with boundary() as code:

        async def ask(tool, **arguments):
            return await code.call_isolated(tool, arguments, 60.0)

        pid = int(await ask("pid"))
        assert pid != os.getpid()
        for value in ("x", "12345678901234567890", "a\ud800b\n", "\u4f60" * 100_000):
            assert await ask("echo", value=value) == value.encode("utf-8", "replace").decode()
        assert await ask("echo", value=12345678901234567890) == "12345678901234567890"
        assert json.loads(await ask("pid_async")) == {"pid": pid}
        for how, kind, text in [
            ("raise", "KeyError", "KeyError: 'gone'"),
            ("exit", "SystemExit", "SystemExit(3)"),
            ("read", "EOFError", "EOFError"),
        ]:
            with pytest.raises(UserCodeError) as failure:
                await ask("fail", how=how)
            assert (failure.value.kind, str(failure.value).partition(": EOF")[0]) == (kind, text)
            assert failure.value.where.startswith(f"{FILE}:")
        with pytest.raises(UserCodeError, match="TimeoutError: rang"):
            await ask("alarmed")
        assert await ask("leave_an_alarm") == "True"
        assert await ask("alarm_left") == "False"
        cut = await ask("long")
        assert len(cut) < 1_100_000
        assert "characters left out" in cut
        with pytest.raises(UserCodeError, match="TypeError"):
            await ask("echo", wrong=1)
        with pytest.raises(UserCodeError, match="has no tool 'other': echo, pid"):
            await ask("other")
        with pytest.raises(UserCodeError, match="cannot be sent to a process as JSON"):
            await ask("echo", value=object())
        assert int(await ask("pid")) == pid
        assert code.hung == 0
    assert not is_alive(pid)


async def test_i8_a_child_is_not_told_the_token(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "hidden")
    monkeypatch.setenv("SLIPSTREAM_TOKEN_FILE", "/hidden")
    monkeypatch.setenv("SEEN", "seen")
    async with boundary() as code:
        told = json.loads(await code.call_isolated("environment", {}, 60.0))
    assert told["SEEN"] == "seen"
    assert not [value for value in told.values() if "hidden" in value]


def test_a_child_does_not_import_what_only_the_worker_needs():
    """aiohttp was a quarter of the time in which each child starts."""
    code = "import sys, slipstream.rollout_worker.task.isolated_child, slipstream; slipstream.Task; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "slipstream.rollout_worker.task.task" in done.stdout.split()
    assert {"aiohttp", "torch", "transformers"}.isdisjoint(done.stdout.split())


async def test_i9_a_child_that_dies_or_does_not_come_back_fails_its_call_alone():
    async with boundary() as code:
        pids = []

        async def fails(how, timeout_s=60.0):
            pids.append(int(await code.call_isolated("pid", {}, 60.0)))
            with pytest.raises(UserCodeError) as failure:
                await code.call_isolated("fail", {"how": how}, timeout_s)
            assert not is_alive(pids[-1]) or how in ("spin", "hold the lock")
            return failure.value

        assert str(await fails("_exit")) == "its process ended with exit status 7"
        assert str(await fails("crash")) == "its process ended by SIGSEGV"
        late = await fails("spin", timeout_s=0.2)
        assert (str(late), late.kind) == ("no answer within 0.2 s", reasons.TIMEOUT)
        assert late.where.startswith(f"{FILE}:")
        assert str(await fails("hold the lock", timeout_s=0.2)) == "no answer within 0.2 s"
        assert await code.call_isolated("fail", {"how": "not"}, 60.0) == "well"
        await until(lambda: not any(map(is_alive, pids)))
        assert len(set(pids)) == 4
        await until(lambda: code.hung == 0)


async def test_i9_a_copy_of_a_child_answers_no_call():
    """Its answer was taken for the next call's, and each later answer for the call after its own."""
    async with boundary() as code:
        for how, status in [("exit", 5), ("raise", 1), ("return", 0)]:
            assert await code.call_isolated("fork", {"value": how, "how": how}, 60.0) == f"{how} {status}"
            assert await code.call_isolated("echo", {"value": f"after {how}"}, 60.0) == f"after {how}"


async def test_i9_lines_that_are_not_the_reply_are_dropped():
    async with boundary() as code:
        pid = await code.call_isolated("pid", {}, 60.0)
        assert await code.call_isolated("scribble", {"lines": 1}, 60.0) == "scribbled"
        assert await code.call_isolated("echo", {"value": "mine"}, 60.0) == "mine"
        assert await code.call_isolated("pid", {}, 60.0) == pid


async def test_i9_calls_that_are_cancelled_end_their_children_and_what_those_started():
    async with boundary(limit=2) as code:
        both = await code.call_isolated("child", {}, 60.0)
        first, grandchild = map(int, both.split())
        spinning = asyncio.create_task(code.call_isolated("fail", {"how": "spin"}, 60.0))
        await asyncio.sleep(0.05)
        spinning.cancel()
        await until(lambda: not is_alive(first) and not is_alive(grandchild))
        assert await code.call_isolated("fail", {"how": "not"}, 60.0) == "well"


async def test_i9_no_more_children_than_allowed_serve_any_number_of_calls():
    async with boundary(limit=2) as code:
        pids = await asyncio.gather(*(code.call_isolated("pid", {}, 60.0) for _ in range(20)))
    assert 1 <= len(set(pids)) <= 2
    assert not any(is_alive(int(pid)) for pid in pids)


async def test_i9_a_task_that_cannot_be_loaded_in_a_child_is_told(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    async with boundary(path=f"{tmp_path}/broken.py:task") as code:
        with pytest.raises(UserCodeError, match=r"its process cannot load the task: .*ZeroDivisionError"):
            await code.call_isolated("pid", {}, 60.0)
    (tmp_path / "fatal.py").write_text("import os\nos._exit(4)\n")
    async with boundary(path=f"{tmp_path}/fatal.py:task") as code:
        with pytest.raises(UserCodeError, match="its process ended with exit status 4"):
            await code.call_isolated("pid", {}, 60.0)


WORKER = """
import asyncio, sys
from slipstream.protocol.config import TaskSection
from slipstream.rollout_worker.user_code import UserCode

async def main():
    async with UserCode(2, isolated=TaskSection(path=sys.argv[1])) as code:
        both = await asyncio.gather(*(code.call_isolated("child", {}, 60.0) for _ in range(2)))
        holding = asyncio.create_task(code.call_isolated("fail", {"how": sys.argv[2]}, 600.0))
        await asyncio.sleep(0.2)
        print(*both, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["spin", "hold the lock"])
async def test_i9_children_and_what_they_started_end_with_a_worker_that_is_killed(how):
    """Idle ones, and those in which a tool runs, even one that holds the interpreter lock."""
    command = [sys.executable, "-c", WORKER, f"{FILE}:task", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:  # noqa: ASYNC220
        pids = [int(pid) for pid in (await asyncio.to_thread(worker.stdout.readline)).split()]
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        worker.send_signal(signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))


async def test_i9_a_call_that_waits_for_a_child_is_not_late_and_says_so(monkeypatch):
    go_on, told = asyncio.Event(), []
    ask = ChildProcess.ask

    async def held(child, *arguments):
        await go_on.wait()
        return await ask(child, *arguments)

    async with boundary() as code:
        code.alarm = lambda key, text, where: told.append(text)
        await code.call_isolated("pid", {}, 60.0)
        loop, ahead = asyncio.get_running_loop(), [0.0]
        monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + ahead[0])
        monkeypatch.setattr(ChildProcess, "ask", held)
        first = asyncio.create_task(code.call_isolated("pid", {}, 100_000.0))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(code.call_isolated("echo", {"value": "late"}, 1000.0))
        await asyncio.sleep(0)
        ahead[0] += 1001.0
        await until(lambda: bool(told))
        assert told == ["no process was free within 1000 s: all 1 are at work; raise worker.user_threads"]
        go_on.set()
        await first
        assert await waiting == "late"
