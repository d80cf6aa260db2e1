"""`slipstream up --on ray` on a real Ray cluster of three nodes; vLLM and the learner are stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.deploy.clusters import ray
from slipstream.deploy.clusters.roles import Node, Resources
from slipstream.deploy.run.processes import Program
from slipstream.protocol.config import ConfigError, load
from tests.deploy.conftest import run_directory
from tests.deploy.stage import until
from tests.deploy.typed import SMALL, Typed, output, read_until
from tests.kit.ports import free_port
from tests.kit.ray import RayNodes

pytestmark = [pytest.mark.timeout(300)]

PASSED = ("--cluster.ray_env", '["PYTHONPATH", "HOLD"]')


def left_of(run_file: Path) -> list[str]:
    """Return the command lines of processes that name the run's folder, other than this test's own."""
    found = (" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
    return [line for line in found if str(run_directory(run_file)) in line]


@pytest.fixture
def free(ray_here: RayNodes) -> Iterator[RayNodes]:
    """The cluster; at the end of the test all of it is free again."""
    yield ray_here
    until(lambda: ray_here.free_cpus() == ray_here.cpus())


@pytest.mark.ray
def test_a_run_is_placed_and_done_while_a_worker_comes_and_a_server_drains(
    free: RayNodes, run_file: Path, hold: Path
) -> None:
    with Typed("up", str(run_file), "--on", "ray", "--vllm.count", "2", *SMALL, *PASSED) as up:
        told = read_until(up, "all have come")
        assert "starting queue, vllm-0, vllm-1, worker-0, learner" in told
        assert free.free_cpus() == free.cpus() - 7
        file = str(run_directory(run_file) / "run.toml")
        with Typed("worker", file, "--name", "worker-more") as more:
            until(lambda: "worker-more" in output("status", file, "--json")[1])
            code, said = output("servers", "remove", "vllm-1", "--force", "--now", "--queue", queue_of(file))
            assert code == 0, said
            until(lambda: "vllm-1" not in output("servers", "list", file)[1])
            hold.unlink()
            assert up.wait(timeout=100) == 0
            more.send_signal(signal.SIGTERM)
            more.wait(timeout=60)
    assert left_of(run_file) == []


def queue_of(file: str) -> str:
    return load(Path(file)).queue.address


@pytest.mark.ray
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_the_learner_writes_its_checkpoint(
    free: RayNodes, run_file: Path, hold: Path, number: int, code: int
) -> None:
    with Typed("up", str(run_file), "--on", "ray", "--deploy.grace_s", "10", *SMALL, *PASSED) as up:
        read_until(up, "all have come")
        up.send_signal(number)
        said, _ = up.communicate(timeout=100)
        assert up.returncode == code
        assert "step 3: checkpoint written at the signal" in said
    assert left_of(run_file) == []


@pytest.mark.ray
def test_what_was_placed_is_gone_after_a_killed_command(free: RayNodes, run_file: Path, hold: Path) -> None:
    with Typed("up", str(run_file), "--on", "ray", "--deploy.grace_s", "2", *SMALL, *PASSED) as up:
        read_until(up, "all have come")
        up.kill()
        up.wait(timeout=30)
    until(lambda: left_of(run_file) == [])


@pytest.mark.ray
def test_a_worker_whose_node_is_lost_starts_on_another(free: RayNodes, run_file: Path, hold: Path) -> None:
    node = free.add(label="last")
    apart = ("--cluster.node_selector", '["place=first"]', "--cluster.worker_node_selector", '["place=last"]')
    with Typed("up", str(run_file), "--on", "ray", *SMALL, *PASSED, *apart) as up:
        read_until(up, "all have come")
        before = workers_of(run_file)
        assert len(before) == 1
        free.add(label="last")
        free.lose(node)
        told = read_until(up, "worker-0 ended with code 137")
        assert "starting it again" in told
        until(lambda: workers_of(run_file) not in ([], before))
        hold.unlink()
        assert up.wait(timeout=100) == 0
    assert left_of(run_file) == []


def workers_of(run_file: Path) -> list[int]:
    """Return the processes of the run's workers."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if {"worker", str(run_directory(run_file) / "run.toml")} <= {*(each.info["cmdline"] or [])}
    ]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["--cluster.server_gpus", "3"],
            "cluster.server_gpus = 3: no node of the Ray cluster has more than 2 GPUs; lower it",
        ),
        (
            ["--cluster.head_cpus", "9"],
            "cluster.head_cpus = 9: no node of the Ray cluster has more than 8 CPU cores; lower it",
        ),
        (
            ["--cluster.worker_node_selector", '["pool=cpu"]'],
            "cluster.worker_node_selector = ['pool=cpu']: no node of the Ray cluster has these labels; start nodes "
            "with ray start --labels",
        ),
        (
            ["--cluster.ray_env", '["NOT_THERE"]'],
            "cluster.ray_env = NOT_THERE: there is no such variable here; export it, or leave it out",
        ),
    ],
)
def test_what_ray_does_not_have_is_one_line_and_nothing_is_placed(
    free: RayNodes, run_file: Path, hold: Path, settings: list[str], told: str
) -> None:
    assert output("up", str(run_file), "--on", "ray", *settings) == (2, f"slipstream: {told}\n")
    assert not run_directory(run_file).exists()


def test_more_than_the_whole_cluster_has_is_one_line() -> None:
    found = [Node("a", 8, 64), Node("b", 8, 64)]
    ray.check_room([("head", Resources(1, 8, 0), 1), ("server", Resources(2, 8, 0), 7)], found)
    with pytest.raises(
        ConfigError,
        match=r"the run needs 17 GPUs \(1 x cluster.head_gpus = 1, 8 x cluster.server_gpus = 2\), and the Ray "
        r"cluster has 16: lower these, vllm.count or worker.count, add nodes, or set cluster.ray_grows",
    ):
        ray.check_room([("head", Resources(1, 8, 0), 1), ("server", Resources(2, 8, 0), 8)], found)


def test_no_cluster_at_the_address_is_one_line(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    port = free_port()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"cluster.ray_address = {address}: nothing answers there .*ray start"):
            ray.connect(load(run_file, ["--cluster.ray_address", address]))
        assert time.monotonic() - began < 30  # Ray itself tries for a minute


def test_without_ray_one_line_says_what_to_install(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--on ray: the package ray is not installed: pip install .*\[ray\]"):
        ray.connect(load(run_file))


def test_without_a_token_nothing_is_asked(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="which needs a token"):
        ray.connect(load(run_file))


def test_a_server_that_moves_to_another_address_joins_by_another_name() -> None:
    server = Program("vllm-0", "vllm", ["slipstream", "vllm", "run.toml", "--name", "vllm-0"])
    assert ray.renamed(server, "10.0.0.5", "10.0.0.5") == server
    assert ray.renamed(server, "10.0.0.5", "10.0.0.7").command[-1] == "vllm-0-10-0-0-7"


@pytest.mark.ray
def test_a_request_without_room_waits_and_is_taken_back(free: RayNodes, run_file: Path, hold: Path) -> None:
    """Another run has the cluster: this one waits, and Ctrl-C leaves nothing of its request."""
    config = load(run_file, ["--cluster.head_cpus", "8", "--cluster.server_cpus", "8", "--cluster.worker_cpus", "8"])
    other = ray.connect(config)
    with other.children(2.0):
        asyncio.run(other.settle(config, print))
        with Typed("up", str(run_file), "--on", "ray", *SMALL, *PASSED) as up:
            told = read_until(up, "waiting for room on the Ray cluster")
            assert "for 3 actors; free are 0 CPU cores and 6 GPUs; Ctrl-C takes the request back" in told
            up.send_signal(signal.SIGINT)
            assert up.wait(timeout=60) == 130
    assert os.listdir(run_directory(run_file).parent) == []
