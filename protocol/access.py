"""Roles, tokens and routes: decides which process may use which route. A run has one secret, from which each role's
token is derived (I8).

Whoever starts a queue or a server has the secret, in SLIPSTREAM_TOKEN or in a file that SLIPSTREAM_TOKEN_FILE
names. Every other process sends the token of its role: HMAC-SHA256 of the role under the secret. So the secret crosses
no network, and from a role's token neither the secret nor another role's token can be derived. `slipstream token ROLE`
prints one for a process elsewhere.

A worker draws tickets, submits groups and samples from the servers. The learner alone changes weights, servers and the
position of the run. A viewer reads status, metrics and rollouts, as every role may.

Each route of the queue is declared here, once, with the roles that may ask for it.
"""

from __future__ import annotations

import base64
import hmac
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Role = Literal["worker", "learner", "viewer"]

Holder = Role | Literal["all"]

ROLES: tuple[Role, ...] = get_args(Role)

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"

TOKEN_FILE_VARIABLE = "SLIPSTREAM_TOKEN_FILE"

# A role's token shows its role, so that one in the wrong place is recognised.
_PREFIXES: dict[Role, str] = {"worker": "slw-", "learner": "sll-", "viewer": "slv-"}

# Minimum for `slipstream token`: a shorter secret could be guessed from a role's token.
MIN_TOKEN_CHARACTERS = 16

_MAX_BYTES = 4096

_hidden: str | None = None


class TokenError(ValueError):
    """A token cannot be used. The text says where it is, and never contains it."""


def given_token() -> str | None:
    """Return the environment's token, the run's secret or a role's; None if there is none.

    Raises `TokenError` for a file that is missing or that others may read.
    """
    if found := os.environ.get(TOKEN_VARIABLE):
        return found
    if path := os.environ.get(TOKEN_FILE_VARIABLE):
        return read_token_file(Path(path))
    return _hidden


def hide_token() -> None:
    """Remove the token from this process's environment, so that no program that it starts, and no print of the
    environment, contains it. `given_token` still returns it.

    Code in this process and other processes of the same user can still find it, in memory and in /proc/PID/environ.
    """
    global _hidden
    _hidden = given_token()
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        os.environ.pop(name, None)


def environment_without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without tokens, for programs that need neither queue nor servers: user code, its tools."""
    return {name: value for name, value in environment.items() if name not in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)}


def read_token_file(path: Path) -> str:
    """Read a token from a file that only its owner may read. Raises `TokenError`."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise TokenError(f"{path} holds a token and other users may use it (mode {mode:04o}): chmod 600 {path}")
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise TokenError(f"{path}: the token cannot be read: {error.strerror}") from None
    token = text.decode("ascii", "replace").strip()
    if not token or len(text) > _MAX_BYTES or not token.isprintable():
        raise TokenError(f"{path}: holds no token; write one line, as from openssl rand -hex 16")
    return token


def role_of(token: str) -> Role | None:
    """Return the role of a token; None for a run's secret."""
    return next((role for role, prefix in _PREFIXES.items() if token.startswith(prefix)), None)


def token_for(token: str | None, role: Role) -> str | None:
    """Return the token that a process of `role` sends: derived if `token` is the run's secret.

    Any role's token is returned unchanged: if it is of the wrong role, the receiver says so best.
    """
    if not token or role_of(token) is not None:
        return token
    return derive_token(token, role)


def derive_token(secret: str, role: Role) -> str:
    """Derive a role's token: its prefix and HMAC-SHA256 in base64, 43 characters.

    Raises `TokenError` if `secret` is itself a role's token.
    """
    digest = hmac.digest(secret_of(secret).encode(), b"slipstream bearer token, version 1: " + role.encode(), "sha256")
    return _PREFIXES[role] + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def secret_of(token: str) -> str:
    """Return `token` if it is a run's secret. Raises `TokenError` for a role's token."""
    if (role := role_of(token)) is not None:
        raise TokenError(
            f"{TOKEN_VARIABLE} holds a {role}'s token, but a process that checks the tokens of others (queue, vLLM "
            f"servers, slipstream up, slipstream token) needs the run's secret: set {TOKEN_VARIABLE} to that"
        )
    return token


@dataclass(frozen=True)
class AccessDenied:
    """The refusal of a request. `status`: 401, no token of this run; 403, another role's token."""

    status: int
    message: str


class AccessTokens:
    """The tokens that one queue or server accepts. Raises `TokenError` if `secret` is a role's token."""

    def __init__(self, secret: str) -> None:
        held: dict[Holder, str] = {"all": secret_of(secret)}
        for role in ROLES:
            held[role] = derive_token(secret, role)
        self._held = {holder: f"Bearer {token}".encode() for holder, token in held.items()}

    def holder(self, authorization: bytes) -> Holder | None:
        """Return the role whose token an `Authorization` header carries; "all" for the secret, None for no token of the
        run.

        Every token is compared, each in constant time.
        """
        found: Holder | None = None
        for holder, expected in self._held.items():
            if hmac.compare_digest(authorization, expected):
                found = holder
        return found

    def denied(self, authorization: bytes, roles: Collection[Role], asked: str, receiver: str) -> AccessDenied | None:
        """Decide whether a request is refused.

        Args:
            authorization: Value of the `Authorization` header.
            roles: Roles that may ask.
            asked: The route, for the message. receiver: The process that was asked, such as "queue", for the message.

        Returns:
            None if the header holds the token of one of `roles`, or the secret.
        """
        holder = self.holder(authorization)
        if holder == "all" or holder in roles:
            return None
        needed = next((role for role in ("viewer", *ROLES) if role in roles), "learner")
        if holder is None:
            wrong = f"the token is not one of the {receiver}'s" if authorization else "a token is needed"
            remedy = (
                f"set {TOKEN_VARIABLE} to the run's secret, or to what `slipstream token {needed}` prints where that is"
            )
            return AccessDenied(401, f"{wrong}: {remedy}")
        return AccessDenied(
            403,
            f"{asked} needs the token of a {needed}, and this is a {holder}'s: set {TOKEN_VARIABLE} to what "
            f"`slipstream token {needed}` prints where the run's secret is",
        )


# Paths of the queue service. A name that ends in `_OF` is a format string.
TICKETS = "/v1/tickets"
TICKET_FAIL_OF = "/v1/tickets/{id}/fail"
TICKET_OF = "/v1/tickets/{id}"
WORKER_OF = "/v1/workers/{id}"
GROUP_OF = "/v1/groups/{id}"
LEASES = "/v1/leases"
LEASE_ACK_OF = "/v1/leases/{id}/ack"
LEASE_RENEW_OF = "/v1/leases/{id}/renew"
LEASE_RELEASE_OF = "/v1/leases/{id}/release"
POLICY = "/v1/policy"
EVALUATIONS = "/v1/evaluations"
SERVERS = "/v1/servers"
SERVER_OF = "/v1/servers/{name}"
ROLLOUTS = "/v1/rollouts"
STATUS = "/v1/status"
FINISH = "/v1/run/finish"
PAGE = "/"
PAGE_FILE_OF = "/page/{name}"
PAGE_DATA = "/v1/page"
LIVE = "/v1/live"
SIGN_IN = "/v1/sign-in"
METRICS = "/metrics"
SCHEMA = "/openapi.json"
HEALTH = "/healthz"
READY = "/readyz"


@dataclass(frozen=True)
class Route:
    """Declares one route of the queue: the service registers its handler from it, and the token check reads its roles.

    Attributes:
        method: HTTP method.
        path: Path, in which `{name}` stands for one segment that is not empty.
        roles: Roles whose tokens open the route. None: it is open without a token.
    """

    method: str
    path: str
    roles: tuple[Role, ...] | None

    @property
    def place(self) -> tuple[str, str | None]:
        """The parts of the path before and after the name; None for the second if it holds no name."""
        before, _, rest = self.path.partition("{")
        return before, rest.partition("}")[2] if rest else None


_WORKER: tuple[Role, ...] = ("worker",)
_LEARNER: tuple[Role, ...] = ("learner",)

DRAW_TICKETS = Route("POST", TICKETS, _WORKER)
FAIL_TICKET = Route("POST", TICKET_FAIL_OF, _WORKER)
HEARTBEAT = Route("POST", WORKER_OF, _WORKER)
SIGN_OFF = Route("DELETE", WORKER_OF, _WORKER)
SUBMIT_GROUP = Route("PUT", GROUP_OF, _WORKER)

READ_POSITION = Route("GET", POLICY, ROLES)
COMMAND = Route("POST", POLICY, _LEARNER)
READ_EVALUATIONS = Route("GET", EVALUATIONS, _LEARNER)
ASK_FOR_EVALUATION = Route("POST", EVALUATIONS, _LEARNER)
LEASE = Route("POST", LEASES, _LEARNER)
ACKNOWLEDGE = Route("POST", LEASE_ACK_OF, _LEARNER)
RENEW_LEASE = Route("POST", LEASE_RENEW_OF, _LEARNER)
RELEASE_LEASE = Route("POST", LEASE_RELEASE_OF, _LEARNER)
READ_SERVERS = Route("GET", SERVERS, ROLES)
PUT_SERVER = Route("PUT", SERVER_OF, _LEARNER)
REMOVE_SERVER = Route("DELETE", SERVER_OF, _LEARNER)
FINISH_RUN = Route("POST", FINISH, _LEARNER)

READ_HEALTH = Route("GET", HEALTH, None)
READ_READY = Route("GET", READY, ROLES)
READ_STATUS = Route("GET", STATUS, ROLES)
READ_METRICS = Route("GET", METRICS, ROLES)
READ_ROLLOUTS = Route("GET", ROLLOUTS, ROLES)
READ_SCHEMA = Route("GET", SCHEMA, ROLES)
READ_PAGE = Route("GET", PAGE, None)
READ_PAGE_FILE = Route("GET", PAGE_FILE_OF, None)
READ_TICKET = Route("GET", TICKET_OF, ROLES)
READ_PAGE_DATA = Route("GET", PAGE_DATA, ROLES)
FOLLOW_LIVE = Route("GET", LIVE, ROLES)
SIGN_IN_TO_PAGE = Route("POST", SIGN_IN, None)

ROUTES = (
    DRAW_TICKETS,
    FAIL_TICKET,
    HEARTBEAT,
    SIGN_OFF,
    SUBMIT_GROUP,
    READ_POSITION,
    COMMAND,
    READ_EVALUATIONS,
    ASK_FOR_EVALUATION,
    LEASE,
    ACKNOWLEDGE,
    RENEW_LEASE,
    RELEASE_LEASE,
    READ_SERVERS,
    PUT_SERVER,
    REMOVE_SERVER,
    FINISH_RUN,
    READ_HEALTH,
    READ_READY,
    READ_STATUS,
    READ_METRICS,
    READ_ROLLOUTS,
    READ_SCHEMA,
    READ_PAGE,
    READ_PAGE_FILE,
    READ_TICKET,
    READ_PAGE_DATA,
    FOLLOW_LIVE,
    SIGN_IN_TO_PAGE,
)


def _by_place() -> dict[tuple[str, str | None], dict[str, Route]]:
    found: dict[tuple[str, str | None], dict[str, Route]] = {}
    for route in ROUTES:
        found.setdefault(route.place, {})[route.method] = route
    return found


_BY_PLACE = _by_place()


def find(path: str) -> tuple[Mapping[str, Route], str]:
    """Return the routes of a path by their methods, and the name in it; no routes if none is declared."""
    if (routes := _BY_PLACE.get((path, None))) is not None:
        return routes, ""
    for before in (3, 2):  # "/v1/tickets/NAME/fail" or "/page/NAME"
        parts = path.split("/", before + 1)
        if len(parts) > before and (name := parts[before]):
            behind = f"/{parts[before + 1]}" if len(parts) > before + 1 else ""
            if (routes := _BY_PLACE.get(("/".join(parts[:before]) + "/", behind))) is not None:
                return routes, name
    return {}, ""


def route_for(method: str, routes: Mapping[str, Route]) -> Route | None:
    """Return the route of a method among those of a path; None if it has none. HEAD is answered as GET is."""
    return routes.get("GET" if method == "HEAD" else method)


def roles_of(route: Route | None) -> tuple[Role, ...] | None:
    """Return the roles whose tokens open a route of the queue; None where it needs no token.

    A route that is not declared changes the run, for all that is known: it is the learner's.
    """
    return _LEARNER if route is None else route.roles
