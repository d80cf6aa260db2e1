"""What one server's task asks of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weight_sync.fleet.publications import ServerFigures

if TYPE_CHECKING:
    from weight_sync.fleet.member import Member


class Others(Protocol):
    """What a member asks of the fleet."""

    def claim(self, boot: str, name: str) -> str | None:
        """Why the server process of this `boot` cannot have this name: it is in the fleet under another one."""

    def proven(self, member: Member, version: int, figures: ServerFigures) -> None:
        """A server has a version."""

    def would_be_stale(self, member: Member, version: int, took_s: float) -> bool:
        """Whether a server that served this version, which took so long, would be too far and too long behind."""
