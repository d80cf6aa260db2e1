"""Lets the ranks of one gloo group meet, and answers only those that hold the group's secret (I8).

The secret is random, made for one group, and sent to the workers over a server's route that wants the learner's token.
torch's TCPStore answers whoever connects, so gloo's addresses are exchanged here instead: both ends show that they hold
the secret, by an HMAC over both ends' nonces, and every later message carries an HMAC with its number.

A stranger's connection costs a thread for `GREETING_S` at most, and at most `MAX_STRANGERS` are held at a time: a new
one replaces the oldest. None of them delays a rank that has the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed

# torch's annotations leave out stores.
dist: Any = torch.distributed

GREETING_S = 5.0
MAX_STRANGERS = 32
_AGAIN_S = 0.2
_MAGIC = b"slipgloo"
_HELLO = struct.Struct("!8sI32s")  # magic, rank, the worker's nonce
_LENGTH = struct.Struct("!I")
_MAC_BYTES = 32
# gloo's addresses of one rank towards all others.
_MAX_BYTES = 4 * 1024 * 1024


class AuthenticationError(RuntimeError):
    """The other end does not hold the group's secret."""


class Channel:
    """One proven connection: frames of bytes, each with the HMAC of its direction, number and text."""

    def __init__(self, connection: socket.socket, key: bytes, ours: bytes, theirs: bytes) -> None:
        self._connection = connection
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    def send(self, payload: bytes) -> None:
        mac = self._mac(self._ours, self._sent, payload)
        self._sent += 1
        self._connection.sendall(_LENGTH.pack(len(payload)) + payload + mac)

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message.

        Raises:
            OSError: No whole message came in time.
            AuthenticationError: The message is not the other end's.
        """
        deadline = time.monotonic() + timeout_s
        (size,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size, deadline))
        if size > _MAX_BYTES:
            raise AuthenticationError(f"a message of {size} bytes: more than {_MAX_BYTES}")
        payload = _read(self._connection, size, deadline)
        mac = _read(self._connection, _MAC_BYTES, deadline)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, payload)):
            raise AuthenticationError("a message with another key")
        self._received += 1
        return payload

    def close(self) -> None:
        _cut(self._connection)

    def _mac(self, direction: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8) + payload, "sha256")


class Rendezvous:
    """The learner's end: listens on `host` from the start until `close`. `store` is rank 0's.

    turned_away: connections that did not prove the secret. Raises OSError where it cannot listen.
    """

    def __init__(self, host: str, secret: bytes, size: int, timeout_s: float) -> None:
        """Start to listen.

        Args:
            size: Number of ranks, the learner's included.
            timeout_s: Bound on every wait for a key, in seconds.
        """
        self.turned_away = 0
        self._secret = secret
        self._size = size
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._seated: dict[int, Channel] = {}
        self._closed = False
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.store = KeyStore(self._set, self._get)
        threading.Thread(target=self._accept, name="gloo-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end every connection and wait. May be called again."""
        with self._changed:
            self._closed = True
            left = [*self._strangers]
            channels = [*self._seated.values()]
            self._changed.notify_all()
        # `close` alone does not wake a thread in `accept`; this does.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in left:
            _cut(connection)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN_S)  # out of file descriptors
                continue
            with self._changed:
                if self._closed:
                    _cut(connection)
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest, _ = self._strangers.popitem(last=False)
                    _cut(oldest)
                self._strangers[connection] = None
            threading.Thread(target=self._greet, args=(connection,), name="gloo-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            rank, channel = _accepted(connection, self._secret, self._size)
        except (OSError, AuthenticationError):
            with self._changed:
                self.turned_away += 1
                self._strangers.pop(connection, None)
            _cut(connection)
            return
        with self._changed:
            self._strangers.pop(connection, None)
            taken = self._closed or rank in self._seated
            if not taken:
                self._seated[rank] = channel
        if taken:
            channel.close()
            return
        with contextlib.suppress(OSError, AuthenticationError, ValueError, RuntimeError, msgspec.MsgspecError):
            self._serve(channel)
        channel.close()

    def _serve(self, channel: Channel) -> None:
        while True:
            asked, key, value = msgspec.msgpack.decode(channel.receive(self._timeout_s), type=tuple[str, str, bytes])
            if asked == "set":
                self._set(key, value)
                channel.send(b"")
            else:
                channel.send(self._get(key, self._timeout_s))

    def _set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _get(self, key: str, timeout_s: float | None) -> bytes:
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s)
            if key in self._values:
                return self._values[key]
        raise RuntimeError(
            "the rendezvous was closed" if self._closed else f"nobody wrote {key} within {timeout_s:g} s"
        )


def join(host: str, port: int, secret: bytes, rank: int, timeout_s: float) -> tuple[KeyStore, Channel]:
    """Join the rendezvous at `host:port` as a worker.

    Returns:
        The worker's store, and the connection to close once the group stands.

    Raises:
        RuntimeError: Nobody answers there in time, or the one that answers does not hold the secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            channel = _joined(host, port, secret, rank, deadline)
            break
        except OSError as error:
            if time.monotonic() + _AGAIN_S > deadline:
                raise RuntimeError(f"no learner at {host}:{port} within {timeout_s:g} s: {error}") from error
            time.sleep(_AGAIN_S)
    turn = threading.Lock()

    def ask(asked: str, key: str, value: bytes, wait_s: float) -> bytes:
        with turn:
            try:
                channel.send(msgspec.msgpack.encode((asked, key, value)))
                return channel.receive(wait_s)
            except OSError as error:
                raise RuntimeError(f"the learner's rendezvous at {host}:{port} is gone: {error}") from error

    def set_(key: str, value: bytes) -> None:
        ask("set", key, value, timeout_s)

    def get(key: str, wait_s: float | None) -> bytes:
        return ask("get", key, b"", timeout_s if wait_s is None else min(wait_s, timeout_s))

    return KeyStore(set_, get), channel


class KeyStore(dist.Store):  # type: ignore[misc]
    """A torch store made of two functions: set(key, value), and get(key, time-out in seconds), which waits."""

    def __init__(self, set_: Callable[[str, bytes], None], get: Callable[[str, float | None], bytes]) -> None:
        super().__init__()
        self._set, self._get = set_, get

    def set(self, key: str, value: bytes | str) -> None:
        self._set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key, None)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get(key, None if timeout is None else timeout.total_seconds())


def mac_of(secret: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 over the parts, each with its length."""
    return hmac.digest(secret, b"".join(_LENGTH.pack(len(part)) + part for part in parts), "sha256")


def _joined(host: str, port: int, secret: bytes, rank: int, deadline: float) -> Channel:
    """Authenticate as a worker."""
    connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
    try:
        nonce = secrets.token_bytes(32)
        connection.sendall(_HELLO.pack(_MAGIC, rank, nonce))
        until = min(deadline, time.monotonic() + 2 * GREETING_S)
        theirs, answer = _read(connection, 32, until), _read(connection, _MAC_BYTES, until)
        about = (rank.to_bytes(4), nonce, theirs)
        if not hmac.compare_digest(answer, mac_of(secret, b"learner", *about)):
            raise AuthenticationError(
                f"the process that listens at {host}:{port} does not hold the secret of the transfer: it is not the "
                f"learner"
            )
        connection.sendall(mac_of(secret, b"worker", *about))
        return Channel(connection, mac_of(secret, b"line", *about), b"w", b"l")
    except BaseException:
        _cut(connection)
        raise


def _accepted(connection: socket.socket, secret: bytes, size: int) -> tuple[int, Channel]:
    """Authenticate a worker, bounded in time and bytes. Returns its rank and the connection."""
    deadline = time.monotonic() + GREETING_S
    magic, rank, theirs = _HELLO.unpack(_read(connection, _HELLO.size, deadline))
    if magic != _MAGIC or not 1 <= rank < size:
        raise AuthenticationError("not a worker of the group")
    nonce = secrets.token_bytes(32)
    about = (rank.to_bytes(4), theirs, nonce)
    connection.sendall(nonce + mac_of(secret, b"learner", *about))
    if not hmac.compare_digest(_read(connection, _MAC_BYTES, deadline), mac_of(secret, b"worker", *about)):
        raise AuthenticationError("its secret is not the group's")
    return rank, Channel(connection, mac_of(secret, b"line", *about), b"l", b"w")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes. Raises OSError if they do not come in time."""
    found = bytearray()
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left)
        part = connection.recv(min(size - len(found), 1 << 16))
        if not part:
            raise ConnectionResetError("the connection was cut")
        found += part
    return bytes(found)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
