"""Memory into which a worker on a GPU receives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.weight_sync.transports.receiver import DeviceBuffers, in_turn
from slipstream.weight_sync.weights.manifest import Bucket, Manifest
from slipstream.weight_sync.weights.parts import Part, joined

CPU = torch.device("cpu")


def test_a_worker_receives_any_tensor_in_two_buffers_of_a_bucket() -> None:
    weights = {"embedding": torch.rand(50, 100), **{f"layer.{i}": torch.rand(300) for i in range(9)}}
    weights |= {"head": torch.rand(5000)}
    manifest = Manifest.of(weights)
    flat = torch.empty(manifest.total_bytes(), dtype=torch.uint8)
    for name, view in manifest.views(flat).items():
        view.copy_(weights[name])
    buffers = DeviceBuffers(CPU)

    def begin(number: int, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None]:
        def arrive() -> None:
            buffer.copy_(flat[bucket.start : bucket.end])

        buffer.fill_(255)
        return arrive

    pieces = in_turn(manifest.buckets(1300), buffers.take, begin)
    copies = ({name: part if isinstance(part, Part) else part.clone() for name, part in one.items()} for one in pieces)
    arrived = dict(joined(copies))
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], weights[name]) for name in weights)
    assert all(buffer.untyped_storage().nbytes() <= 1300 for buffer in buffers._buffers if buffer is not None)
