"""A snapshot of weights on a GPU, with a stand-in for the GPU that counts bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
import pytest
import torch

from slipstream.weight_sync.weights import device_copy, snapshot
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

PROBE = Probe([], np.zeros(0, dtype=np.float32))
BUCKET = 1024
CPU = torch.device("cpu")


class Device:
    """Stands in for a GPU whose copies to the host continue once `goes_on` is set.

    Attributes:
        allocated: Bytes of each buffer on the device.
        held: Bytes of those that are not copied yet.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.allocated: list[int] = []
        self.held = 0
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ended = False
        self._lock = threading.Lock()

    def empty(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        self.held += size
        return torch.empty(size, dtype=torch.uint8)

    def to_host(self, on_device: torch.Tensor, host: torch.Tensor) -> None:
        assert not self._ended
        self._waiting.append((on_device, host))

    def end(self) -> None:
        self._ended = True

    def wait(self) -> None:
        assert self.goes_on.wait(10)
        with self._lock:
            while self._waiting:
                on_device, host = self._waiting.pop()
                host.copy_(on_device)
                self.held -= len(on_device)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(device_copy, "copies_from", lambda of: device)
    monkeypatch.setattr(device_copy, "BUCKET_BYTES", BUCKET)
    return device


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a": (100,), "b": (300, 3), "none": (0,), "c": (7,), "d": (5, 40)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_the_learner_waits_for_copies_on_the_device_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: what the learner changes after that is no part of the version."""
    changed = weights()
    taken = Snapshot(1, changed.items(), PROBE, torch.bfloat16)
    assert device.held == sum(device.allocated) > 0
    for tensor in changed.values():
        tensor.zero_()
    with ThreadPoolExecutor(1) as pool:
        flat = pool.submit(lambda: taken.flat)
        with pytest.raises(NotYet):
            flat.result(0.2)
        device.goes_on.set()
        views = taken.manifest.views(flat.result(10))
    assert device.held == 0
    for name, tensor in weights().items():
        assert torch.equal(views[name], tensor.to(torch.bfloat16))


def test_what_travels_is_cast_on_the_device_bucket_by_bucket(device: Device) -> None:
    device.goes_on.set()
    taken = Snapshot(1, weights().items(), PROBE, torch.bfloat16)
    largest = 300 * 3 * 2
    assert max(device.allocated) <= max(BUCKET, largest)
    sent = sum(tensor.numel() * 2 for tensor in weights().values())
    assert sent <= sum(device.allocated) <= taken.manifest.total_bytes()


def test_weights_that_are_made_one_by_one_are_held_one_at_a_time(device: Device) -> None:
    alive: list[str] = []

    class Made:
        def layout(self) -> dict[str, torch.Tensor]:
            return weights()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights().items():
                alive.append(name)
                yield name, tensor
                assert alive.pop() == name

    device.goes_on.set()
    taken = Snapshot(1, Made(), PROBE)
    assert torch.equal(taken.manifest.views(taken.flat)["d"], weights()["d"])


@pytest.mark.parametrize("names", ["abcd", ""])
def test_weights_that_other_ranks_help_to_make_are_taken_to_their_end(device: Device, names: str) -> None:
    """A rank whose share is complete, or empty, still has rows to send for those of others."""
    share = {name: tensor for name, tensor in weights().items() if name in names}
    ended: list[bool] = []

    class Made:
        def layout(self) -> dict[str, torch.Tensor]:
            return share

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from share.items()
            ended.append(True)

    Snapshot(1, Made(), PROBE)
    assert ended


def test_all_snapshots_of_a_gpu_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32, and gives the next ones out again while NCCL uses them."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(device_copy, "_streams", {})
    for _ in range(3):
        device_copy.copies_from(torch.device("cuda", 1))
    assert made == [torch.device("cuda", 1)]


def test_pinned_memory_is_asked_for_the_device_that_holds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[torch.device | None] = []
    monkeypatch.setattr(
        snapshot._reserve, "take", lambda size, of: wanted.append(of) or torch.zeros(size, dtype=torch.uint8)
    )
    Snapshot(1, weights().items(), PROBE)
    assert wanted == [CPU]
