"""The gloo transport over loopback, both ends real, without vLLM: the worker's thread is played by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch

from weight_sync.probe import Probe
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.group import BAD_DIGEST, OK, GlooGroup, dist, local_host_towards
from weight_sync.transports.gloo.sender import GlooLink

PROBE = Probe([1, 2], np.array([-1.0], dtype=np.float32))


def snapshot(version: int = 1) -> Snapshot:
    return Snapshot(version, [("a", torch.randn(300)), ("b", torch.arange(7))], PROBE)


def on_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join_as_worker(link: GlooLink, rank: int, timeout_s: float) -> GlooGroup:
    """What vLLM's worker does in `/init_weight_transfer_engine`."""
    info = link.init_info()
    store = dist.TCPStore(
        info["master_address"],
        info["master_port"],
        info["world_size"],
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return GlooGroup(store, rank, info["world_size"], local_host_towards(info["master_address"]), timeout_s)


def receive(group: GlooGroup, shape: Snapshot, received: dict[int, torch.Tensor], status: int = OK) -> None:
    flat = torch.empty(shape.manifest.total_bytes(), dtype=torch.uint8)
    group.broadcast_in_buckets(flat, 256)
    digest = torch.empty(32, dtype=torch.uint8)
    group.broadcast(digest)
    received[group.rank] = flat
    group.send_status(status)


def test_two_workers_receive_the_same_bytes_twice() -> None:
    link = GlooLink("127.0.0.1", workers=2, bucket_bytes=256, timeout_s=20)
    received: dict[int, torch.Tensor] = {}
    first, second = snapshot(1), snapshot(2)

    def worker(rank: int) -> None:
        group = join_as_worker(link, rank, 20)
        receive(group, first, received)
        receive(group, second, received)

    threads = [on_thread(lambda rank=rank: worker(rank)) for rank in (1, 2)]
    link.connect()
    link.send(first)
    link.send(second)
    for thread in threads:
        thread.join(20)
    assert torch.equal(received[1], second.flat)
    assert torch.equal(received[2], second.flat)
    link.close()


def test_a_digest_that_differs_is_an_error_before_any_pause() -> None:
    link = GlooLink("127.0.0.1", workers=1, bucket_bytes=256, timeout_s=20)
    sent = snapshot()
    thread = on_thread(lambda: receive(join_as_worker(link, 1, 20), sent, {}, BAD_DIGEST))
    link.connect()
    with pytest.raises(TransferError, match=r"workers \[0\] received has another digest"):
        link.send(sent)
    thread.join(20)


def test_f4_a_worker_that_never_joins_is_an_error_within_the_timeout() -> None:
    link = GlooLink("127.0.0.1", workers=1, bucket_bytes=256, timeout_s=1)
    began = time.monotonic()
    with pytest.raises(TransferError, match="did not come"):
        link.connect()
    assert time.monotonic() - began < 10


def test_f4_a_worker_that_stops_receiving_is_an_error_within_the_timeout() -> None:
    link = GlooLink("127.0.0.1", workers=1, bucket_bytes=256, timeout_s=1)
    groups: list[GlooGroup] = []
    thread = on_thread(lambda: groups.append(join_as_worker(link, 1, 5)))
    link.connect()
    thread.join(10)
    with pytest.raises(TransferError, match="broke off"):
        link.send(snapshot())


def test_a_learner_that_dies_in_mid_transfer_is_an_error_at_the_worker() -> None:
    link = GlooLink("127.0.0.1", workers=1, bucket_bytes=256, timeout_s=1)
    failures: list[str] = []

    def worker() -> None:
        group = join_as_worker(link, 1, 1)
        try:
            receive(group, snapshot(), {})
        except RuntimeError as error:
            failures.append(str(error))

    thread = on_thread(worker)
    link.connect()
    thread.join(15)
    assert failures
    link.close()
    with pytest.raises(TransferError, match="not connected"):
        link.send(snapshot())
