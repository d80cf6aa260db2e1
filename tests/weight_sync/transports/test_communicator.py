"""Groups of NCCL with deadlines, over a stand-in that blocks as NCCL does."""

from __future__ import annotations

import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.communicator import Communicator, own_gpu
from slipstream.weight_sync.transports.gpu.nccl_library import Nccl, NcclError
from slipstream.weight_sync.transports.gpu.nccl_receiver import NcclInitInfo, NcclReceiver, chunks, wire_order
from slipstream.weight_sync.transports.receiver import Worker
from slipstream.weight_sync.weights.checksum import checksum
from slipstream.weight_sync.weights.manifest import Manifest
from tests.kit.stand_in_nccl import World, stand_in_gpu

WORKER = Worker(1, torch.device("cpu"))


def met(world: World, ranks: int, timeout_s: float = 5) -> list[Communicator]:
    gpu = stand_in_gpu(world)
    unique_id = gpu.library.unique_id()
    groups = [Communicator(gpu, timeout_s) for _ in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda rank: groups[rank].meet(unique_id, ranks, rank), range(ranks)))
    return groups


def test_what_rank_0_holds_reaches_all_others() -> None:
    groups = met(World(), 3)
    held = [torch.full((5,), rank, dtype=torch.uint8) for rank in range(3)]
    for group, tensor in zip(groups, held, strict=True):
        group.broadcast(tensor)
    for group, tensor in zip(groups, held, strict=True):
        group.wait()
        assert tensor.tolist() == [0] * 5


def test_a_peer_that_never_comes_ends_the_wait_in_time_and_the_group_with_it() -> None:
    world = World()
    first, _ = met(world, 2, timeout_s=0.2)
    began = time.monotonic()
    first.broadcast(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(NcclError, match="not done within"):
        first.wait()
    assert time.monotonic() - began < 5
    assert world.aborted == [0]
    with pytest.raises(NcclError, match="aborted"):
        first.broadcast(torch.zeros(4, dtype=torch.uint8))


def test_an_abort_from_another_thread_ends_a_wait_at_once() -> None:
    world = World()
    first, _ = met(world, 2, timeout_s=60)
    first.broadcast(torch.zeros(4, dtype=torch.uint8))
    threading.Timer(0.1, first.abort).start()
    began = time.monotonic()
    with pytest.raises(NcclError, match="aborted"):
        first.wait()
    assert time.monotonic() - began < 5
    first.abort()
    assert world.aborted == [0], "once only: the handle is gone after it"


def test_a_reception_that_waits_for_a_learner_that_died_ends_when_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    gpu, worker = stand_in_gpu(world), stand_in_gpu(world, "GPU-1")
    unique_id = gpu.library.unique_id()
    info = NcclInitInfo(base64.b64encode(unique_id).decode(), 2, "GPU-0", 1024, 60)
    monkeypatch.setattr(communicator, "own_gpu", lambda device: worker)
    receiver = NcclReceiver(asdict(info), WORKER)
    Communicator(gpu, 5).meet(unique_id, 2, 0)
    manifest = Manifest(["a"], ["uint8"], [[2000]])
    with ThreadPoolExecutor(1) as pool:
        share = receiver.receive(manifest.as_dict())
        receiving = pool.submit(next, share.pieces)
        time.sleep(0.1)
        assert not receiving.done()
        receiver.close()
        with pytest.raises(TransferError, match="aborted"):
            receiving.result(timeout=5)


def test_a_learner_on_the_same_gpu_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "own_gpu", lambda device: stand_in_gpu(World(), "GPU-0"))
    with pytest.raises(TransferError, match=r"share the GPU GPU-0.*transport = ipc"):
        NcclReceiver(asdict(NcclInitInfo("", 2, "GPU-0", 1024, 1)), WORKER)


@pytest.mark.parametrize("size", [0, 1, 8, 4099])
def test_the_checksum_tells_changed_exchanged_and_cut_off_bytes(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    own = checksum(data)
    assert torch.equal(own, checksum(data.clone()))
    for at in range(0, size, max(1, size // 7)):
        changed = data.clone()
        changed[at] ^= 128
        assert not torch.equal(own, checksum(changed))
    if size > 16:
        exchanged = data.clone()
        # Words that differ by their highest bit alone, which a plain weighted sum does not tell apart.
        exchanged[0:8], exchanged[8:16] = 0, 0
        exchanged[7] = 128
        other = exchanged.clone()
        other[7], other[15] = 0, 128
        assert not torch.equal(checksum(exchanged), checksum(other))


def test_the_checksum_reads_from_any_place() -> None:
    data = torch.randint(0, 256, (100,), dtype=torch.uint8)
    assert torch.equal(checksum(data[3:]), checksum(data[3:].clone()))


def test_tensors_are_packed_so_that_each_type_may_be_read_where_it_lies() -> None:
    manifest = Manifest(["odd", "wide", "half", "flag"], ["bfloat16", "int64", "float32", "bool"], [[3], [2], [1], [5]])
    ordered = wire_order(manifest)
    assert ordered.names == ["wide", "half", "odd", "flag"]
    assert [chunk.names for chunk in chunks(ordered, 15)] == [["wide"], ["half", "odd", "flag"]]


def test_without_a_gpu_the_error_says_what_to_set() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(NcclError, match=r"set weight_sync\.transport = gloo"):
        own_gpu()


def test_without_nccl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/nowhere/libnccl.so.2")
    monkeypatch.setattr("slipstream.weight_sync.transports.gpu.nccl_library._places", lambda: ["/nowhere/libnccl.so.2"])
    with pytest.raises(NcclError, match=r"/nowhere/libnccl\.so\.2.*install torch for CUDA"):
        Nccl()
