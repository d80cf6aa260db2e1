"""Weights that ranks hold parts of, on their way to a publication (trl#6797, trl#7103).

Each gather is a collective of all ranks. Gathers that come in another order on another rank deadlock, and so do those
between which one rank talks to a server.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.learner.model import export
from slipstream.learner.ranks.wrapping import sharded
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.model import tiny_model
from tests.kit.sync import probe


@pytest.fixture(params=[0, 2], ids=["rank 0", "rank 2"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Makes a group of three ranks, two of them feigned: two ranks cannot cross over."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=3)
    yield request.param
    torch.distributed.destroy_process_group()


def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Grows by the shape of each tensor that is gathered, in order."""
    order: list[torch.Size] = []
    gather = DTensor.full_tensor

    def noted(tensor: DTensor, **arguments: object) -> torch.Tensor:
        order.append(tensor.shape)
        return gather(tensor, **arguments)

    monkeypatch.setattr(DTensor, "full_tensor", noted)
    return order


def test_all_ranks_gather_every_tensor_in_one_order_and_rank_0_alone_keeps_them(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharded(tiny_model(), torch.device("cpu"))
    expected = [tensor.shape for tensor in model.state_dict().values() if isinstance(tensor, DTensor)]
    order = gathers(monkeypatch)
    kept = export.gathered(model, keep=rank == 0)
    # The model's own order, which no rank chooses; a tied weight comes once.
    assert order == expected[: len(order)]
    assert len(order) == len(dict(model.named_parameters()))
    assert bool(kept) == (rank == 0)


def test_nothing_is_sent_before_the_last_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Trainer.weights` hands the publisher whole tensors on the host: a snapshot gathers none."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        model = sharded(tiny_model(), torch.device("cpu"))
        weights = export.gathered(model, keep=True)
        order = gathers(monkeypatch)
        assert isinstance(weights, list)
        assert not any(isinstance(tensor, DTensor) for _, tensor in weights)
        Snapshot(1, weights, probe(), torch.bfloat16)
        assert order == []
    finally:
        torch.distributed.destroy_process_group()
