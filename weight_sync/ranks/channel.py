"""Messages between rank 0 and the other ranks."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import msgspec

# The wait for a message, which may be as long as the run.
FOR_EVER = timedelta(days=20)


class Channel(Protocol):
    """Carries messages between rank 0 and one other rank, in order. Each end receives on one thread."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes:
        """Wait for the next message. Raises RuntimeError once this end is closed. On a rank other than 0, also once
        rank 0 is gone; that another rank is gone does not end rank 0's wait."""

    def close(self) -> None:
        """End the wait of this end's `receive`. A thread that waited in torch while its process ends would abort it."""


class StoreChannel:
    """A `Channel` over torch's store, which the ranks have anyway.

    Args:
        sending: A client of the store.
        receiving: Another one, as a wait keeps its client busy.
        rank: The rank other than 0.
        leads: Whether this end is rank 0's.
    """

    def __init__(self, sending: Any, receiving: Any, rank: int, leads: bool) -> None:
        self._sending, self._receiving = sending, receiving
        to_rank, to_lead = (f"share/{rank}/to", f"share/{rank}/from")
        self._out, self._in = (to_rank, to_lead) if leads else (to_lead, to_rank)
        self._sent = itertools.count()
        self._awaited = -1
        self._closed = False
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._sending.set(f"{self._out}/{next(self._sent)}", message)

    def receive(self) -> bytes:
        self._awaited += 1
        if self._closed:
            raise RuntimeError("the channel was closed")
        key = f"{self._in}/{self._awaited}"
        self._receiving.wait([key], FOR_EVER)
        if self._closed:
            raise RuntimeError("the channel was closed")
        message: bytes = self._receiving.get(key)
        self._receiving.delete_key(key)
        return message

    def close(self) -> None:
        self._closed = True
        with self._lock, suppress(RuntimeError):  # rank 0 is gone, which ends the wait too
            self._sending.set(f"{self._in}/{self._awaited}", b"")


class Call(msgspec.Struct):
    """A message to a rank.

    Attributes:
        number: Of the call; a call "cancel" has the number of the one that it ends.
        name: Of a method of `Sender`.
        link: Of the connection.
        arguments: Of the method; a snapshot is its version.
    """

    number: int
    name: str
    link: int
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct):
    """A rank's answer to the call `number`: its result, or the text of its error."""

    number: int
    result: Any = None
    error: str | None = None
