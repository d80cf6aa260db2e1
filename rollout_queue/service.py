"""Runs the queue: its listening socket, its store, and uvicorn until a signal or a failing store ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from protocol import access
from protocol.config import ConfigError, RunConfig
from rollout_queue import store
from rollout_queue.api.app import create_app
from rollout_queue.api.connection import Connection, max_connections
from rollout_queue.broker.broker import Broker
from rollout_queue.store.base import StoreError

_IDLE_CONNECTION_S = 75  # longer than the client keeps one, so that none breaks in use
_GRACE_S = 5

logger = logging.getLogger(__name__)


def serve(config: RunConfig) -> None:
    """Run the queue until SIGTERM or SIGINT.

    Raises:
        ConfigError: The address, the store or the token cannot be used.
        StoreError: The store failed later.
    """
    try:
        access.secret_of(config.token or "")
    except access.TokenError as error:
        raise ConfigError(str(error)) from None
    with contextlib.closing(listen(config.queue.host, config.queue.port)) as listener:
        app = create_app(config, store.build(config))
        broker: Broker = app.state.broker
        server = _Server(app)
        broker.on_failure = server.stop
        logger.info("queue of run %s at %s, store %s", config.run.name, config.queue.url, config.queue.store)
        try:
            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(server.serve(sockets=[listener]))
        except SystemExit as error:  # uvicorn's way to say that the app did not start
            raise broker.failure or StoreError("the queue did not start: see the lines above") from error
    if broker.failure is not None:
        raise broker.failure


class _Server(uvicorn.Server):
    """uvicorn's server. A signal also ends the long-polls, and the process then exits with code 0."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                limit_concurrency=max_connections(),
                access_log=False,
                proxy_headers=False,
                log_level="warning",
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._broker: Broker = app.state.broker

    def stop(self) -> None:
        self.should_exit = True
        self._broker.close_waits()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` if the address cannot be used."""
    # asyncio turns Nagle's algorithm off only if the protocol is named. It would cost 40 ms an answer.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"queue.host = {host}, queue.port = {port}: cannot listen there: {error.strerror or error}; is another "
            f"queue running? Stop it, or choose another queue.port"
        ) from error
    return listener


def _new_event_loop() -> asyncio.AbstractEventLoop:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # uvloop has no build for some platforms
        from uvloop import new_event_loop as factory
    return factory()
