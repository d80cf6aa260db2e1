"""Memory into which a worker on a GPU receives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weight_sync.transports.receiver import DeviceBuffers, in_turn
from weight_sync.weights.manifest import Bucket, Manifest

CPU = torch.device("cpu")


def test_memory_is_kept_for_layers_and_let_go_for_embedding_and_head() -> None:
    weights = {"embedding": torch.rand(5000), **{f"layer.{i}": torch.rand(300) for i in range(9)}}
    weights |= {"head": torch.rand(5000)}
    manifest = Manifest.of(weights)
    flat = torch.empty(manifest.total_bytes(), dtype=torch.uint8)
    for name, view in manifest.views(flat).items():
        view.copy_(weights[name])
    buffers, taken = DeviceBuffers(CPU), list[torch.Tensor]()

    def take(number: int, size: int, keep: bool) -> torch.Tensor:
        taken.append(buffers.take(number, size, keep))
        return taken[-1]

    def begin(number: int, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None]:
        def arrive() -> None:
            buffer.copy_(flat[bucket.start : bucket.end])

        return arrive

    for piece in in_turn(manifest.buckets(1300), take, begin):
        for name, tensor in piece.items():
            assert torch.equal(tensor, weights[name])
    held = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in taken[1:-1]}
    assert sorted(held.values()) == [1200, 1200]
    assert [buffer.untyped_storage().nbytes() for buffer in buffers._buffers if buffer is not None] == [1200, 1200]
