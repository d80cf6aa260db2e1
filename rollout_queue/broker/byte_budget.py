"""How many bytes of groups may be on their way in at once."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from protocol import reasons
from rollout_queue.ledger.records import Refusal


class ByteBudget:
    """`most`: bytes of all shares together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def share(self) -> ByteShare:
        return ByteShare(self)

    def take(self, count: int) -> None:
        """Refused (FULL) if there is no room for so many more."""
        if self.taken + count > self._most:
            raise Refusal(
                reasons.FULL,
                f"bodies of {self.taken} bytes are being read, allowed are {self._most}: try again in a moment",
                retry_after_s=1.0,
            )
        self.taken += count


class ByteShare:
    """One body's part of the room, given back at the end of the `with`."""

    def __init__(self, room: ByteBudget) -> None:
        self._room = room
        self._taken = 0

    def grow(self, count: int) -> None:
        """Refused (FULL) if there is no room."""
        self._room.take(count)
        self._taken += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.taken -= self._taken
