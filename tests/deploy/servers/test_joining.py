"""Servers that join a running job and leave it: names, addresses, and what a person is told who got them wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.deploy.commands import look
from slipstream.deploy.servers import joining, servers, vllm_server
from slipstream.protocol import access
from slipstream.protocol.client import QueueClient, QueueRefused, Unreachable
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import BeginSession, Server, ServerState, WorkerReport
from slipstream.protocol.status import ServerStatus
from slipstream.rollout_worker.user_code.process_guard import signal_group
from tests.deploy.stage import is_running, until
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fake_vllm import serving as fake_serving
from tests.kit.queue import serve_version, serving

FAR = "http://10.0.0.5:8200"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "t")


def listening_at(host: str, port: int = 8100) -> RunConfig:
    return config(vllm={"host": host, "port": port})


def test_two_servers_of_one_machine_and_one_of_another_have_names_of_their_own() -> None:
    plans = [joining.plan(listening_at("10.0.0.7", port), FAR, None, None) for port in (8100, 8101)] + [
        joining.plan(listening_at("10.0.0.8"), FAR, None, None)
    ]
    assert [plan.name for plan in plans] == ["10.0.0.7-8100", "10.0.0.7-8101", "10.0.0.8-8100"]
    assert [plan.url for plan in plans] == ["http://10.0.0.7:8100", "http://10.0.0.7:8101", "http://10.0.0.8:8100"]
    assert len({plan.replica for plan in plans}) == 3
    assert all(64 <= plan.replica < 1000 for plan in plans)


def test_the_advertised_address_is_what_others_are_told() -> None:
    plan = joining.plan(listening_at("0.0.0.0"), FAR, "left", "http://gpu-7.example:9000/")
    assert (plan.name, plan.url) == ("left", "http://gpu-7.example:9000")


def test_a_server_that_listens_on_all_addresses_names_the_one_towards_the_queue() -> None:
    plan = joining.plan(listening_at("0.0.0.0"), "http://127.0.0.1:8200", None, None)
    assert plan.url == "http://127.0.0.1:8100"


@pytest.mark.parametrize(
    ("host", "queue", "name", "advertise", "match"),
    [
        ("127.0.0.1", FAR, None, None, r"only this machine can reach.*--vllm.host 0\.0\.0\.0.*--advertise"),
        ("0.0.0.0", FAR, None, "http://localhost:8100", "only this machine can reach"),
        ("0.0.0.0", FAR, None, "http://0.0.0.0:8100", "--advertise http://0.0.0.0:8100: give the URL"),
        ("10.0.0.7", FAR, "a b", None, "--name a b"),
        ("10.0.0.7", "10.0.0.5:8200", None, None, "--join 10.0.0.5:8200: give the queue's URL"),
        ("10.0.0.7", "ftp://10.0.0.5", None, None, "--join ftp://10.0.0.5: give the queue's URL"),
        ("10.0.0.7", "http://10.0.0.5:x", None, None, "--join http://10.0.0.5:x: give the queue's URL"),
    ],
)
def test_what_others_could_not_reach_is_refused_with_the_remedy(
    host: str, queue: str, name: str | None, advertise: str | None, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        joining.plan(listening_at(host), queue, name, advertise)


async def test_a_name_or_a_server_that_is_there_already_is_refused_with_the_remedy() -> None:
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        await client.put_server(Server("a", "http://a:1"))
        with pytest.raises(ConfigError, match=r"'a' is in the run already, at http://a:1 .*another --name"):
            await servers.check_free(client, "a", "http://b:1")
        with pytest.raises(ConfigError, match=rf"in the run already, as 'a'.*servers remove a --queue {queue.url}`"):
            await servers.check_free(client, "b", "http://a:1")
        await servers.check_free(client, "a", "http://a:1")  # it was started again
        await client.put_server(Server("a", "http://a:1", ServerState.DOWN))
        await servers.check_free(client, "a", "http://b:1")


async def test_i5_a_server_of_another_run_is_not_added_and_that_run_is_named() -> None:
    fake = FakeVllm()
    async with serving(config()) as queue, fake_serving(fake) as url:
        fake.owner.admits("other-1", time.monotonic())
        with pytest.raises(ConfigError, match=rf"{url} serves run other-1, whose learner looked 0 s ago"):
            await servers.add(QueueClient(queue.url, "t", patience_s=1.0), url, "mine", "t")
        fake.owner.leaves("other-1")
        await servers.add(QueueClient(queue.url, "t", patience_s=1.0), url, "mine", "t")


async def test_add_list_and_remove() -> None:
    async with serving(config()) as queue, fake_serving(FakeVllm()) as url:

        def client() -> QueueClient:
            return QueueClient(queue.url, "t", patience_s=1.0)

        added = await servers.add(client(), url, "mine", "t")
        assert (added.name, added.url, added.state) == ("mine", url, ServerState.JOINING)
        assert "mine" in [server.name for server in await servers.listed(client())]
        with pytest.raises(ConfigError, match="no server answers at"):
            await servers.add(client(), "http://127.0.0.1:1", None, None)
        with pytest.raises(ConfigError, match=r"'nobody' is not registered.*the run's servers: .*mine"):
            await servers.remove(client(), "nobody", False, 5.0)
        await servers.remove(client(), "mine", False, 5.0)
        assert "mine" not in [server.name for server in await servers.listed(client())]


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (
            {"says": {"logprobs_mode": "raw_logprobs"}},
            "its log-probs are raw_logprobs.*--logprobs-mode processed_logprobs",
        ),
        ({"scale_out": False}, "it generates no tokens from tokens.*--enable-scale-out"),
    ],
)
async def test_a_server_whose_flags_suit_no_run_is_not_added(fake: dict[str, Any], says: str) -> None:
    async with serving(config()) as queue, fake_serving(FakeVllm(**fake)) as url:
        with pytest.raises(ConfigError, match=f"{url}: {says}"):
            await servers.add(QueueClient(queue.url, "t", patience_s=1.0), url, "mine", "t")
        assert "mine" not in [server.name for server in await servers.listed(QueueClient(queue.url, "t"))]


def test_a_server_whose_flags_do_not_suit_the_run_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.deploy.servers.probes.require_modules", lambda *_: None)
    monkeypatch.setattr(joining, "run", lambda *_: pytest.fail("it would have registered"))
    wrong = config(vllm={"args": ["--logprobs-mode", "raw_logprobs"]})
    with pytest.raises(ConfigError, match=r"vllm\.args: --logprobs-mode: leave it out"):
        vllm_server.join(wrong, "http://127.0.0.1:1", None, None)


# Ends by a SIGTERM whenever it comes. A handler in Python would run between two instructions: one that comes just as
# `time.sleep` begins waits for the end of that sleep.
CHILD = 'echo > "$1"; exec sleep 60'


async def test_a_server_that_is_told_to_stop_leaves_the_run_before_its_process_ends(tmp_path: Path) -> None:
    mark = tmp_path / "up"
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        child = ["/bin/sh", "-c", CHILD, "sh", str(mark)]
        running = asyncio.create_task(joining.run_server(config(), plan, child, os.environ))
        async with asyncio.timeout(60):
            while not mark.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [server.state for server in await client.servers() if server.name == "mine"] == [ServerState.JOINING]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 60) == 0
        assert not [server for server in await client.servers() if server.name == "mine"]


async def test_a_server_that_somebody_removed_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It printed nothing and kept the memory."""
    caplog.set_level("INFO")
    monkeypatch.setattr(joining, "LOOK_EVERY_S", 0.05)
    mark = tmp_path / "up"
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        child = ["/bin/sh", "-c", CHILD, "sh", str(mark)]
        running = asyncio.create_task(joining.run_server(config(), plan, child, os.environ))
        async with asyncio.timeout(60):
            while not mark.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.remove_server("mine")
        assert await asyncio.wait_for(running, 30) == 0
    assert "mine was removed from the run and ends" in caplog.text


async def test_a_queue_that_went_away_is_said_once_and_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(joining, "QUEUE_PATIENCE_S", 0.2)
    mark = tmp_path / "up"
    async with serving(config()) as queue:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        child = ["/bin/sh", "-c", CHILD, "sh", str(mark)]
        running = asyncio.create_task(joining.run_server(config(), plan, child, os.environ))
        async with asyncio.timeout(60):
            while not mark.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    async with asyncio.timeout(30):
        while "waits for the queue" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    assert caplog.text.count("waits for the queue") == 1
    assert "ends without draining: the queue does not answer" in caplog.text


async def test_adding_a_server_that_is_in_the_run_already_is_refused_unless_it_is_down() -> None:
    """It took the only serving server out of service."""
    async with serving(config()) as queue, fake_serving(FakeVllm()) as url:

        def client() -> QueueClient:
            return QueueClient(queue.url, "t", patience_s=1.0)

        await servers.add(client(), url, "second", "t")
        with pytest.raises(ConfigError, match="is in the run already, as 'second'"):
            await servers.add(client(), url, "second", "t")
        async with client() as other:
            await other.put_server(Server("second", url, ServerState.DOWN))
        assert (await servers.add(client(), url, "second", "t")).state is ServerState.JOINING


async def test_the_last_server_that_serves_is_removed_only_by_force() -> None:
    async with serving(config()) as queue:

        def client() -> QueueClient:
            return QueueClient(queue.url, "t", patience_s=1.0)

        async with client() as learner:
            await learner.begin_session(BeginSession(0, 0, 100, resume=False))
            await serve_version(learner, 0)
        with pytest.raises(ConfigError, match=r"vllm-0 is the last server that serves.*--force"):
            await servers.remove(client(), "vllm-0", False, 5.0)
        await servers.remove(client(), "vllm-0", False, 5.0, force=True)


async def test_a_queue_that_is_not_there_is_told_by_the_option_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "QUEUE_PATIENCE_S", 0.0)
    plan = joining.ServerJoin("mine", "http://127.0.0.1:1", "http://127.0.0.1:1", 64)
    with pytest.raises(Unreachable, match="is the URL right\\? --join says where it is looked for") as error:
        await joining.run_server(config(), plan, [sys.executable, "-c", ""], os.environ)
    assert "--queue" not in str(error.value)


async def test_a_server_whose_process_dies_is_down_with_the_reason() -> None:
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        child = [sys.executable, "-c", "raise SystemExit(3)"]
        assert await joining.run_server(config(), plan, child, os.environ) == 3
        (down,) = [server for server in await client.servers() if server.name == "mine"]
        assert (down.state, down.reason) == (ServerState.DOWN, "its process ended with code 3")


async def test_a_server_that_is_killed_leaves_no_engine_behind_and_says_by_which_signal(tmp_path: Path) -> None:
    mark = tmp_path / "engine"
    killed = f"(trap '' TERM; exec sleep 300) & echo $! > '{mark}'; kill -KILL $$"
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        assert await joining.run_server(config(), plan, ["bash", "-c", killed], os.environ) == 128 + signal.SIGKILL
        (down,) = [server for server in await client.servers() if server.name == "mine"]
        assert down.reason == "its process ended with code 137"
    until(lambda: not is_running(int(mark.read_text())))


async def test_a_server_leaves_after_its_own_drain_timeout_though_the_run_has_a_longer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A spot machine has 30 s of notice; it waited for the run's time."""
    mark = tmp_path / "up"
    run, own = (config(vllm={"drain_timeout_s": seconds}) for seconds in (600, 1))
    async with serving(run) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        plan = joining.ServerJoin("mine", "http://127.0.0.1:1", queue.url, 64)
        running = asyncio.create_task(
            joining.run_server(own, plan, ["/bin/sh", "-c", CHILD, "sh", str(mark)], os.environ)
        )
        async with asyncio.timeout(60):
            while not mark.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0, "mine")
        await client.heartbeat(WorkerReport("w", [], draining={"mine": 1}))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 30) == 0
        assert "mine" not in [server.name for server in await client.servers()]
    assert "vllm.drain_timeout_s = 1 is over" in caplog.text


CHILD_OF_KILLED = """
import os, sys
from pathlib import Path
from slipstream.deploy.servers import joining
from tests.kit import config

queue, mark = sys.argv[1:]
add = joining.ProcessGuard.add

def told(guard, group):
    add(guard, group)
    Path(mark + ".part").write_text(str(group))
    os.replace(mark + ".part", mark)

joining.ProcessGuard.add = told
child = ["/bin/sh", "-c", "trap '' TERM; sleep 300 & wait; wait"]
joining.run(config(), joining.ServerJoin("mine", "http://127.0.0.1:1", queue, 64), child, os.environ)
"""


async def test_a_server_whose_command_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    """vLLM has its own session; it kept its memory, and its port."""
    mark = tmp_path / "up"
    async with serving(config()) as queue:
        command = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD_OF_KILLED, queue.url, str(mark))
        async with asyncio.timeout(60):
            while not mark.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        command.kill()
        await command.wait()
    group = int(mark.read_text())
    until(lambda: not signal_group(group, 0))


async def test_a_second_server_at_the_port_of_the_first_is_told_to_take_another() -> None:
    """The first server is in the run already, and the user does not want to lose it."""
    async with serving(config()) as queue, QueueClient(queue.url, "t", patience_s=5.0) as client:
        await client.put_server(Server("vllm-0", "http://127.0.0.1:8100"))
        second = joining.plan(config(), queue.url, "second", None)
        with pytest.raises(ConfigError, match=r"as 'vllm-0' .*to start another one.*--vllm\.port 8101"):
            await joining.run_server(config(), second, [sys.executable, "-c", ""], os.environ)


async def test_a_server_that_is_refused_its_leave_for_the_token_is_not_told_the_servers() -> None:
    async with serving(config()) as queue:
        viewer = access.token_for("t", "viewer")
        with pytest.raises(QueueRefused, match="needs the token of a learner") as refusal:
            await servers.remove(QueueClient(queue.url, viewer, patience_s=1.0), "a", False, 5.0)
        assert "the run's servers" not in str(refusal.value)


def test_the_run_file_names_the_queue_and_the_option_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def listed(client: QueueClient, checked: object) -> list[ServerStatus]:
        asked.append(client.url)
        return []

    monkeypatch.setattr(servers, "listed", listed)
    run_file = tmp_path / "run.toml"
    run_file.write_text('model.path = "org/model"\ntask.path = "task.py:task"\nqueue.port = 8391\n', encoding="utf-8")
    for given in ([str(run_file)], [str(run_file), "--queue", FAR], ["--queue", FAR]):
        assert CliRunner().invoke(look.app, ["list", *given]).exit_code == 0, given
    assert asked == ["http://127.0.0.1:8391", FAR, FAR]
    refused = CliRunner().invoke(look.app, ["list"]).exception
    assert isinstance(refused, ConfigError)
    assert "which run? Give its run file" in str(refused)
