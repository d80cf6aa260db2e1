"""What arrives in parts, and is handed to vLLM's loaders in parts or as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.weight_sync.transports.receiver import Share
from slipstream.weight_sync.vllm.engine.arrivals import Arrivals, kind_of
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.parts import Part

WEIGHTS = {
    "layers.0.norm.weight": torch.rand(6),
    "layers.0.up.weight": torch.rand(64, 16),
    "layers.0.mlp.experts.3.up.weight": torch.rand(64, 16),
    "layers.1.odd.weight": torch.rand(64, 16),
    "layers.0.stack": torch.rand(8, 8, 16),
}


def arriving(in_one: set[str]) -> Arrivals:
    manifest = Manifest.of(WEIGHTS)
    flat = torch.zeros(manifest.total_bytes(), dtype=torch.uint8)
    for name, view in manifest.views(flat).items():
        view.copy_(WEIGHTS[name])

    def pieces() -> Iterator[dict[str, torch.Tensor]]:
        for bucket in manifest.buckets(1024):
            buffer = flat[bucket.start : bucket.end].clone()
            yield bucket.tensors(buffer)
            buffer.fill_(255)

    return Arrivals([Share(manifest, pieces())], in_one=in_one)


@pytest.mark.parametrize("learned", [False, True])
def test_parts_reach_the_loaders_of_plain_matrices_alone(learned: bool) -> None:
    in_parts: set[str] = set()
    for piece in arriving({kind_of("layers.0.odd.weight")} if learned else set()):
        for name, tensor in piece.items():
            if isinstance(tensor, Part):
                in_parts.add(name)
            else:
                assert torch.equal(tensor, WEIGHTS[name])
    assert in_parts == {"layers.0.up.weight"} | (set() if learned else {"layers.1.odd.weight"})


def test_all_can_be_kept_whole() -> None:
    whole = arriving(set()).whole()
    assert whole.keys() == WEIGHTS.keys()
    assert all(torch.equal(whole[name], WEIGHTS[name]) for name in WEIGHTS)
