"""The queue as an HTTP service, and the server that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from protocol.config import ConfigError, RunConfig
from rollout_queue.api import endpoints, web
from rollout_queue.broker import Broker, Clock
from rollout_queue.store.base import Store, StoreError
from rollout_queue.store.sqlite import MEMORY, SqliteStore

_IDLE_CONNECTION_S = 75  # longer than the client keeps one, so that none breaks in use
_GRACE_S = 5

logger = logging.getLogger(__name__)


def serve(config: RunConfig) -> None:
    """Run the queue until SIGTERM or SIGINT.

    Raises `ConfigError` if the address or the store cannot be used, `StoreError` if the store fails on the way.
    """
    with contextlib.closing(listen(config.queue.host, config.queue.port)) as listener:
        store = SqliteStore(MEMORY if config.queue.store == MEMORY else config.run_dir / "queue.db")
        app = create_app(config, store)
        broker: Broker = app.state.broker
        server = _Server(app)
        broker.on_failure = server.stop
        logger.info("queue of run %s at %s, store %s", config.run.name, config.queue.url, config.queue.store)
        try:
            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(server.serve(sockets=[listener]))
        except SystemExit as error:  # how uvicorn says that the app did not start
            raise StoreError(broker.failure or "the queue did not start: see the lines above") from error
    if broker.failure is not None:
        raise StoreError(broker.failure)


def create_app(config: RunConfig, store: Store, clock: Clock | None = None) -> FastAPI:
    """The service over `store`, which it closes when it ends. `app.state.broker` is what it serves."""
    broker = Broker(config, store, clock or Clock())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with broker.running():
            yield

    app = FastAPI(title="Slipstream rollout queue", lifespan=lifespan, openapi_url=None)
    app.state.broker = broker
    web.answer_in_problems(app)
    endpoints.add_observer_routes(app, broker)
    endpoints.add_worker_routes(app, broker)
    endpoints.add_learner_routes(app, broker)
    if config.token:
        app.add_middleware(web.BearerToken, token=config.token)
    return app


class _Server(uvicorn.Server):
    """uvicorn, except that a signal also ends the long-polls, and that the process then exits with code 0."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
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
    """A listening socket; raises `ConfigError`."""
    # With the protocol named, asyncio switches Nagle's algorithm off: it costs 40 ms an answer otherwise.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
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
