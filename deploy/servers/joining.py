"""`slipstream vllm run.toml --join QUEUE`: runs a vLLM server that joins a run, and drains before it leaves.

vLLM runs as a child. At SIGTERM or SIGINT the queue takes the server out first, and vLLM ends when its requests have
ended. A second signal ends it at once. A server that `slipstream servers remove` took out of the run ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.deploy.servers.servers import (
    LEAVE_MARGIN_S,
    check_free,
    check_reachable_by_others,
    checked_name,
    default_name,
    until_gone,
)
from slipstream.protocol.addresses import normal_url
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections import LOOPBACK
from slipstream.protocol.config.sections.base import WILDCARDS, url_of
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard, signal_group

logger = logging.getLogger(__name__)

QUEUE_PATIENCE_S = 10.0

# Seconds between looks at the registry, whether the server is still in the run.
LOOK_EVERY_S = 10.0

# Seconds from SIGTERM to SIGKILL.
GRACE_S = 20.0

# The same where it has requests at work that nobody waits for.
BUSY_GRACE_S = 3.0


@dataclass(frozen=True)
class ServerJoin:
    """A server that joins a run.

    Attributes:
        name: Its name in the run.
        url: URL at which others reach it.
        queue_url: URL of the queue.
        replica: Number that makes its seed differ from those of the run's own servers.
    """

    name: str
    url: str
    queue_url: str
    replica: int


def plan(config: RunConfig, queue_url: str, name: str | None, advertise: str | None) -> ServerJoin:
    """Choose name and address of a server that joins. Raises `ConfigError` if others could not reach it."""
    first = queue_url.partition(",")[0]
    if not _is_url(first):
        raise ConfigError(f"--join {queue_url}: give the queue's URL, as http://host:8200")
    url = (advertise or _own_url(config, first)).rstrip("/")
    if not urlsplit(url).hostname or urlsplit(url).hostname in WILDCARDS:
        raise ConfigError(f"--advertise {url}: give the URL at which others reach this server, as http://host:port")
    try:
        url = normal_url(url)
    except ValueError as error:
        raise ConfigError(f"--advertise: {error}") from None
    check_reachable_by_others(
        url, first, "listen for others with --vllm.host 0.0.0.0, and name the address with --advertise URL"
    )
    chosen = checked_name(name) if name is not None else default_name(url)
    return ServerJoin(chosen, url, queue_url, 64 + zlib.crc32(chosen.encode()) % 900)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def _own_url(config: RunConfig, queue_url: str) -> str:
    """Return the URL of the run file's host; for a wildcard, of this machine's address towards the queue."""
    host, port = config.vllm.host, config.vllm.port
    if host not in WILDCARDS:
        return url_of(host, port)
    queue = urlsplit(queue_url)
    if queue.hostname in LOOPBACK:
        return url_of("127.0.0.1", port)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((queue.hostname, queue.port or 80))  # sends nothing
            return url_of(probe.getsockname()[0], port)
    except OSError as error:
        raise ConfigError(
            f"no address of this machine leads to the queue at {queue_url} ({error}): name one with --advertise URL"
        ) from None


def run(config: RunConfig, joining: ServerJoin, command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `run_server` in its own event loop."""
    return asyncio.run(run_server(config, joining, command, env))


async def run_server(config: RunConfig, joining: ServerJoin, command: Sequence[str], env: Mapping[str, str]) -> int:
    """Register and run the server, and drain it when told to stop. Returns the exit code."""
    token = config.token_for("learner")
    client = QueueClient(joining.queue_url, token, QUEUE_PATIENCE_S, said_by="--join says")
    async with client as queue, contextlib.AsyncExitStack() as cleanup:
        another = f"to start another one, give it its own port, such as --vllm.port {config.vllm.port + 1}; "
        await check_free(queue, joining.name, joining.url, another)
        await queue.put_server(Server(joining.name, joining.url))
        logger.info("%s joins the run at %s, as %s", joining.name, joining.queue_url, joining.url)
        signals = asyncio.Queue[int]()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        # In its own session, so that Ctrl-C reaches this process alone. The guard ends it if this one is killed.
        child = await asyncio.create_subprocess_exec(*command, env=dict(env), start_new_session=True)
        guard = ProcessGuard(BUSY_GRACE_S)
        guard.add(child.pid)
        cleanup.callback(guard.close)
        ended = asyncio.create_task(child.wait())
        stop = asyncio.create_task(signals.get())
        watch = _Watch(queue, joining)
        removed = asyncio.create_task(watch.until_removed())
        await asyncio.wait([ended, stop, removed], return_when=asyncio.FIRST_COMPLETED)
        removed.cancel()
        if ended.done():
            stop.cancel()
            code = ended.result()
            # The engine may have outlived its server, and would keep its memory.
            signal_group(child.pid, signal.SIGKILL)
            await _report_down(queue, joining, f"its process ended with code {code if code >= 0 else 128 - code}")
            return code if code >= 0 else 128 - code
        if stop.done():
            grace_s = await _drain(config, queue, joining, signals, ended, watch.silent)
        else:
            stop.cancel()
            grace_s = GRACE_S
            if not removed.cancelled() and (error := removed.exception()) is not None:
                logger.error("%s is not watched any more and ends: %s", joining.name, error)
        await _end(child, ended, grace_s)
        return 0


class _Watch:
    """Looks regularly whether the server is still in the run.

    Attributes:
        silent: Whether the queue did not answer the last look.
    """

    def __init__(self, queue: QueueClient, joining: ServerJoin) -> None:
        self.silent = False
        self._queue = queue
        self._joining = joining

    async def until_removed(self) -> None:
        """Wait until the registry no longer has the server: once it has drained, or if its name is another server's.

        A queue that does not answer may be restarting, so that is logged once and the wait continues.
        """
        name, url = self._joining.name, self._joining.url
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                servers = await self._queue.servers()
            except QueueError as error:
                if not self.silent:
                    logger.warning("%s keeps running, and waits for the queue: %s", name, error)
                self.silent = True
                continue
            if self.silent:
                logger.info("%s: the queue answers again", name)
            self.silent = False
            if not any((server.name, server.url) == (name, url) for server in servers):
                logger.info("%s was removed from the run and ends", name)
                return


async def _drain(
    config: RunConfig,
    queue: QueueClient,
    joining: ServerJoin,
    signals: asyncio.Queue[int],
    ended: asyncio.Task[int],
    silent: bool,
) -> float:
    """Take the server out of the run; returns when it has drained, vLLM has ended, or a second signal has come.

    After its own `vllm.drain_timeout_s`, which may be less than the run's, it is removed with requests at work, which
    continue elsewhere.

    Args:
        silent: Whether the queue did not answer the last look; then it is not waited for.

    Returns:
        Seconds that vLLM has to end.
    """
    if silent:
        logger.warning("%s ends without draining: the queue does not answer", joining.name)
        return GRACE_S
    grace_s = GRACE_S
    logger.info("%s leaves: no new episodes; a second signal ends it at once", joining.name)

    async def leave() -> None:
        nonlocal grace_s
        left = await queue.remove_server(joining.name)
        try:
            await until_gone(queue, joining.name, left, config.vllm.drain_timeout_s)
        except QueueError:
            left = await queue.remove_server(joining.name, now=True)
            logger.warning(
                "%s leaves with requests at work, which continue elsewhere: vllm.drain_timeout_s = %g is over",
                joining.name,
                config.vllm.drain_timeout_s,
            )
            grace_s = BUSY_GRACE_S
            await until_gone(queue, joining.name, left, LEAVE_MARGIN_S)

    leaving, again = asyncio.create_task(leave()), asyncio.create_task(signals.get())
    await asyncio.wait([leaving, again, ended], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not leaving.done():
        leaving.cancel()
        with contextlib.suppress(QueueError, TimeoutError):
            async with asyncio.timeout(5):
                await queue.remove_server(joining.name, now=True)
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await leaving
        except QueueError as error:
            logger.warning("%s ends without having drained: %s", joining.name, error)
    return grace_s


async def _end(child: asyncio.subprocess.Process, ended: asyncio.Task[int], grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    done, _ = await asyncio.wait([ended], timeout=grace_s)
    signal_group(child.pid, signal.SIGKILL)  # This also ends processes that it has left behind.
    if not done:
        await ended


async def _report_down(queue: QueueClient, joining: ServerJoin, reason: str) -> None:
    with contextlib.suppress(QueueError):
        await queue.put_server(Server(joining.name, joining.url, ServerState.DOWN, None, reason))
