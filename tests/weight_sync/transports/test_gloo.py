"""The gloo transport over loopback, both ends real: how many workers, and who is told what when one end is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import StagedTransport, TransferError
from slipstream.weight_sync.transports.gloo.sender import GlooSender
from slipstream.weight_sync.weights.host_memory import Staging
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.sync import probe
from tests.weight_sync.receivers import GlooEnd


@dataclass
class Rig:
    fake: FakeVllm
    control: ServerControl
    receiver: GlooEnd
    transport: StagedTransport

    async def publish(self, sent: Snapshot) -> None:
        await self.transport.publish(self.control, sent, Pause(self.control, False, True))


@asynccontextmanager
async def connected(workers: int = 1, timeout_s: float = 20) -> AsyncIterator[Rig]:
    fake = FakeVllm()
    receiver = GlooEnd(fake.engine, workers)
    section = WeightSyncSection(bucket_bytes=1024, timeout_s=timeout_s)
    transport = StagedTransport(section, [GlooSender(section)])
    async with serving(fake) as url, ServerControl(url, 20) as control:
        await transport.connect(control, workers)
        yield Rig(fake, control, receiver, transport)
        await transport.close()


def snapshot(version: int = 1) -> Snapshot:
    return Snapshot(version, [("a", torch.randn(1500)), ("b", torch.arange(7))], probe())


async def test_two_workers_receive_the_same_bytes_twice() -> None:
    async with connected(workers=2) as r:
        for version in (1, 2):
            sent = snapshot(version)
            await r.publish(sent)
            weights = sent.manifest.views(sent.flat)
            for loaded in r.receiver.loaded[-2:]:
                assert torch.equal(loaded["a"], weights["a"])
                assert torch.equal(loaded["b"], weights["b"])
        assert len(r.receiver.loaded) == 4


async def test_workers_of_one_host_share_one_reception() -> None:
    async with connected(workers=3) as r:
        sent = snapshot()
        await r.publish(sent)
        assert r.receiver.only[0]._group.receivers == [1]
        assert [one._group.leader for one in r.receiver.only] == [1, 1, 1]
        flat = r.receiver.only[0]._staging.take(sent.manifest.total_bytes())
        for reception in r.receiver.only[1:]:
            assert reception._theirs is not None
            assert torch.equal(reception._theirs[1], flat)
        # The memory is the same: who receives again writes into what the others have mapped.
        flat[0] ^= 1
        assert all(torch.equal(reception._theirs[1], flat) for reception in r.receiver.only[1:])  # type: ignore[index]


async def test_workers_that_cannot_map_each_other_receive_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weight_sync.transports.gloo.group._readable", lambda offer: False)
    async with connected(workers=2) as r:
        sent = snapshot()
        await r.publish(sent)
        assert r.receiver.only[0]._group.receivers == [1, 2]
        weights = sent.manifest.views(sent.flat)
        assert all(torch.equal(loaded["a"], weights["a"]) for loaded in r.receiver.loaded)
        assert len(r.receiver.loaded) == 2


async def test_a_worker_whose_leaders_memory_is_gone_says_so_to_the_learner() -> None:
    async with connected(workers=2) as r:
        r.receiver.only[0]._staging = Misplaced(shared=True)
        with pytest.raises(
            TransferError, match=r"workers \[1\] cannot map the memory|of the worker that received cannot be mapped"
        ):
            await r.publish(snapshot())


class Misplaced(Staging):
    """Names a place that holds no buffer."""

    @property
    def place(self) -> tuple[int, int]:
        return super().place[0], 10_000_000


async def test_a_digest_that_differs_is_an_error_before_any_pause() -> None:
    async with connected(workers=2) as r:
        damaged = snapshot()
        damaged.__dict__["digest"] = bytes(16)
        with pytest.raises(TransferError, match="another digest"):
            await r.publish(damaged)
        assert "/pause" not in r.fake.calls


async def test_workers_that_never_join_are_named_with_where_they_were_to_come() -> None:
    fake = FakeVllm()
    section = WeightSyncSection(timeout_s=1)
    transport = StagedTransport(section, [GlooSender(section)])
    async with serving(fake) as url, ServerControl(url, 20) as control:
        with pytest.raises(TransferError, match=r"workers did not come to 127\.0\.0\.1:\d+"):
            await transport.connect(control, 1)


async def test_a_worker_that_is_gone_breaks_the_transfer_off() -> None:
    async with connected(timeout_s=5) as r:
        r.receiver.hang()
        r.receiver.receivers.clear()
        with pytest.raises(TransferError, match="the transfer broke off"):
            await r.publish(snapshot())
        assert "/pause" not in r.fake.calls


async def test_a_learner_that_dies_in_mid_transfer_is_an_error_at_the_worker() -> None:
    async with connected(timeout_s=5) as r:
        await r.control.start_update()
        await r.control.update({"shares": [snapshot().manifest.as_dict() | {"label": "run:1"}]})
        await r.transport.close()
        (staging,) = r.receiver.stagings
        staging.join(15)
        assert staging.report()["stage"] == "failed"
        assert staging.report()["error"]
        assert staging.shadow is None
