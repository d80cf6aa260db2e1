"""The http transport, both ends real: who pulls how much, what deltas save, and what is found when they do not fit."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import StagedTransport, TransferError
from slipstream.weight_sync.transports.http import chunks, offers
from slipstream.weight_sync.transports.http.blob_server import BlobServer
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.listener import Throttle
from slipstream.weight_sync.transports.http.sender import BLOB_SERVERS, HttpSender
from slipstream.weight_sync.transports.http.staging import record_of
from slipstream.weight_sync.vllm.chunk_route import serve_chunks
from slipstream.weight_sync.weights import delta_codec
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.sync import probe
from tests.weight_sync.receivers import HttpEnd

SIZE = 4096


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@dataclass
class Rig:
    """Servers with their real receiving ends, and the transport to each. `depot`: what serves them all."""

    section: WeightSyncSection
    depot: BlobServer
    receivers: list[HttpEnd] = field(default_factory=list)
    transports: list[StagedTransport] = field(default_factory=list)
    controls: list[ServerControl] = field(default_factory=list)

    def made(self) -> StagedTransport:
        return StagedTransport(self.section, [HttpSender(self.section)])

    def sender(self, server: int = 0) -> HttpSender:
        (sender,) = self.transports[server].senders
        assert isinstance(sender, HttpSender)
        return sender

    async def publish(self, sent: Snapshot, server: int = 0) -> None:
        await self.transports[server].publish(self.controls[server], sent, Pause(self.controls[server], False, True))
        loaded, weights = self.receivers[server].loaded[-1], sent.manifest.views(sent.flat)
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)

    async def connect_anew(self, server: int = 0) -> None:
        await self.transports[server].close()
        self.transports[server] = self.made()
        await self.transports[server].connect(self.controls[server], self.receivers[server].workers)


@asynccontextmanager
async def connected(servers: int = 1, workers: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    section = WeightSyncSection(**{"transport": "http", "bucket_bytes": 1024, "timeout_s": 20, **settings})
    rig = Rig(section, BLOB_SERVERS.take(section.host, section.http_port, section.http_mbytes_per_s))
    async with AsyncExitStack() as stack:
        stack.callback(BLOB_SERVERS.leave, rig.depot)
        for _ in range(servers):
            fake = FakeVllm()
            fake.app.router.add_get(chunks.CHUNKS_PREFIX + "{key}", passes_on)
            rig.receivers.append(HttpEnd(fake.engine, workers))
            rig.controls.append(await stack.enter_async_context(ServerControl(await _url(stack, fake), 20)))
            rig.transports.append(rig.made())
            stack.push_async_callback(_close, rig, len(rig.transports) - 1)
            await rig.transports[-1].connect(rig.controls[-1], workers)
        yield rig


async def _close(rig: Rig, server: int) -> None:
    await rig.transports[server].close()


async def _url(stack: AsyncExitStack, fake: FakeVllm) -> str:
    return await stack.enter_async_context(serving(fake))


async def passes_on(request: web.Request) -> web.StreamResponse:
    """The middleware's route, which speaks ASGI, in a server of aiohttp."""
    headers = [(name.lower(), value) for name, value in request.raw_headers]
    response = web.StreamResponse()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            response.set_status(message["status"])
            response.headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            await response.prepare(request)
        else:
            await response.write(message["body"])

    await serve_chunks({"method": request.method, "path": request.path, "headers": headers}, send)
    return response


def snapshot(version: int, changed: int = 20) -> Snapshot:
    """Each version changes `changed` values of the version before."""
    weights = torch.zeros(SIZE, dtype=torch.bfloat16)
    for step in range(1, version + 1):
        weights[step * 31 :][:changed] += step
    return Snapshot(version, [("a", weights), ("b", torch.arange(7))], probe())


TOTAL = snapshot(0).manifest.total_bytes()


async def test_workers_of_one_host_share_one_reception() -> None:
    async with connected(workers=3) as r:
        before = r.depot.served
        await r.publish(snapshot(1))
        assert len(r.receivers[0].loaded) == 3
        assert r.depot.served - before == TOTAL


async def test_many_servers_pull_from_each_other_and_the_learner_sends_to_a_few() -> None:
    async with connected(servers=7) as r:
        for version in (1, 2):
            before = r.depot.served
            await asyncio.gather(*(r.publish(snapshot_, server) for server, snapshot_ in _same(version, 7)))
            # A chunk that has not changed since is not pulled again.
            assert TOTAL < r.depot.served - before <= offers.LEARNER_SEATS * TOTAL


def _same(version: int, servers: int) -> list[tuple[int, Snapshot]]:
    """Every publication of a version has one snapshot."""
    one = snapshot(version, changed=SIZE)
    return [(server, one) for server in range(servers)]


async def test_chunks_that_did_not_change_are_not_pulled_again() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        before = r.depot.served
        await r.publish(snapshot(2, changed=1))
        assert 0 < r.depot.served - before <= 2 * 1024


async def test_what_is_served_is_no_more_once_it_has_arrived() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        url = r.receivers[0].updates[-1][0]["sources"][-1]
        assert url.startswith(r.depot.url)
        assert url.rpartition("/")[2] not in r.depot._blobs


async def test_a_version_that_is_given_up_while_it_is_hashed_is_not_served_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, release, of = threading.Event(), threading.Event(), ChunkList.of

    def slow(*arguments: Any) -> ChunkList:
        began.set()
        release.wait(10)
        return of(*arguments)

    async with connected() as r:
        monkeypatch.setattr(ChunkList, "of", slow)
        publishing = asyncio.create_task(r.publish(snapshot(1)))
        assert await asyncio.to_thread(began.wait, 5)
        publishing.cancel()
        await asyncio.sleep(0.1)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert r.depot.offers._open == {}


async def test_a_learner_that_cannot_be_reached_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as r:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        monkeypatch.setattr(BlobServer, "url", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("slipstream.weight_sync.transports.http.pull.MAX_REFUSED_S", 0.1)
        with pytest.raises(TransferError, match=rf"127\.0\.0\.1:{port}.*refused.*Set weight_sync.host"):
            await r.publish(snapshot(1))


class TestBrokeOff:
    """A pull that does not end within `weight_sync.timeout_s` continues over the next connection."""

    SLICES = 3

    def large(self, version: int) -> Snapshot:
        generator = torch.Generator().manual_seed(version)
        weights = torch.randint(0, 256, (self.SLICES * chunks.SLICE_BYTES,), dtype=torch.uint8, generator=generator)
        return Snapshot(version, [("a", weights)], probe())

    @pytest.fixture
    def line(self, monkeypatch: pytest.MonkeyPatch) -> Line:
        line = Line()
        monkeypatch.setattr(Throttle, "pass_on", line.pass_on)
        monkeypatch.setattr("slipstream.weight_sync.transports.http.sender.PULL_SHARE", 0.2)
        return line

    @pytest.mark.parametrize("workers", [1, 2])
    async def test_a_slow_line_brings_a_version_in_several_tries(self, line: Line, workers: int) -> None:
        says = r"MB came.*another try of this version continues from there" if workers == 1 else None
        async with connected(workers=workers, bucket_bytes=1 << 20, timeout_s=4) as r:
            sent, before = self.large(1), r.depot.served
            for tries in range(1, self.SLICES):
                line.left = chunks.SLICE_BYTES
                with pytest.raises(TransferError, match=says):
                    await r.publish(sent)
                await r.connect_anew()
                assert r.depot.served - before == tries * chunks.SLICE_BYTES
            line.left = chunks.SLICE_BYTES
            await r.publish(sent)
            assert r.depot.served - before == sent.manifest.total_bytes()

    async def test_the_next_version_begins_anew_and_what_was_damaged_meanwhile_comes_again(self, line: Line) -> None:
        async with connected(bucket_bytes=1 << 20, timeout_s=4) as r:
            for damage in (False, True):
                line.left = chunks.SLICE_BYTES
                sent = self.large(1)
                with pytest.raises(TransferError):
                    await r.publish(sent)
                held = r.receivers[0].only[0]._staging._flat
                assert held is not None
                if damage:
                    held[7] ^= 1
                await r.connect_anew()
                line.left = 1 << 30
                await r.publish(sent if damage else self.large(2))

    async def test_another_learner_finds_nothing_left(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        async with connected(bucket_bytes=1 << 20, timeout_s=4) as r:
            line.left = chunks.SLICE_BYTES
            with pytest.raises(TransferError):
                await r.publish(self.large(1))
            key = r.sender().key
            monkeypatch.setattr("slipstream.weight_sync.transports.http.sender._PROCESS", "another")
            await r.connect_anew()
            line.left = 1 << 30
            await r.publish(self.large(1))
            assert record_of(key) is None
            assert record_of(r.sender().key) is not None


class Line:
    """A blob server's line, which passes on `left` bytes and then breaks off."""

    def __init__(self) -> None:
        self.left = 1 << 30

    async def pass_on(self, count: int) -> None:
        if self.left < count:
            raise ConnectionResetError
        self.left -= count


async def test_a_server_that_is_let_go_leaves_no_record_behind() -> None:
    async with connected() as r:
        await r.publish(snapshot(1))
        key = r.sender().key
        assert record_of(key) is not None
        for reception in r.receivers[0].only:
            reception.close()
        assert record_of(key) is None


class TestDelta:
    async def test_it_is_sent_after_the_first_publication_and_gives_every_bit(self) -> None:
        async with connected(delta=True, workers=2) as r:
            await r.publish(snapshot(0))
            for version in range(1, 5):
                before = r.depot.served
                await r.publish(snapshot(version))
                sent = r.transports[0].sent
                assert sent is not None
                assert r.depot.served - before == sent.sent_bytes < 0.05 * sent.whole_bytes
                assert sent.share_changed == pytest.approx(20 / (SIZE + 7))

    async def test_everything_is_sent_at_every_so_many_publications(self) -> None:
        async with connected(delta=True, full_every=3) as r:
            for version in range(7):
                await r.publish(snapshot(version))
            deltas = [update["delta"] is not None for (update,) in r.receivers[0].updates]
            assert deltas == [False, True, True, False, True, True, False]

    async def test_everything_is_sent_where_that_is_less(self) -> None:
        async with connected(delta=True) as r:
            generator = torch.Generator().manual_seed(0)
            for version in (1, 2):
                weights = torch.randn(SIZE, generator=generator)
                await r.publish(Snapshot(version, [("a", weights)], probe()))
            assert r.receivers[0].updates[-1][0]["delta"] is None

    async def test_everything_is_sent_over_a_new_connection(self) -> None:
        async with connected(delta=True) as r:
            await r.publish(snapshot(1))
            await r.connect_anew()
            await r.publish(snapshot(2))
            assert r.receivers[0].updates[-1][0]["delta"] is None

    async def test_a_server_that_missed_versions_gets_the_steps_in_between(self) -> None:
        async with connected(servers=2, delta=True) as r:
            await asyncio.gather(*(r.publish(one, server) for server, one in _both(1)))
            for version in (2, 3):
                await r.publish(snapshot(version), 0)
            await r.publish(snapshot(4), 1)
            delta = r.receivers[1].updates[-1][0]["delta"]
            assert delta is not None
            assert len(delta["sizes"]) == 3

    async def test_a_wrong_base_is_found_and_everything_pulled(self, caplog: pytest.LogCaptureFixture) -> None:
        async with connected(delta=True) as r:
            await r.publish(snapshot(1))
            r.sender()._base._base = ("1", "of something else")
            await r.publish(snapshot(2))
            assert r.receivers[0].updates[-1][0]["delta"] is not None
        assert "a delta was sent to weights that are not here" in caplog.text

    async def test_a_base_that_was_damaged_is_found_and_its_chunk_pulled(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with connected(delta=True) as r:
            await r.publish(snapshot(1))
            held = r.receivers[0].only[0]._staging._flat
            assert held is not None
            held[5000] ^= 1
            await r.publish(snapshot(2))
        assert "1024 bytes were not right after the delta, and were pulled" in caplog.text

    async def test_a_payload_cut_short_is_found_and_everything_that_differs_pulled(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def cut(*arguments: Any) -> delta_codec.Delta:
            delta = delta_codec.encode_delta(*arguments)
            return delta_codec.Delta(delta.payload[:-8].clone(), delta.changed, delta.elements)

        async with connected(delta=True) as r:
            await r.publish(snapshot(1))
            monkeypatch.setattr("slipstream.weight_sync.weights.delta_base.encode_delta", cut)
            monkeypatch.setattr("slipstream.weight_sync.weights.delta_base.apply", lambda *arguments: None)
            await r.publish(snapshot(2))
        assert "the delta could not be used" in caplog.text


def _both(version: int) -> list[tuple[int, Snapshot]]:
    one = snapshot(version)
    return [(0, one), (1, one)]
