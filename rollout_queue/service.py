"""Runs the queue: its listening socket, its store, and uvicorn until a signal or a failing store ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from slipstream.protocol import access, tracing
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_queue import store
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.api.connection import bounded_by
from slipstream.rollout_queue.api.connection_pool import MIN_DESCRIPTORS, ConnectionPool, Shares, fit, raise_descriptors
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.lifecycle import tell_end
from slipstream.rollout_queue.store.base import StoreError, Superseded

_IDLE_CONNECTION_S = 75  # longer than the client keeps one, so that none breaks in use
_GRACE_S = 5
_BACKLOG = 4096  # a fleet that starts at once connects at once
# Of garbage: after so many middle ones comes a full one. With Python's 10 a fleet's waiting requests, none of which is
# garbage, cause one every few seconds, for which the loop stands still: a third of a second with 2,000 workers.
_MIDDLE_COLLECTIONS = 100

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
    with tracing.sending(config.tracking.traces, "queue", config.run.name):
        while True:
            try:
                _serve_once(config)
                return
            except Superseded as error:
                # A queue that was stopped finds another in its place. Where the store allows, it stands by from here
                # on.
                logger.warning("%s", error)


def _serve_once(config: RunConfig) -> None:
    """Serve until a signal, or until the store fails or is another queue's."""
    with contextlib.closing(listen(config.queue.host, config.queue.port)) as listener:
        config, shares = fitted(config, raise_descriptors())
        app = create_app(config, store.build(config))
        broker: Broker = app.state.broker
        server = _Server(app, shares)
        broker.on_failure = server.stop
        logger.info("queue of run %s at %s", config.run.name, config.queue.local_url)
        try:
            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(server.serve(sockets=[listener]))
        except SystemExit as error:  # uvicorn's way to say that the app did not start
            raise broker.failure or StoreError("the queue did not start: see the lines above") from error
    # Whoever sent the signal waits for the end of the process, not for a queue that stands by.
    if broker.failure is not None and not (server.signalled and isinstance(broker.failure, Superseded)):
        raise broker.failure


def fitted(config: RunConfig, descriptors: int) -> tuple[RunConfig, Shares]:
    """Lower `queue.max_workers` to what the process may open, and say so.

    Raises:
        ConfigError: It may open fewer than `MIN_DESCRIPTORS`.
    """
    wanted = Shares(config.queue.max_workers)
    needs = f"file descriptors and this process may open {descriptors}"
    remedy = f"raise the limit (ulimit -n {wanted.descriptors}, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    if descriptors < MIN_DESCRIPTORS:
        raise ConfigError(f"the queue needs at least {MIN_DESCRIPTORS} {needs}: {remedy}")
    shares = fit(wanted.max_workers, descriptors)
    if shares.max_workers < wanted.max_workers:
        logger.warning(
            "queue.max_workers = %d needs %d %s: it takes %d workers; %s",
            wanted.max_workers,
            wanted.descriptors,
            needs,
            shares.max_workers,
            remedy,
        )
        queue = config.queue.model_copy(update={"max_workers": shares.max_workers})
        config = config.model_copy(update={"queue": queue})
    return config, shares


class _Server(uvicorn.Server):
    """uvicorn's server. A signal also ends the long-polls, and the process then exits with code 0.

    Attributes:
        signalled: Whether a signal has asked for the end.
    """

    def __init__(self, app: FastAPI, shares: Shares) -> None:
        broker: Broker = app.state.broker
        self._broker = broker
        self.signalled = False
        pool = ConnectionPool(shares, broker.observations.connections, broker.clock.monotonic)
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_by(pool, broker.observations.histograms),
                ws="none",
                backlog=_BACKLOG,
                access_log=False,
                proxy_headers=False,
                log_level="warning",
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and take what lives as long as the process out of the garbage collector's work."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _MIDDLE_COLLECTIONS)

    def stop(self) -> None:
        self.should_exit = True
        tell_end(self._broker)
        self._broker.close_waits()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.signalled = True
        self.stop()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` if the address cannot be used."""
    # asyncio turns Nagle's algorithm off only if the protocol is named. It would cost 40 ms an answer.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
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
