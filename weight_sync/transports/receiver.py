"""Receives weights at one of a server's workers.

Each rank of the learner sends its share of the weights over its own connection, and a worker has a `Receiver` for
each. What arrives is loaded piece by piece: while one bucket is loaded, the next one is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slipstream.weight_sync.weights.manifest import Bucket, Manifest

# Tensors by name, as in a checkpoint.
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Worker:
    """One of a server's workers.

    Attributes:
        rank: Its rank in a group of one rank of the learner, which is rank 0, and all workers of the server.
        device: Of its model.
    """

    rank: int
    device: torch.device


@dataclass(frozen=True)
class Share:
    """One share of the weights, as it arrives.

    Attributes:
        manifest: Layout of the whole share.
        pieces: Its tensors by and by; each step blocks until some are there and verified. A large one comes as several
            `Part`s. Their memory is good until the next step.
        kept: Whether the memory is good until the next update.
    """

    manifest: Manifest
    pieces: Iterator[Weights]
    kept: bool = False


class Receiver(Protocol):
    """A worker's end of the connection to one rank of the learner."""

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Connect, or begin to.

        Args:
            info: What the rank's `Sender.open` returned.

        Raises:
            TransferError: This worker cannot be reached in this way, or the learner cannot.
        """

    def receive(self, update: dict[str, Any]) -> Share:
        """Begin to receive. Blocks at most until the whole share is there.

        Args:
            update: What the rank's `Sender.offer` returned.

        Raises:
            Exception: It did not arrive. The text reaches the learner.
        """

    def close(self) -> None:
        """Close the connection to the learner. Never raises, and may be called again."""


def of_one_version(updates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take the labels off what the ranks of the learner offer, for their receivers.

    Raises:
        ValueError: They are not shares of one version.
    """
    labels = {str(update.get("label")) for update in updates}
    if len(labels) != 1 or labels == {"None"}:
        raise ValueError(f"the shares of an update are not of one version: {', '.join(sorted(labels))}")
    return [{name: value for name, value in update.items() if name != "label"} for update in updates]


class DeviceBuffers:
    """Two buffers on a device, filled in turn: while one is loaded from, the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None, None]

    def take(self, number: int, size: int) -> torch.Tensor:
        """Return a uint8 [size]: the same memory for all even, or all odd, numbers."""
        buffer = self._buffers[number % 2]
        if buffer is None or len(buffer) < size:
            self._buffers[number % 2] = None  # frees the old one first
            self._buffers[number % 2] = buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return buffer[:size]


def in_turn(
    buckets: Sequence[Bucket],
    take: Callable[[int, int], torch.Tensor],
    begin: Callable[[int, Bucket, torch.Tensor], Callable[[], None]],
    trailer: int = 0,
) -> Iterator[Weights]:
    """Yield the tensors of each bucket while the next one is under way.

    Args:
        take: As `DeviceBuffers.take`.
        begin: Begins to fill a buffer: uint8 [bucket.size + trailer]. Returns a function that waits until it is filled.
        trailer: Bytes that follow each bucket.
    """

    def begun(number: int) -> tuple[torch.Tensor, Callable[[], None]]:
        buffer = take(number, buckets[number].size + trailer)
        return buffer, begin(number, buckets[number], buffer)

    ahead = begun(0) if buckets else None
    for number, bucket in enumerate(buckets):
        assert ahead is not None
        buffer, wait = ahead
        ahead = begun(number + 1) if number + 1 < len(buckets) else None
        wait()
        yield bucket.tensors(buffer[: bucket.size])


class HostShares:
    """Hands on what was received in the host's memory: as it lies there, or bucket by bucket on a GPU."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buffers = DeviceBuffers(device)
        self._stream: Any = None

    def share(self, manifest: Manifest, flat: torch.Tensor) -> Share:
        """Make the share of `flat`: uint8 [manifest.total_bytes()] on the host, pinned where the model is on a GPU."""
        if self._device.type != "cuda":
            return Share(manifest, iter([manifest.views(flat)]), kept=True)
        if self._stream is None:
            make: Any = torch.cuda.Stream
            self._stream = make(self._device)

        def begin(number: int, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None]:
            with torch.cuda.stream(self._stream):
                buffer.copy_(flat[bucket.start : bucket.end], non_blocking=True)
                arrived: Callable[[], None] = self._stream.record_event().synchronize
            return arrived

        return Share(manifest, in_turn(manifest.buckets(self._bucket_bytes), self._buffers.take, begin))
