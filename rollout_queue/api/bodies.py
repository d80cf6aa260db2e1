"""Bodies in, bounded before they are decoded; bodies out."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from protocol import codec, reasons
from protocol.client import JSON
from rollout_queue.ledger.refusal import Refusal

_MAX_CONTROL_BYTES = 8 * 1024**2


async def read_body(request: Request, limit: int, remedy: str) -> bytes:
    """The body, of at most `limit` bytes; else refused (TOO_LARGE), where its length is declared before it is read."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Refusal(reasons.TOO_LARGE, f"the body has {declared} bytes, allowed are {limit}: {remedy}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Refusal(reasons.TOO_LARGE, f"the body has more than the {limit} bytes that are allowed: {remedy}")
    return bytes(body)


async def read_json(request: Request, kind: Any) -> Any:
    """The control message in the body; refused if it is TOO_LARGE or UNDECODABLE."""
    body = await read_body(request, _MAX_CONTROL_BYTES, "no control message needs so many")
    try:
        return codec.decode_json(body, kind)
    except codec.DecodeError as error:
        raise Refusal(reasons.UNDECODABLE, str(error)) from error


def reply_json(message: Any) -> Response:
    return Response(codec.encode_json(message), media_type=JSON)
