"""Defines the wire format of the http transport: chunks with digests, and requests for ranges of bytes.

The learner and a server that passes bytes on share it.
"""

from __future__ import annotations

import hmac
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from blake3 import blake3

# Large enough that requests do not count, small enough that little is fetched again after damage.
CHUNK_BYTES = 8 * 1024**2
THREADS = 2
CHUNKS_PREFIX = "/slipstream/chunks/"

# Bytes written to a connection at once.
SLICE_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True)
class ChunkList:
    """A blob in chunks of `chunk_bytes` (the last may be shorter), with the BLAKE3 of each in hex."""

    chunk_bytes: int
    total_bytes: int
    digests: list[str]

    def __post_init__(self) -> None:
        """Raise ValueError where the parts do not fit each other."""
        if self.chunk_bytes < 1 or self.total_bytes < 0:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes, {self.total_bytes} in all")
        if len(self.digests) != -(-self.total_bytes // self.chunk_bytes):
            raise ValueError(
                f"there are {len(self.digests)} digests, and {self.total_bytes} bytes in chunks of {self.chunk_bytes} "
                f"need another number"
            )

    @classmethod
    def of(cls, flat: torch.Tensor, chunk_bytes: int = CHUNK_BYTES) -> ChunkList:
        """Hash the chunks of a uint8 tensor on the host."""
        whole = bytes_of(flat)
        starts = range(0, len(whole), chunk_bytes)
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(lambda start: digest_of(whole[start : start + chunk_bytes]), starts))
        return cls(chunk_bytes, len(whole), digests)

    @cached_property
    def root(self) -> str:
        """Digest of the whole: BLAKE3 over the chunks' digests, in hex."""
        return digest_of(memoryview("".join(self.digests).encode()))

    def place(self, index: int) -> tuple[int, int]:
        """Return the first byte of a chunk and the byte past its end."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; `ChunkList(**...)` reads them back."""
        return asdict(self)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the host."""
    return memoryview(flat.numpy().data)


def digest_of(data: memoryview) -> str:
    """Return the BLAKE3 of `data` in hex, 64 characters."""
    return blake3(data).hexdigest()


def is_authorized(authorization: str, secret: str) -> bool:
    """Return whether the request's Authorization header holds the transfer's secret."""
    return equal_secrets(authorization, f"Bearer {secret}")


def equal_secrets(given: str, expected: str) -> bool:
    """Return whether two texts are equal, in constant time. `given` may hold any bytes, as read from a header."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode())


def parse_range(header: str, total_bytes: int) -> tuple[int, int] | None:
    """Parse a Range header with one range. Returns first byte and byte past the end; None if not within the bytes."""
    match = _RANGE.fullmatch(header)
    if match is None:
        return None
    start, end = int(match[1]), int(match[2]) + 1
    return (start, end) if start < end <= total_bytes else None
