"""Several ranks of a learner that each send a share: over every transport that stages, with a fake vLLM behind it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from slipstream.protocol.config import RunConfig, WeightSyncSection
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.ranks.channel import Call, StoreChannel
from slipstream.weight_sync.ranks.follower import ShareFollower
from slipstream.weight_sync.ranks.leader import FollowingRanks
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import StagedTransport, TransferError, build_transport
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.nccl_receiver import Manifest
from slipstream.weight_sync.transports.receiver import Share
from slipstream.weight_sync.vllm.engine.staged_engine import Staging
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.kit import config as run_config
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.ports import free_port
from tests.kit.sync import probe
from tests.weight_sync.receivers import GlooEnd, HttpEnd, NcclStagedEnd, StagedEnd

dist: Any = torch.distributed

RANKS = 3
ENDS: dict[str, type[StagedEnd]] = {"gloo": GlooEnd, "http": HttpEnd, "nccl_staged": NcclStagedEnd}


class Line:
    """A channel within this process. `cut` ends it, as a rank that dies does."""

    def __init__(self, sent: queue.Queue[bytes | None], received: queue.Queue[bytes | None]) -> None:
        self._sent, self._received = sent, received

    def send(self, message: bytes) -> None:
        self._sent.put(message)

    def receive(self) -> bytes:
        message = self._received.get()
        if message is None:
            raise RuntimeError("the connection was reset")
        return message

    def cut(self) -> None:
        self._received.put(None)

    close = cut


def line() -> tuple[Line, Line]:
    ways: tuple[queue.Queue[bytes | None], ...] = (queue.Queue(), queue.Queue())
    return Line(*ways), Line(*reversed(ways))


@dataclass
class Rig:
    end: StagedEnd
    control: ServerControl
    transport: StagedTransport
    followers: list[ShareFollower]
    leads: list[Line]
    ranks: FollowingRanks
    snapshots: Snapshots = field(default_factory=Snapshots)

    def fill(self, version: int, value: float | None = None) -> Snapshot:
        """Each rank takes a snapshot of its share, as one step of the learner's ranks."""
        weights = whole(version if value is None else value)
        told = {"version": version, "kept": self.snapshots.make_room(), "run": "run"}
        for rank, follower in enumerate(self.followers, start=1):
            follower.fill(told, share(weights, rank).items())
        return self.snapshots.fill(version, share(weights, 0).items(), probe(), None, "run")

    async def publish(self, sent: Snapshot) -> None:
        await self.transport.publish(self.control, sent, Pause(self.control, False, True))


def whole(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((300,), value + i) for i in range(10)}


def share(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in list(weights)[rank::RANKS]}


@pytest.fixture(params=ENDS)
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with connected(request.param, monkeypatch) as made:
        yield made


@asynccontextmanager
async def connected(name: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Rig]:
    fake = FakeVllm()
    end = ENDS[name](fake.engine, 2)
    monkeypatch.setattr(communicator, "own_gpu", end.gpu)
    section = WeightSyncSection(transport=name, bucket_bytes=1024, timeout_s=10, **settings)  # type: ignore[arg-type]
    config: RunConfig = run_config().model_copy(update={"weight_sync": section})
    lines = [line() for _ in range(1, RANKS)]
    followers = [ShareFollower(config, theirs, rank) for rank, (_, theirs) in enumerate(lines, start=1)]
    leads = [lead for lead, _ in lines]
    ranks = FollowingRanks(leads)
    transport = build_transport(section, ranks.senders)
    assert isinstance(transport, StagedTransport)
    try:
        for follower in followers:
            follower.__enter__()
        async with serving(fake) as url, ServerControl(url, 10) as control:
            await transport.connect(control, 2)
            yield Rig(end, control, transport, followers, leads, ranks)
            await transport.close()
            end.close()
    finally:
        for follower in followers:
            follower.__exit__()
        for lead, theirs in lines:
            lead.cut()
            theirs.cut()


async def test_a_rank_that_sends_another_version_s_share_is_refused(rig: Rig) -> None:
    first = rig.fill(1)
    kept = rig.followers[1]._snapshots
    old = kept[1]
    await rig.publish(first)
    second = rig.fill(2)
    kept[2] = old
    with pytest.raises(ControlError, match=r"not of one version: .*1, .*2"):
        await rig.publish(second)
    assert len(rig.end.loaded) == 2, "of the first version, at two workers"


async def test_every_worker_gets_every_rank_s_share_of_each_version(rig: Rig) -> None:
    for version in range(1, 5):
        await rig.publish(rig.fill(version))
        for loaded in rig.end.loaded[-2:]:
            assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
                name: tensor.tolist() for name, tensor in whole(version).items()
            }
    assert len(rig.end.loaded) == 2 * 4
    assert rig.transport.sent is not None
    assert rig.transport.sent.whole_bytes == sum(
        Manifest.of(share(whole(0), rank)).total_bytes() for rank in range(RANKS)
    )


async def test_a_rank_keeps_the_versions_that_may_still_be_sent_and_their_memory_is_used_again(rig: Rig) -> None:
    (follower, *_) = rig.followers
    sent = rig.fill(1)
    assert rig.snapshots.take("slow") is sent
    for version in (2, 3, 4, 5):
        rig.fill(version)
        assert len(follower._snapshots) <= 3
        assert 1 in follower._snapshots
    await rig.publish(sent)
    assert rig.end.loaded[-1]["w1"].tolist() == whole(1)["w1"].tolist()
    rig.snapshots.give_back("slow", sent, whole=True)
    rig.fill(6)
    assert 1 not in follower._snapshots
    with pytest.raises(TransferError, match=r"rank [12] of the learner: version 1 was dropped before it was sent"):
        await rig.publish(sent)


async def test_all_shares_together_travel_in_buckets_of_the_setting(rig: Rig) -> None:
    senders: list[Any] = [rig.transport.senders[0]]
    for follower in rig.followers:
        senders += follower._senders.values()
    assert [sender._section.bucket_bytes for sender in senders] == [1024 // RANKS] * RANKS


async def test_rank_0_waits_for_a_rank_that_is_slower_to_copy_its_share(rig: Rig) -> None:
    weights = whole(1)
    told = {"version": 1, "kept": rig.snapshots.make_room(), "run": "run"}
    sent = rig.snapshots.fill(1, share(weights, 0).items(), probe(), None, "run")
    first, second = rig.followers
    first.fill(told, share(weights, 1).items())
    publishing = asyncio.create_task(rig.publish(sent))
    await asyncio.sleep(0.5)
    assert not publishing.done()
    second.fill(told, share(weights, 2).items())
    async with asyncio.timeout(8):
        await publishing
    assert rig.end.loaded[-1]["w2"].tolist() == weights["w2"].tolist()


async def test_an_error_of_one_rank_names_it_and_a_new_connection_works(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = rig.fill(1)
    snapshots, rig.followers[1]._snapshots = rig.followers[1]._snapshots, {}
    with pytest.raises(TransferError, match="rank 2 of the learner: version 1 was dropped"):
        await rig.publish(sent)
    rig.followers[1]._snapshots = snapshots
    await rig.transport.close()
    await rig.transport.connect(rig.control, 2)
    await rig.publish(rig.fill(2))
    assert rig.end.loaded[-1]["w2"].tolist() == whole(2)["w2"].tolist()


async def test_a_cancelled_publication_ends_at_every_rank(rig: Rig) -> None:
    rig.end.hang()
    publishing = asyncio.create_task(rig.publish(rig.fill(1)))
    await asyncio.sleep(0.3)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await rig.transport.close()
    for follower in rig.followers:
        for _ in range(100):
            if not follower._tasks:
                break
            await asyncio.sleep(0.05)
        assert follower._tasks == {}
        assert follower._senders == {}


async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing(rig: Rig) -> None:
    (follower, *_) = rig.followers

    async def begin_and_cancel() -> None:
        for name in ("offer", "cancel"):
            follower._begin(Call(1000, name, 1, {"snapshot": 99}))
        await asyncio.sleep(0.1)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begin_and_cancel(), follower._loop))
    assert follower._tasks == {}


async def test_a_rank_that_is_gone_is_an_error_at_once(rig: Rig) -> None:
    sent = rig.fill(1)
    rig.leads[0].cut()

    async def publish_again_and_again() -> None:
        while True:
            await rig.publish(sent)

    async with asyncio.timeout(8):
        with pytest.raises(TransferError, match="rank 1 of the learner cannot be reached"):
            await publish_again_and_again()


async def test_nothing_waits_for_a_rank_that_is_known_to_be_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = rig.fill(1)
    # Its process has died, which rank 0's end of the channel does not notice.
    monkeypatch.setattr(rig.followers[0], "_begin", lambda call: None)
    publishing = asyncio.create_task(rig.publish(sent))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(8):
        rig.ranks.give_up("rank 1 of the learner was ended")
        with pytest.raises(TransferError, match="rank 1 of the learner was ended"):
            await publishing
        await rig.transport.close()


def test_closed_channels_end_the_threads_that_wait_for_messages() -> None:
    # A thread that waits in torch's store while the process ends would abort it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lead, theirs = (StoreChannel(store.clone(), store.clone(), 1, leads) for leads in (True, False))
    ranks = FollowingRanks([lead])
    follower = ShareFollower(run_config(), theirs, 1)

    def waiting() -> set[str]:
        return {thread.name for thread in threading.enumerate()} & {"share-1", "share-calls"}

    with follower:
        assert waiting() == {"share-1", "share-calls"}
    ranks.close()
    assert waiting() == set()


def test_a_server_can_end_while_the_shares_of_ranks_that_hang_do_not_come() -> None:
    came, both = threading.Event(), threading.Barrier(3)

    def never() -> Share:
        receiving.append(threading.current_thread())
        both.wait(10)
        came.wait(20)
        raise AssertionError

    receiving: list[threading.Thread] = []
    staging = Staging([never, never], len)
    staging.start()
    both.wait(10)
    assert [thread.daemon for thread in [staging, *receiving]] == [True] * 3
    came.set()
    staging.join(10)


async def test_shares_that_overlap_are_refused_by_the_tensor_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.weight_sync.vllm.engine.arrivals import Arrivals

    async with connected("gloo", monkeypatch) as rig:
        sent = Snapshot(1, whole(1).items(), probe())
        rig.followers[0].fill({"version": 1, "kept": [], "run": ""}, share(whole(1), 0).items())
        rig.followers[1].fill({"version": 1, "kept": [], "run": ""}, share(whole(1), 1).items())
        monkeypatch.setattr("tests.weight_sync.receivers._copied", lambda shares: Arrivals(shares).whole())
        with pytest.raises(TransferError, match="4 tensors were sent twice, among them w0"):
            await rig.publish(sent)


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        found = [*found, port] if found and port == found[-1] + 1 else [port]
    return found[0]


async def test_deltas_of_shares_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # In one process, ranks would share the server of one port, and its history.
    async with connected("http", monkeypatch, delta=True, http_port=free_ports(RANKS)) as rig:
        await rig.publish(rig.fill(1))
        weights = whole(1)
        weights["w1"][7] += 1
        told = {"version": 2, "kept": [1], "run": "run"}
        for rank, follower in enumerate(rig.followers, start=1):
            follower.fill(told, share(weights, rank).items())
        nothing = Probe([], np.zeros(0, dtype=np.float32))
        await rig.publish(rig.snapshots.fill(2, share(weights, 0).items(), nothing, None, "run"))
        assert rig.end.loaded[-1]["w1"].tolist() == weights["w1"].tolist()
        sent = rig.transport.sent
        assert sent is not None
        assert sent.sent_bytes < 0.2 * sent.whole_bytes
        assert sent.share_changed == pytest.approx(1 / 3000, rel=0.1)
