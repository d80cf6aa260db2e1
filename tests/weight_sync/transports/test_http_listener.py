"""I8: strangers at the learner's http port neither fill it up, nor keep servers out, nor fill its log."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from slipstream.weight_sync.transports.http import listener
from slipstream.weight_sync.transports.http.blob_server import BlobServer
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.pull import Pull

CHUNK = 1 << 18
SIZE = 8 * CHUNK + 99


def address(depot: BlobServer) -> tuple[str, int]:
    parts = urlsplit(depot.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def head(depot: BlobServer, key: str, range_: str = "bytes=0-9", token: str | None = None) -> bytes:
    token = depot.secret if token is None else token
    lines = f"GET /slipstream/chunks/{key} HTTP/1.1\r\nHost: x\r\nRange: {range_}\r\nAuthorization: Bearer {token}"
    return f"{lines}\r\n\r\n".encode("latin-1")


def pull(depot: BlobServer, key: str, flat: torch.Tensor) -> bool:
    """Whether the right bytes came."""
    into = memoryview(bytearray(SIZE))
    Pull(ChunkList.of(flat, CHUNK), depot.secret, [depot.url_of(key)], into, 20).run()
    return bytes(into) == flat.numpy().tobytes()


def still_open(connections: list[socket.socket]) -> int:
    """How many the other end has not closed."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            count += connection.recv(1) != b""
        except BlockingIOError:
            count += 1
        except ConnectionError:
            pass
    return count


def wait_until_closed(connection: socket.socket, timeout_s: float) -> float:
    """Seconds until the other end has closed it. Raises TimeoutError."""
    began = time.monotonic()
    connection.settimeout(timeout_s)
    with suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return time.monotonic() - began


@contextmanager
def flood(depot: BlobServer) -> Iterator[list[int]]:
    """Strangers that connect without end and say nothing. Yields how many came, in one item."""
    came, stop = [0], threading.Event()

    def work() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with suppress(OSError):
                held.append(socket.create_connection(address(depot), 1))
                came[0] += 1
            if len(held) > 200:
                held.pop(0).close()
        for connection in held:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield came
    finally:
        stop.set()
        thread.join()


def test_i8_silent_connections_are_bounded_and_a_server_still_pulls(
    depot: BlobServer, flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_STRANGERS", 8)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address(depot), 5)) for _ in range(100)]
        assert pull(depot, depot.put(flat), flat)
        assert still_open(silent) <= 8


def test_i8_many_servers_pull_behind_a_flood_of_strangers(depot: BlobServer, flat: torch.Tensor) -> None:
    key = depot.put(flat)
    with flood(depot) as came, ThreadPoolExecutor(24) as pool:
        assert all(pool.map(lambda _: pull(depot, key, flat), range(24)))
    assert came[0] > listener.MAX_STRANGERS


@pytest.mark.parametrize("said", [b"", b"GET /slipstream/chunks/0 HTTP/1.1\r\nHost: x\r\n"])
def test_i8_who_does_not_prove_itself_is_sent_away(
    depot: BlobServer, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "IDLE_S", 0.3)
    with socket.create_connection(address(depot), 5) as stranger:
        stranger.sendall(said)
        assert 0.2 < wait_until_closed(stranger, 5) < 3


def test_i8_a_stranger_that_keeps_talking_is_sent_away_too(depot: BlobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "IDLE_S", 0.3)
    with socket.create_connection(address(depot), 5) as stranger:
        began = time.monotonic()
        with suppress(ConnectionError):
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            while time.monotonic() - began < 5:
                stranger.sendall(b"a: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /slipstream/chunks/0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /slipstream/chunks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
        b"\0\1\2\n\n",
    ],
)
def test_i8_who_is_refused_holds_no_connection(depot: BlobServer, request_: bytes) -> None:
    with socket.create_connection(address(depot), 5) as stranger:
        stranger.sendall(request_)
        assert wait_until_closed(stranger, 5) < listener.IDLE_S / 2


def test_i8_an_idle_connection_of_a_server_ends_and_a_busy_one_does_not(
    flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "IDLE_S", 0.3)
    # The answer takes longer than that.
    with BlobServer("127.0.0.1", mbytes_per_s=1.5) as depot, socket.create_connection(address(depot), 5) as server:
        server.sendall(head(depot, depot.put(flat), f"bytes=0-{SIZE - 1}"))
        server.settimeout(5)
        got, began = 0, time.monotonic()
        while got < SIZE:
            piece = server.recv(65536)
            assert piece
            got += len(piece)
        assert time.monotonic() - began > 0.6
        assert 0.1 < wait_until_closed(server, 5) < 3


def test_i8_proven_connections_are_bounded_too_and_the_others_come_again(
    flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_AUTHENTICATED", 3)
    with BlobServer("127.0.0.1", mbytes_per_s=20) as depot, ThreadPoolExecutor(3) as pool:
        key = depot.put(flat)
        assert all(pool.map(lambda _: pull(depot, key, flat), range(3)))
        with ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(address(depot), 5)) for _ in range(6)]
            for server in idle:
                server.sendall(head(depot, key))
                assert server.recv(1000).startswith(b"HTTP/1.1 206 ")
            time.sleep(0.1)
            for server in idle:  # the rest of the answers
                server.setblocking(False)
                with suppress(OSError):
                    server.recv(1000)
            assert still_open(idle) <= 3


def test_a_connection_that_could_not_be_taken_is_no_end_of_the_port(
    depot: BlobServer, flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process was out of file descriptors."""
    inner, failures = asyncio.BaseEventLoop.connect_accepted_socket, [errno.EMFILE] * 3

    async def fails(self: Any, *args: Any, **options: Any) -> Any:
        if failures:
            args[1].close()
            raise OSError(failures.pop(), "Too many open files")
        return await inner(self, *args, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "connect_accepted_socket", fails)
    assert pull(depot, depot.put(flat), flat)
    assert caplog.text.count("Too many open files") == 1


@pytest.mark.parametrize("token", ["\xff\xfe", "\xe9" * 40, ""])
def test_i8_a_token_of_any_bytes_is_refused_and_logs_nothing(
    depot: BlobServer, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(address(depot), 5) as stranger:
        stranger.sendall(head(depot, "0", token=token))
        assert stranger.recv(1000).startswith(b"HTTP/1.1 401 ")
    assert not caplog.records


def test_i8_digits_of_other_alphabets_are_no_range(depot: BlobServer, flat: torch.Tensor) -> None:
    connection = http.client.HTTPConnection(*address(depot), timeout=5)
    headers = {"Authorization": f"Bearer {depot.secret}", "Range": "bytes=\u0660-\u0661".encode()}
    connection.request("GET", f"/slipstream/chunks/{depot.put(flat)}", headers=headers)
    assert connection.getresponse().status == 416
    connection.close()


def test_a_receiver_that_goes_away_in_the_middle_is_no_error(
    depot: BlobServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    key = depot.put(large)
    for _ in range(8):
        with socket.create_connection(address(depot), 5) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
            server.sendall(head(depot, key, f"bytes=0-{len(large) - 1}"))
            server.recv(1000)
    served = -1
    while served != depot.served:
        served = depot.served
        time.sleep(0.1)
    assert served < 8 * len(large)
    assert not caplog.records
