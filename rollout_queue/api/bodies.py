"""Bodies in, bounded before they are decoded and after; bodies out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request, Response

from protocol import codec, reasons
from protocol.client import JSON
from protocol.messages import LeaseAck, LeaseRequest, TicketRequest, WorkerReport
from rollout_queue.broker.byte_budget import ByteShare
from rollout_queue.ledger.refusal import Refusal

_MOST_BYTES = 64 * 1024
_MOST_BYTES_OF: Mapping[Any, int] = {
    # They name tickets: a step may take thousands of groups, a worker hold hundreds.
    LeaseAck: 512 * 1024,
    LeaseRequest: 512 * 1024,
    TicketRequest: 256 * 1024,
    WorkerReport: 256 * 1024,
}
_NAME_CHARACTERS = 256
_TEXT_CHARACTERS = 16 * 1024
_URL_CHARACTERS = 1024
_FIGURES = 1000
_TEXTS = {"detail", "reason", "rollout", "text", "what"}  # fields for people to read, or of unknown length


async def read_body(request: Request, limit: int, remedy: str, share: ByteShare | None = None) -> bytes:
    """The body, of at most `limit` bytes; else refused (TOO_LARGE), where its length is declared before it is read.
    `share`: the room that it takes while it is held, if that is counted; refused (FULL) where there is none."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Refusal(reasons.TOO_LARGE, f"the body has {declared} bytes, allowed are {limit}: {remedy}")
    body = bytearray()
    async for chunk in request.stream():
        if share is not None:
            share.grow(len(chunk))
        body += chunk
        if len(body) > limit:
            raise Refusal(reasons.TOO_LARGE, f"the body has more than the {limit} bytes that are allowed: {remedy}")
    return bytes(body)


async def read_json(request: Request, kind: Any) -> Any:
    """The control message in the body; refused if it is TOO_LARGE or UNDECODABLE, or holds TOO_MANY things."""
    body = await read_body(request, _MOST_BYTES_OF.get(kind, _MOST_BYTES), "no such message needs so many")
    try:
        message = codec.decode_json(body, kind)
    except codec.DecodeError as error:
        raise Refusal(reasons.UNDECODABLE, str(error)) from error
    _check(message, type(message).__name__)
    return message


def reply_json(message: Any) -> Response:
    return Response(codec.encode_json(message), media_type=JSON)


def _check(value: Any, name: str) -> None:
    """Refuse what would be kept without bound: `name` is the field's."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check(getattr(value, field), field)
    elif isinstance(value, dict):
        if len(value) > _FIGURES and name != "dropped":  # tickets, bounded by the body's size
            raise Refusal(reasons.TOO_MANY, f"{name} has {len(value)} entries, allowed are {_FIGURES}")
        for key, item in value.items():
            _check(key, f"a name in {name}")
            _check(item, name)
    elif isinstance(value, list):
        for item in value:
            _check(item, name)
    elif isinstance(value, str):
        most = _TEXT_CHARACTERS if name in _TEXTS else _URL_CHARACTERS if name == "url" else _NAME_CHARACTERS
        if len(value) > most:
            raise Refusal(reasons.TOO_LARGE, f"{name} has {len(value)} characters, allowed are {most}: shorten it")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Refusal(reasons.UNDECODABLE, f"{name} is beyond 64 bits")
