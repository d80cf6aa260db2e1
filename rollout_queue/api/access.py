"""Decides who may use the queue: holders of a token; without one, programs on this machine but no web pages."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from slipstream.protocol import access, reasons
from slipstream.protocol.client import JSON, MSGPACK
from slipstream.rollout_queue.ledger.records import Refusal

_OURS = (JSON, MSGPACK)

COOKIE = "slipstream"

_READ_HEADERS = frozenset(
    {b"host", b"origin", b"authorization", b"cookie", b"content-length", b"transfer-encoding", b"content-type"}
)


class Gate:
    """Decides from a request's head, before any of its body is read, whether its sender may ask for a route.

    With a secret: holders of the token of a role that the route allows, and browsers that have signed in, to look.
    Without one: what a page in a browser cannot send, which is another content type than a form's and no `Origin` but
    the queue's.

    Args:
        secret: The run's secret; None for none. Raises `TokenError` if it is a role's token.
        hosts: Names of the queue. Another name in `Host` is that of a page whose name was resolved to this machine.
    """

    def __init__(self, secret: str | None, hosts: frozenset[str]) -> None:
        self._secret = secret
        self._ring = access.AccessTokens(secret) if secret else None
        self._hosts = hosts

    def check(
        self, route: access.Route | None, asked: str, headers: Sequence[tuple[bytes, bytes]], reads: bool
    ) -> None:
        """Refuse a request (UNAUTHORIZED, WRONG_ROLE, ORIGIN).

        Args:
            route: The declared route; None for one that is not, which needs a learner's token.
            asked: Method and path, for the message.
            headers: As ASGI gives them.
            reads: Whether the method changes nothing.
        """
        roles = access.roles_of(route)
        given = {name: value for name, value in headers if name in _READ_HEADERS}
        if self._ring is None and route is not access.READ_HEALTH:
            self._check_host(given)
        if route is access.SIGN_IN_TO_PAGE or (self._ring is None and route is not access.READ_HEALTH):
            self._check_page(given, reads)
        if self._ring is not None and roles is not None:
            authorization = given.get(b"authorization", b"")
            if reads and not authorization:
                authorization = _from_cookie(given.get(b"cookie", b""))
            denied = self._ring.denied(authorization, roles, asked, "queue")
            if denied is not None:
                if denied.status == 403:
                    raise Refusal(reasons.WRONG_ROLE, denied.message)
                raise Refusal(reasons.UNAUTHORIZED, denied.message)

    def sign_in(self, token: str) -> str | None:
        """Return the value of the cookie that lets a browser look; None where no token is needed.

        Args:
            token: The run's secret or any role's token.

        Raises:
            Refusal: UNAUTHORIZED.
        """
        if self._ring is None or self._secret is None:
            return None
        if self._ring.holder(f"Bearer {token.strip()}".encode(errors="replace")) is None:
            raise Refusal(
                reasons.UNAUTHORIZED,
                "this is not a token of the run: paste what `slipstream token viewer` prints where the run's secret is",
            )
        return access.derive_token(self._secret, "viewer")

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a name that a page from elsewhere may have pointed here. A token of the run shows who asks."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = _name(host)
        if name not in self._hosts and not _is_loopback(name):
            raise Refusal(
                reasons.ORIGIN,
                f"Host is {host[:200]!r}, which is not a name of this machine: use {', '.join(sorted(self._hosts))}, "
                f"or set a token (SLIPSTREAM_TOKEN or queue.token)",
            )

    def _check_page(self, headers: Mapping[bytes, bytes], reads: bool) -> None:
        if reads:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2].lower() != host.lower():
            raise Refusal(
                reasons.ORIGIN, f"Origin is {origin[:200]!r}: a page from elsewhere may not change anything here"
            )
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if has_body and kind not in _OURS and kind.partition(";")[0].strip().lower() not in _OURS:
            raise Refusal(reasons.ORIGIN, f"Content-Type is {kind[:200]!r}: send {JSON} (groups: {MSGPACK})")


def _from_cookie(cookies: bytes) -> bytes:
    """Return the `Authorization` that a page's cookie stands for. It only looks: its token is a viewer's."""
    for cookie in cookies.split(b";"):
        name, _, value = cookie.strip().partition(b"=")
        if name == COOKIE.encode():
            return b"Bearer " + value
    return b""


def names_of_this_machine(host: str) -> frozenset[str]:
    """Return the names in `Host` of a queue that listens on `host`. All addresses of loopback are allowed besides."""
    return frozenset({host.lower(), "localhost", "127.0.0.1", "::1", socket.gethostname().lower()})


@lru_cache(maxsize=64)
def _name(host: str) -> str:
    """Return the name or address in a `Host` header without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=64)
def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
