"""Deltas over gloo, both ends real: bit for bit what the whole would be, and everything where they do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.report.records import published
from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.fleet.publications import Publications, ServerMetrics
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import Sent, StagedTransport, TransferError
from slipstream.weight_sync.transports.gloo.sender import GlooSender
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.sync import probe
from tests.weight_sync.receivers import GlooEnd
from tests.weight_sync.weights.test_delta import changed, flat_of

DTYPES = ["float32", "bfloat16", "float16", "int64"]
SIZE = 4000


@dataclass
class Rig:
    control: ServerControl
    receiver: GlooEnd
    transport: StagedTransport

    async def publish(self, sent: Snapshot) -> Sent:
        """Whether each worker loads every bit of it is looked at here."""
        await self.transport.publish(self.control, sent, Pause(self.control, False, True))
        for loaded in self.receiver.loaded[-len(self.receiver.only) :]:
            for name, view in sent.manifest.views(sent.flat).items():
                assert torch.equal(loaded[name].view(torch.uint8), view.view(torch.uint8)), name
        assert self.transport.sent is not None
        return self.transport.sent

    @property
    def deltas(self) -> list[bool]:
        return [update["delta"] is not None for (update,) in self.receiver.updates]


@asynccontextmanager
async def connected(workers: int = 1, full_every: int = 20) -> AsyncIterator[Rig]:
    fake = FakeVllm()
    receiver = GlooEnd(fake.engine, workers)
    section = WeightSyncSection(bucket_bytes=1024, timeout_s=20, delta=True, full_every=full_every)
    transport = StagedTransport(section, [GlooSender(section)])
    async with serving(fake) as url, ServerControl(url, 20) as control:
        await transport.connect(control, workers)
        try:
            yield Rig(control, receiver, transport)
        finally:
            await transport.close()


def snapshot(version: int) -> Snapshot:
    weights = torch.arange(SIZE, dtype=torch.float32)
    weights[: 20 * version] += version
    return Snapshot(version, [("a", weights)], probe())


@settings(max_examples=15, deadline=None)
@given(
    layout=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 900)), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    near=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_delta_over_gloo_gives_every_bit_of_the_whole(
    layout: list[tuple[str, int]], share: float, near: bool, seed: int
) -> None:
    names = [str(i) for i in range(len(layout))]
    manifest = Manifest(names, [dtype for dtype, _ in layout], [[size] for _, size in layout])
    flats = [flat_of(manifest, seed)]
    for step in (1, 2):
        flats.append(changed(manifest, flats[-1], share, near, seed + step))

    async def publish_all() -> None:
        async with connected() as r:
            for version, flat in enumerate(flats):
                await r.publish(Snapshot(version, manifest.views(flat).items(), probe()))

    asyncio.run(publish_all())


async def test_what_changed_alone_is_sent_after_the_first_publication() -> None:
    async with connected(workers=2) as r:
        first = await r.publish(snapshot(0))
        assert first == Sent(first.whole_bytes, first.whole_bytes)
        for version in (1, 2, 3):
            sent = await r.publish(snapshot(version))
            assert sent.sent_bytes < 0.1 * sent.whole_bytes
            assert sent.share_changed == pytest.approx(20 * version / SIZE)


async def test_workers_that_receive_each_for_itself_get_the_delta_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weight_sync.transports.gloo.group._readable", lambda offer: False)
    async with connected(workers=2) as r:
        for version in range(3):
            await r.publish(snapshot(version))
        assert r.deltas == [False, True, True]


async def test_everything_is_sent_at_every_so_many_publications() -> None:
    async with connected(full_every=3) as r:
        for version in range(7):
            await r.publish(snapshot(version))
        assert r.deltas == [False, True, True, False, True, True, False]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_wrong_base_is_found_and_everything_sent_in_the_same_publication(
    workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.weight_sync.transports.gloo.group._readable", lambda offer: False)
    async with connected(workers) as r:
        await r.publish(snapshot(1))
        r.receiver.only[-1]._digest = bytes(16)  # the others hold the right one
        sent = await r.publish(snapshot(2))
        assert r.deltas == [False, True]
        assert sent.sent_bytes > sent.whole_bytes
        assert sent.share_changed is None
        assert (await r.publish(snapshot(3))).share_changed is not None
    assert "it is for other weights than those that are here" in caplog.text
    assert "version 2: the delta did not fit, everything is sent" in caplog.text


async def test_a_base_that_was_damaged_is_found_and_everything_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as r:
        first = await r.publish(snapshot(1))
        r.receiver.only[0]._staging.take(first.whole_bytes)[5000] ^= 1
        assert (await r.publish(snapshot(2))).sent_bytes > first.whole_bytes
    assert "the delta did not fit" in caplog.text


async def test_weights_damaged_at_the_learner_are_refused_though_everything_is_sent_again() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        damaged = snapshot(2)
        damaged.__dict__["digest"] = bytes(16)
        with pytest.raises(TransferError, match="another digest"):
            await r.publish(damaged)
        assert len(r.receiver.loaded) == 1


async def test_everything_is_sent_over_a_new_connection() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        await r.transport.close()
        await r.transport.connect(r.control, 1)
        await r.publish(snapshot(2))
        assert r.deltas == [False, False]


async def test_a_delta_that_says_it_is_larger_than_everything_is_refused() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        huge = snapshot(2).manifest.as_dict() | {"label": "run:2", "delta": {"base": "00", "sizes": [2**40]}}
        await r.control.start_update()
        await r.control.update({"shares": [huge]})
        (staging,) = r.receiver.stagings
        staging.join(10)
        assert "a delta of [1099511627776] bytes" in str(staging.report()["error"])


def test_a_publication_s_record_adds_up_what_was_sent_to_each_server() -> None:
    publications = Publications(1)
    publications.handed(3, 0.0)
    figures = [ServerMetrics(0.1, 0.0, 0.2, 0.0, sent, 1000, share) for sent, share in ((1000, None), (20, 0.01))]
    served: dict[str, int | None] = {}
    for name, of in (("a", figures[0]), ("b", figures[1]), ("b", figures[1])):  # one that is proven twice counts once
        publications.proven(name, 3, of, served)
    (record,) = publications.records
    assert (record.sent_bytes, record.whole_bytes, record.share_changed) == (1020, 2000, 0.01)
    line = published(record)
    assert line["weight_sync/sent_bytes"] == 1020
    assert line["weight_sync/share_changed"] == 0.01
    assert line["weight_sync/servers"] == 2
