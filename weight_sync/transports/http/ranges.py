"""What a request for a part of the weights must look like; the same at the learner and at a server that passes on."""

from __future__ import annotations

import hmac
import re

PREFIX = "/slipstream/chunks/"
# Bytes that are handed to a connection at one time.
SLICE_BYTES = 256 * 1024

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


def allowed(authorization: str, secret: str) -> bool:
    """Whether the request's Authorization header holds the transfer's secret."""
    return same(authorization, f"Bearer {secret}")


def same(given: str, expected: str) -> bool:
    """Whether two texts are equal, in a time that does not tell how far. `given`: as a header is read, any bytes."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode())


def parse(header: str, total_bytes: int) -> tuple[int, int] | None:
    """First byte and byte past the end of a Range header of one range; None where it names none within the bytes."""
    match = _RANGE.fullmatch(header)
    if match is None:
        return None
    start, end = int(match[1]), int(match[2]) + 1
    return (start, end) if start < end <= total_bytes else None
