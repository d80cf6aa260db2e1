"""The guard of process groups: none outlives its owner, which may be killed and may have left a copy of itself."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from slipstream.rollout_worker.user_code.process_guard import ProcessGuard, guarded_command, signal_group
from tests.kit.worker import until

OWNER = """
import os, subprocess, sys, threading
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard

guard = ProcessGuard()
groups = [subprocess.Popen(["sleep", "300"], start_new_session=True) for _ in range(2)]
for group in groups:
    guard.add(group.pid)
guard.remove(groups[1].pid)
copy = os.fork()
if copy:
    print(groups[0].pid, groups[1].pid, copy, flush=True)
threading.Event().wait()
"""


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a process whose pipe stays open")
async def test_groups_end_with_an_owner_that_is_killed_even_if_a_copy_holds_its_pipe_open():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:  # noqa: ASYNC220
        added, removed, copy = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
        assert not ended(added)
        owner.kill()
        owner.wait()
        try:
            await until(lambda: ended(added))
            assert not ended(copy)
            assert not ended(removed)
        finally:
            os.kill(copy, signal.SIGKILL)
            os.kill(removed, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "code"),
    [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], 128 + signal.SIGKILL), (["/no/such/program"], 127)],
)
def test_a_guarded_command_ends_with_the_commands_exit_code(command, code):
    done = subprocess.run(guarded_command(command), start_new_session=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr == ("" if code != 127 else "/no/such/program: No such file or directory\n")


async def test_a_guard_that_somebody_ended_is_replaced_as_a_group_is_added():
    guard = ProcessGuard()
    groups = [subprocess.Popen(["sleep", "300"], start_new_session=True) for _ in range(2)]  # noqa: ASYNC220
    guard.add(groups[0].pid)
    os.kill(first := guard.pid, signal.SIGKILL)
    await until(lambda: ended(first))
    guard.add(groups[1].pid)
    assert guard.pid != first
    guard.close()
    assert [group.wait(60) for group in groups] == [-signal.SIGKILL] * 2


def test_a_guard_that_was_never_asked_has_no_process():
    guard = ProcessGuard()
    guard.remove(1)
    guard.replace_if_ended()
    guard.close()
    assert guard.pid is None


def test_a_group_without_processes_cannot_be_signalled():
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    assert not signal_group(process.pid, 0)
