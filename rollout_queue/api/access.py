"""Decides who may use the queue: holders of a token; without one, programs on this machine but no web pages."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import access, reasons
from protocol.client import JSON, MSGPACK
from rollout_queue.api import requests
from rollout_queue.ledger.records import Refusal

_READS = ("GET", "HEAD")


class RoleTokens:
    """ASGI middleware: refuses requests without the token of a role that its route allows, or the run's secret.

    It decides from `access.Route` and the headers, before any body is read. Raises `TokenError` if `secret` is a
    role's token.
    """

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._ring = access.AccessTokens(secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (roles := access.roles_of(scope["method"], scope["path"])) is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            denied = self._ring.denied(given, roles, f"{scope['method']} {scope['path'][:200]}", "queue")
            if denied is not None:
                if denied.status == 403:
                    refusal = Refusal(reasons.WRONG_ROLE, denied.message)
                else:
                    refusal = Refusal(reasons.UNAUTHORIZED, denied.message)
                await requests.error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class NoWebPages:
    """ASGI middleware: refuses requests that a page in a browser could send (ORIGIN).

    A page can send to loopback what a form can send: another content type than ours, and an `Origin` that is not the
    queue's.

    Args:
        hosts: Names of the queue. Another name in `Host` is that of a page whose name was resolved to this machine.
            None allows every name: then a token is needed, which no page has.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != access.HEALTH:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            wrong = self._wrong_host(headers.get(b"host", ""))
            if wrong is None and scope["method"] not in _READS:
                wrong = _wrong_origin(headers) or _wrong_type(headers)
            if wrong is not None:
                await requests.error_response(Refusal(reasons.ORIGIN, wrong))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _wrong_host(self, given: str) -> str | None:
        if self._hosts is None or (name := _name(given)) in self._hosts or _is_loopback(name):
            return None
        return (
            f"Host is {given[:200]!r}, which is not a name of this machine: use {', '.join(sorted(self._hosts))}, or "
            f"set a token (SLIPSTREAM_TOKEN or queue.token)"
        )


def names_of_this_machine(host: str) -> frozenset[str]:
    """Return the names in `Host` of a queue that listens on `host`. All addresses of loopback are allowed besides."""
    return frozenset({host.lower(), "localhost", "127.0.0.1", "::1", socket.gethostname().lower()})


def _wrong_origin(headers: dict[bytes, str]) -> str | None:
    origin = headers.get(b"origin")
    if origin is None or origin.partition("://")[2].lower() == headers.get(b"host", "").lower():
        return None
    return f"Origin is {origin[:200]!r}: a page from elsewhere may not change anything here"


def _wrong_type(headers: dict[bytes, str]) -> str | None:
    if headers.get(b"content-length", "0") == "0" and b"transfer-encoding" not in headers:
        return None
    given = headers.get(b"content-type", "")
    if given.partition(";")[0].strip().lower() in (JSON, MSGPACK):
        return None
    return f"Content-Type is {given[:200]!r}: send {JSON} (groups: {MSGPACK})"


def _name(host: str) -> str:
    """Return the name or address in a `Host` header without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
