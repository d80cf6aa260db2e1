"""Shared by all routes: registration, bounded request bodies, the broker, and one body for every refusal.

A body is bounded before it is decoded (its own bytes, and those of all bodies being read) and after (I8).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import JSON
from slipstream.protocol.messages import ErrorBody, LeaseAck, LeaseRequest, TicketRequest, WorkerReport
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.records import Refusal

_MAX_BYTES = 64 * 1024

_MAX_BYTES_OF: Mapping[Any, int] = {
    # They name tickets: a step may take thousands of groups, a worker hold hundreds.
    LeaseAck: 512 * 1024,
    LeaseRequest: 512 * 1024,
    TicketRequest: 256 * 1024,
    WorkerReport: 256 * 1024,
}

_MAX_NAME_CHARACTERS = 256

_MAX_TEXT_CHARACTERS = 16 * 1024

_MAX_URL_CHARACTERS = 1024

_MAX_ENTRIES = 1000

# 409: the request does not fit the state of the run. 410: the ticket has ended. 422: the message breaks a rule.
# 503: the client tries again.
_REASONS_BY_STATUS = {
    401: (reasons.UNAUTHORIZED,),
    403: (reasons.WRONG_ROLE, reasons.FINGERPRINT, reasons.ORIGIN),
    409: (
        *(reasons.RUN_FINISHED, reasons.RUN_EXISTS, reasons.SESSION_SUPERSEDED, reasons.LEASE_LAPSED),
        *(reasons.NOT_LEASED, reasons.ACK_AMBIGUOUS, reasons.STEP_MISSING, reasons.STEP_UNKNOWN),
        *(reasons.VERSION_CONFLICT, reasons.VERSION_MISSING, reasons.SERVER_UNKNOWN, reasons.TRANSITION_FORBIDDEN),
        *(reasons.UNREGISTERED, reasons.SESSION_AWAITED, reasons.GAVE_UP, reasons.EVALUATIONS_OPEN),
    ),
    410: (reasons.TICKET_UNKNOWN, reasons.TICKET_ENDED),
    413: (reasons.TOO_LARGE,),
    422: (
        *(reasons.UNDECODABLE, reasons.OUT_OF_RANGE, reasons.MAX_TICKETS, reasons.WORKER_MISMATCH),
        *(reasons.SERVER_MISMATCH, reasons.SCHEMA_VERSION, reasons.BAD_IMAGE, reasons.TICKET_MISMATCH),
        *(reasons.GROUP_SIZE, reasons.NO_SAMPLED_TOKENS, reasons.REWARD_NOT_FINITE, reasons.METRIC_NOT_FINITE),
        *(reasons.LENGTH_MISMATCH, reasons.TOKEN_ID_NEGATIVE, reasons.TOKEN_ID_UNKNOWN, reasons.TOO_DEEP),
        *(reasons.SEGMENT_TOO_LONG, reasons.TOO_MANY, reasons.LOGPROB_MISSING, reasons.LOGPROB_NOT_FINITE),
        *(reasons.LOGPROB_POSITIVE, reasons.SPAN_COVER, reasons.EXPERTS_COVER, reasons.MASK_COVER),
        reasons.TURN_COVER,
        *(
            reasons.SPAN_VERSION_UNKNOWN,
            reasons.SPAN_SERVER_UNKNOWN,
            reasons.VERSION_FROM_FUTURE,
            reasons.UNVERIFIED_SERVER,
        ),
    ),
    429: (reasons.FULL,),
    503: (*(reasons.BUSY, reasons.STORE_FAILED, reasons.NOT_READY, reasons.STANDS_BY),),
}

HTTP_STATUS: Mapping[str, int] = {reason: status for status, named in _REASONS_BY_STATUS.items() for reason in named}

_TEXT_FIELDS = {"detail", "reason", "rollout", "text", "what"}  # for people to read


H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True)
class Endpoint:
    """Handles a declared route. `takes`: type of the message in the body; bytes for a group, None for none.
    `answers`: types of the answers that are no error, by status; None for one without a body. `query`: types of its
    parameters, none of which is required. `texts`: media types of answers of type `str`."""

    route: access.Route
    handler: Callable[..., Any]
    takes: Any
    answers: Mapping[int, Any]
    query: Mapping[str, Any]
    texts: Sequence[str]


ENDPOINTS: dict[access.Route, Endpoint] = {}


def handles(
    router: APIRouter,
    route: access.Route,
    takes: Any = None,
    answers: Mapping[int, Any] | None = None,
    query: Mapping[str, Any] | None = None,
    texts: Sequence[str] = ("text/plain; charset=utf-8",),
) -> Callable[[H], H]:
    """Register the decorated handler for a declared route; see `Endpoint`."""

    def register(handler: H) -> H:
        ENDPOINTS[route] = Endpoint(route, handler, takes, answers or {200: None}, query or {}, texts)
        registered: H = router.api_route(route.path, methods=[route.method])(handler)
        return registered

    return register


async def _ready_broker(request: Request) -> Broker:
    broker: Broker = request.app.state.broker
    broker.check_ready()
    return broker


# The broker that the app serves. Refused (STORE_FAILED, NOT_READY) while it cannot answer.
ReadyBroker = Annotated[Broker, Depends(_ready_broker)]


class ByteBudget:
    """Bounds the bytes of all group bodies that are being read at one time.

    Args:
        max_bytes: Maximum sum of all shares.

    Attributes:
        taken: Sum of all shares, bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.taken = 0

    def share(self) -> ByteShare:
        return ByteShare(self)

    def take(self, count: int) -> None:
        """Take `count` more bytes. Refused (FULL) if there is no room."""
        if self.taken + count > self._max_bytes:
            raise Refusal(
                reasons.FULL,
                f"bodies of {self.taken} bytes are being read, allowed are {self._max_bytes}: try again in a moment",
                retry_after_s=1.0,
            )
        self.taken += count

    def give_back(self, count: int) -> None:
        self.taken -= count


class ByteShare:
    """One body's share of a `ByteBudget`, given back at the end of the `with`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._taken = 0

    def grow(self, count: int) -> None:
        """Take `count` more bytes. Refused (FULL) if there is no room."""
        self._budget.take(count)
        self._taken += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give_back(self._taken)


def has_left(request: Request) -> Callable[[], Awaitable[bool]]:
    """Return a function that tells whether the sender of a request has hung up."""
    cycle: Any = getattr(request.receive, "__self__", None)  # uvicorn's, which knows without waiting for a message
    if not hasattr(cycle, "disconnected"):
        return request.is_disconnected

    async def asked() -> bool:
        return bool(cycle.disconnected)

    return asked


async def read_body(request: Request, limit: int, remedy: str, share: ByteShare | None = None) -> bytes:
    """Read a request's body.

    Args:
        limit: Maximum size, bytes.
        remedy: What to do about a larger one, for the error.
        share: Counts the bytes while they are held.

    Raises:
        Refusal: TOO_LARGE, before anything is read if the length is declared; FULL if `share` has no room.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Refusal(reasons.TOO_LARGE, f"the body has {declared} bytes, allowed are {limit}: {remedy}")
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if share is not None:
            share.grow(len(chunk))
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise Refusal(reasons.TOO_LARGE, f"the body has more than the {limit} bytes that are allowed: {remedy}")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json(request: Request, kind: Any) -> Any:
    """Read and decode a control message. Refused if TOO_LARGE, UNDECODABLE, or with TOO_MANY entries."""
    body = await read_body(request, _MAX_BYTES_OF.get(kind, _MAX_BYTES), "no such message needs so many")
    try:
        message = codec.decode_json(body, kind)
    except codec.DecodeError as error:
        raise Refusal(reasons.UNDECODABLE, str(error)) from error
    _check_bounds(message, type(message).__name__)
    return message


def reply_json(message: Any) -> Response:
    return Response(codec.encode_json(message), media_type=JSON)


def _check_bounds(value: Any, name: str) -> None:
    """Refuse values that the queue would keep without bound. `name` is the field's."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check_bounds(getattr(value, field), field)
    elif isinstance(value, dict):
        if len(value) > _MAX_ENTRIES and name != "dropped":  # tickets, bounded by the body's size
            raise Refusal(reasons.TOO_MANY, f"{name} has {len(value)} entries, allowed are {_MAX_ENTRIES}")
        for key, item in value.items():
            _check_bounds(key, f"a name in {name}")
            _check_bounds(item, name)
    elif isinstance(value, list):
        for item in value:
            _check_bounds(item, name)
    elif isinstance(value, str):
        max_characters = (
            _MAX_TEXT_CHARACTERS
            if name in _TEXT_FIELDS
            else _MAX_URL_CHARACTERS
            if name == "url"
            else _MAX_NAME_CHARACTERS
        )
        if len(value) > max_characters:
            raise Refusal(
                reasons.TOO_LARGE, f"{name} has {len(value)} characters, allowed are {max_characters}: shorten it"
            )
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Refusal(reasons.UNDECODABLE, f"{name} is beyond 64 bits")


async def refusal_response(broker: Broker, refusal: Refusal) -> Response:
    """Answer a request that an operation refused, once the store has what the refusal tells and is still this queue's.

    Another queue may have begun the session, or issued the tickets, that this one does not know. NOT_READY tells of
    this process alone, and that its store is silent may be why.
    """
    try:
        if broker.ready and refusal.reason != reasons.NOT_READY:
            await broker.writer.newest
    except Refusal as failed:
        return error_response(failed)
    return error_response(refusal)


def error_response(refusal: Refusal) -> Response:
    """Return the HTTP answer to a refusal, at once."""
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = f"{refusal.retry_after_s:g}"
    if refusal.reason == reasons.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return error(HTTP_STATUS[refusal.reason], ErrorBody(refusal.reason, refusal.message), headers)


def install_error_bodies(app: FastAPI) -> None:
    """Answer every refusal of `app` with an `ErrorBody`, those of HTTP itself too, such as an unknown route."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return await refusal_response(request.app.state.broker, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, raised: HTTPException) -> Response:
        hint = "; /openapi.json has all routes of this rollout queue" if raised.status_code == 404 else ""
        message = f"{request.method} {request.url.path}: {raised.detail}{hint}"
        return error(raised.status_code, ErrorBody(reasons.http(raised.status_code), message))

    @app.exception_handler(Exception)
    async def failed(request: Request, raised: Exception) -> Response:
        """Say so to the client; the caller of this logs the traceback."""
        message = f"{request.method} {request.url.path[:200]}: the queue failed: {type(raised).__name__}; see its log"
        return error(500, ErrorBody(reasons.http(500), message))

    @app.exception_handler(ClientDisconnect)
    async def hung_up(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody is there to read it


def error(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    return Response(codec.encode_json(body), status, headers=headers, media_type=JSON)
