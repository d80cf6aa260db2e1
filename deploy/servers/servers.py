"""`slipstream servers`: lists the run's vLLM servers, adds one that is running, removes one after it has drained."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp

from slipstream.protocol import client, reasons
from slipstream.protocol.addresses import normal_url
from slipstream.protocol.client import QueueClient, QueueError, QueueRefused
from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.sections import LOOPBACK
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import ServerStatus, Status
from slipstream.weight_sync.fleet.eligibility import Wanted, describe_mismatches, judge, of_another_run
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 10.0

POLL_S = 0.5

# Seconds to wait beyond the queue's own deadline for a server that drains.
LEAVE_MARGIN_S = 30.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_name(url: str) -> str:
    """Name a server by host and port, with this machine's name for a loopback address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in LOOPBACK:
        host = socket.gethostname()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{host}-{parts.port or 80}").strip("-.")[:64]


def checked_name(name: str) -> str:
    """Return `name`. Raises `ConfigError` if a server may not be named so."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: take at most 64 letters, digits, dots, dashes and underscores")
    return name


def check_reachable_by_others(url: str, queue_url: str, remedy: str) -> None:
    """Raise `ConfigError` for a loopback address if the queue is on another machine."""
    here, queue = urlsplit(url).hostname, urlsplit(queue_url).hostname
    if here in LOOPBACK and queue not in LOOPBACK:
        raise ConfigError(
            f"{url} is an address that only this machine can reach, and the queue is at {queue_url}: workers and "
            f"learner elsewhere would not find the server; {remedy}"
        )


async def check_free(queue: QueueClient, name: str, url: str, elsewhere: str = "") -> None:
    """Raise `ConfigError` if another server has the name, or the server is in the run under another name.

    `elsewhere`: how a server that is not started yet gets its own address, for the message.
    """
    for server in await queue.servers():
        if server.name == name and server.url != url and server.state is not ServerState.DOWN:
            raise ConfigError(
                f"a server {name!r} is in the run already, at {server.url} ({server.state}): choose another --name, or "
                f"let that one leave with `slipstream servers remove {name} --queue {queue.url}`"
            )
        if server.url == url and server.name != name:
            raise ConfigError(
                f"the server at {url} is in the run already, as {server.name!r} ({server.state}): {elsewhere}one name "
                f"is enough; to rename it, let it leave with `slipstream servers remove {server.name} --queue "
                f"{queue.url}` first"
            )


async def _check_not_in(queue: QueueClient, name: str) -> None:
    """Raise `ConfigError` if the server is in the run: registering it again would take it out of service."""
    for server in await queue.servers():
        if server.name == name and server.state is not ServerState.DOWN:
            raise ConfigError(
                f"the server at {server.url} is in the run already, as {name!r} ({server.state}): nothing to add"
            )


async def add(client: QueueClient, url: str, name: str | None, token: str | None) -> Server:
    """Register a running server by the URL at which workers and learner reach it.

    Raises:
        ConfigError: The server does not answer, does not suit a run, belongs to another run, or is in this one.
    """
    try:
        url = normal_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if urlsplit(url).path:
        raise ConfigError(f"{url!r} is not the URL of a server: write it as http://host:port")
    check_reachable_by_others(url, client.url, "give the address at which they see it")
    await _check_answers(url, token)
    await _check_suits(url, token)
    chosen = checked_name(name) if name is not None else default_name(url)
    async with client:
        await check_free(client, chosen, url)
        await _check_not_in(client, chosen)
        await _check_owner(client, url, token)
        return await client.put_server(Server(chosen, url))


async def listed(
    client: QueueClient, checked: Callable[[Status], Status] = lambda status: status
) -> list[ServerStatus]:
    """Return the run's servers. `checked`: see `deploy.commands.status.show`."""
    async with client:
        return checked(await client.status()).servers


async def _check_not_last(client: QueueClient, name: str) -> None:
    """Raise `ConfigError` if the run would be left without a serving server."""
    serving = [server.name for server in await client.servers() if server.state is ServerState.SERVING]
    if serving == [name]:
        raise ConfigError(
            f"{name} is the last server that serves: without it the run stands still until another one joins; add "
            f"one first, or say --force"
        )


async def remove(client: QueueClient, name: str, now: bool, timeout_s: float, force: bool = False) -> None:
    """Remove a server and wait until it is gone: it gets no new episodes and finishes its requests.

    Args:
        client: The queue.
        name: Name of the server in the run.
        now: Whether to remove it without waiting for its requests.
        timeout_s: Maximum seconds to wait.
        force: Whether to remove even the last server that serves.

    Raises:
        ConfigError: The server is not in the run, or is the last that serves.
        QueueError: It still drains after `timeout_s`.
    """
    async with client:
        if not force:
            await _check_not_last(client, name)
        try:
            left = await client.remove_server(name, now)
        except QueueRefused as refusal:
            if refusal.reason != reasons.SERVER_UNKNOWN:
                raise
            known = ", ".join(server.name for server in await client.servers()) or "none"
            raise ConfigError(f"{refusal}; the run's servers: {known}") from None
        if any(server.name == name for server in left):
            logger.info("%s drains: it takes no new episode, and its requests end; --now does not wait", name)
        await until_gone(client, name, left, timeout_s)


async def until_gone(client: QueueClient, name: str, left: list[Server], timeout_s: float) -> None:
    """Wait until a draining server has left. Raises `QueueError` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(server.name == name for server in left):
        if time.monotonic() > deadline:
            raise QueueError(
                f"server {name} still drains after {timeout_s:.0f} s: `slipstream servers remove {name} --queue "
                f"{client.url} --now` ends it"
            )
        await asyncio.sleep(POLL_S)
        left = await client.servers()


async def _check_owner(client: QueueClient, url: str, token: str | None) -> None:
    """Raise `ConfigError` if the learner of another run controls the server."""
    run_id = (await client.position()).run
    async with ServerControl(url, LOOK_TIMEOUT_S, token) as control:
        try:
            state = await control.state()
        except ControlError:
            return  # The learner looks again, and reports its findings.
    if (why := of_another_run(url, state, run_id)) is not None:
        raise ConfigError(why)


async def _check_answers(url: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{url}/get_world_size") as response,
        ):
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(
            f"no server answers at {url} ({client.connection_failure(error)}): start it with `slipstream vllm "
            f"run.toml --join URL`, which registers it by itself, or give the address at which it is reached from here"
        ) from None
    if status == 401:
        raise ConfigError(f"{url} wants a token: set SLIPSTREAM_TOKEN to the run's")
    if status >= 400:
        raise ConfigError(
            f"{url} answers HTTP {status} to /get_world_size: it lacks the routes that weight sync needs; start it "
            f"with `slipstream vllm run.toml`"
        )


async def _check_suits(url: str, token: str | None) -> None:
    """Raise `ConfigError` for flags that suit no run. The learner checks what its run file asks for beyond that."""
    try:
        async with ServerControl(url, LOOK_TIMEOUT_S, token) as control:
            faults = judge(await control.facts(), Wanted())
    except ControlError as error:
        raise ConfigError(f"{error}; start the server with `slipstream vllm run.toml`") from None
    if faults:
        raise ConfigError(f"{url}: {describe_mismatches(faults)}")
