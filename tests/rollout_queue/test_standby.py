"""Two queues on one PostgreSQL: one is active, the other stands by, and clients follow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from slipstream.protocol import access
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.messages import BeginSession, TicketRequest
from slipstream.rollout_queue import store
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.store.base import MAX_SILENCE_S
from tests.kit import config, group
from tests.kit.ports import free_port
from tests.kit.postgres import cluster
from tests.kit.queue import listening, serve_version
from tests.kit.relay import relay

HANG_S = 60.0
SERVE = """
import sys
from slipstream.protocol.config import load
from slipstream.rollout_queue.service import serve
serve(load(sys.argv[1]))
"""


@asynccontextmanager
async def a_queue(config: RunConfig) -> AsyncIterator[str]:
    """Serve a queue; yields its URL."""
    async with listening(create_app(config, store.build(config))) as url:
        yield url


async def answer(url: str, path: str) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + path) as response:
        return response.status, await response.text()


async def begin(client: QueueClient) -> None:
    await client.begin_session(BeginSession(0, 0, 100, resume=False))
    await serve_version(client, 0)


async def test_a_standby_says_so_and_takes_over_what_the_active_queue_has() -> None:
    database = cluster().new_database()
    async with asyncio.timeout(HANG_S), a_queue(config(queue={"store": database, "port": 8201})) as second_to_none:
        async with QueueClient(second_to_none) as client:
            await begin(client)
            (ticket,) = (await client.tickets(TicketRequest("w", 1))).tickets
        standby = config(queue={"store": database, "port": 8202})
        async with a_queue(standby) as waiting:
            assert await answer(waiting, access.HEALTH) == (200, "ok")
            status, text = await answer(waiting, access.READY)
            assert status == 503
            assert "stands_by" in text
            assert ":8201" in text
            async with QueueClient(f"{waiting},{second_to_none}") as client:
                assert await client.submit(group(ticket)) is True
                assert client.url == second_to_none
    async with asyncio.timeout(HANG_S), a_queue(standby) as url, QueueClient(url) as client:
        assert await client.submit(group(ticket)) is False, "the group is in the store"


async def test_clients_leave_an_active_queue_that_cannot_reach_its_store() -> None:
    """It continues answering what it has in memory, while another queue takes over."""
    database = cluster().new_database()
    with relay(cluster().port) as between:
        cut_off = config(queue={"store": database.replace(f":{cluster().port}/", f":{between.port}/")})
        async with (
            asyncio.timeout(HANG_S),
            a_queue(cut_off) as first,
            QueueClient(first) as client,
        ):
            await begin(client)
            async with a_queue(config(queue={"store": database})) as second:
                between.close()
                async with QueueClient(f"{first},{second}", timeout_s=10 * HANG_S) as following:
                    assert (await following.tickets(TicketRequest("w", 1))).tickets
                    assert following.url == second
                waits = {wait.what: wait.since_s for wait in (await client.status()).waits}
                assert waits[f"its store to answer: {cut_off.queue.store}"] > MAX_SILENCE_S


@contextmanager
def process(run_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", SERVE, str(run_file)])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def run_file_of(folder: Path, database: str, port: int) -> Path:
    (folder / "task.py").touch()
    path = folder / f"run-{port}.toml"
    path.write_text(
        f'run = {{ dir = "{folder}" }}\nmodel = {{ path = "tiny" }}\ntask = {{ path = "task.py:task" }}\n'
        f'rollout = {{ group_size = 2 }}\nqueue = {{ port = {port}, store = "{database}" }}\n'
    )
    return path


async def becomes(url: str, what: str) -> str:
    """Wait until /readyz of a queue answers a text with `what`. Returns the text."""
    while True:
        try:
            if what in (text := (await answer(url, access.READY))[1]):
                return text
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.02)


async def test_a_stopped_active_queue_is_replaced_and_stands_by_once_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    database = cluster().new_database()
    one, two = (run_file_of(tmp_path, database, free_port()) for _ in range(2))
    first, second = load(one).queue.local_url, load(two).queue.local_url
    with process(one) as sleeper:
        async with asyncio.timeout(HANG_S), QueueClient(f"{first},{second}", patience_s=HANG_S) as client:
            await becomes(first, "ok")
            with process(two) as other:
                await becomes(second, "stands_by")
                await begin(client)
                tickets = (await client.tickets(TicketRequest("w", 2))).tickets
                os.kill(sleeper.pid, signal.SIGSTOP)
                assert await client.submit(group(tickets[0])) is True
                assert client.url == second
                os.kill(sleeper.pid, signal.SIGCONT)
                assert second.rpartition(":")[2] in await becomes(first, "stands_by")
                other.kill()
                assert await client.submit(group(tickets[0])) is False
                assert await client.submit(group(tickets[1])) is True
                assert client.url == first
