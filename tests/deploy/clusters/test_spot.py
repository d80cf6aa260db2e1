"""A server and a worker on a spot machine: SIGTERM is the notice, and 30 s later everything there is killed.

Servers are fakes with real weights, all else is real.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.protocol import access
from slipstream.protocol.config import load
from tests.deploy.clusters.conftest import SECRET
from tests.deploy.typed import Typed, output
from tests.kit.ports import free_port
from tests.nights.audit import of_files

NOTICE_S = 30.0
STEPS = 100
WITHIN_S = 400.0

# Longer than the notice: what this server is asked, it never finishes.
SLOW = {"FAKE_LATENCY_S": "600"}


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url + access.HEALTH, timeout=5).close()
    except OSError:
        return False
    return True


def running(port: int) -> float:
    """Return how many requests a server has at work; 0 if it does not answer."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            found = re.search(r"vllm:num_requests_running\S* ([0-9.]+)", answer.read().decode())
    except OSError:
        return 0
    return float(found[1]) if found else 0


def ends_within_notice(processes: list[Typed]) -> list[int]:
    """Give the notice and kill what is left after it. Return the exit codes."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + NOTICE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_server_and_a_worker_leave_within_the_notice_and_nothing_is_lost_or_counted_twice(
    example: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run_dir = str(tmp_path / "run.toml"), tmp_path / "runs" / "example"
    url = load(Path(file), example).queue.local_url
    settings, spot = [*example, "--vllm.drain_timeout_s", "10"], list[Typed]()

    def here() -> dict[str, str]:
        """Return what each server and worker of the run does."""
        code, said = output("status", str(run_dir / "run.toml"), "--json")
        found = json.loads(said) if code == 0 else {"workers": [], "servers": []}
        servers = {each["name"]: each["state"] for each in found["servers"]}
        return servers | {each["worker_id"]: each["does"] for each in found["workers"]}

    with Typed("up", file, *example, "--learner.steps", str(STEPS)) as up:
        try:
            # They come while the learner loads, so that the run does not end before they take part.
            until(lambda: answers(url) or up.poll() is not None)
            for name, value in SLOW.items():
                monkeypatch.setenv(name, value)
            port = free_port()
            words = ("--vllm.port", str(port), "--join", url, "--name", "spot-server")
            spot.append(Typed("vllm", file, *settings, *words))
            spot.append(Typed("worker", file, *settings, "--queue", url, "--name", "spot-worker"))
            until(lambda: (running(port) and "spot-worker" in here()) or up.poll() is not None)
            assert up.poll() is None, up.communicate()
            assert ends_within_notice(spot) == [0, 143]
            assert here().get("spot-worker", "left") == "left"
            assert "spot-server" not in here()
            told, _ = up.communicate(timeout=WITHIN_S)
            assert up.returncode == 0, told
        finally:
            for process in (up, *spot):
                process.terminate()
    assert of_files(run_dir, STEPS) == []
