"""One reception a host, and what a server passes on to others."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http import offers
from slipstream.weight_sync.transports.http.chunks import ChunkList, digest_of
from slipstream.weight_sync.transports.http.offers import Offer
from slipstream.weight_sync.transports.http.pull import Pull
from slipstream.weight_sync.transports.http.staging import Record, SharedStaging, record_of
from slipstream.weight_sync.vllm.chunk_route import serve_chunks
from tests.kit.ports import free_port

KEY = "0123456789abcdef"
SECRET = "s3cret"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def flat() -> torch.Tensor:
    return torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def wanted(flat: torch.Tensor) -> Record:
    chunks = ChunkList.of(flat, 100_000)
    secret_hash = digest_of(memoryview(SECRET.encode()))
    return Record(0, 0, len(flat), chunks.root, chunks.chunk_bytes, chunks.digests, secret_hash)


class TestSharing:
    def test_a_lock_that_a_kill_left_goes_with_the_next_transfer_and_one_that_is_held_stays(
        self, tmp_path: Path
    ) -> None:
        SharedStaging(KEY).close()
        folder = tmp_path / f"slipstream-{os.getuid()}"
        left, held = "1" * 16, SharedStaging("2" * 16)
        (folder / f"{left}.lock").touch()
        with held._lock() as mine:
            assert mine
            SharedStaging(KEY)
            assert [path.name for path in folder.iterdir()] == [f"{'2' * 16}.lock"]
        SharedStaging(KEY)
        assert not [*folder.iterdir()]

    def test_workers_of_one_host_share_one_reception(self, flat: torch.Tensor) -> None:
        fills = []

        def fill(into: torch.Tensor, before: Record | None) -> None:
            fills.append(before)
            time.sleep(0.05)
            into.copy_(flat)

        workers = [SharedStaging(KEY) for _ in range(4)]
        results: list[torch.Tensor] = []
        threads = [
            threading.Thread(target=lambda w=worker: results.append(w.receive(wanted(flat), fill, 10)))  # type: ignore[misc]
            for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fills == [None]
        assert len(results) == 4
        assert all(torch.equal(result, flat) for result in results)
        results[0][0] ^= 1
        assert all(int(result[0]) == int(results[0][0]) for result in results), "they must map the same memory"

    def test_the_next_version_uses_the_same_memory_whoever_receives_it(self, flat: torch.Tensor) -> None:
        one, two = SharedStaging(KEY), SharedStaging(KEY)
        first = one.receive(wanted(flat), lambda into, before: into.copy_(flat), 10)  # type: ignore[arg-type,return-value]
        newer = flat.flip(0)
        seen = []

        def fill(into: torch.Tensor, before: Record | None) -> None:
            seen.append(before.holds if before else None)
            into.copy_(newer)

        second = two.receive(wanted(newer), fill, 10)
        assert seen == [wanted(flat).holds]
        assert torch.equal(first, newer)
        assert torch.equal(second, newer)

    def test_a_worker_killed_while_it_fills_leaves_the_turn_to_another(
        self, flat: torch.Tensor, tmp_path: Path
    ) -> None:
        started = multiprocessing.get_context("spawn").Event()
        child = multiprocessing.get_context("spawn").Process(target=_fill_forever, args=(started, str(tmp_path)))
        child.start()
        try:
            assert started.wait(60)
            staging = SharedStaging(KEY)
            with pytest.raises(TransferError, match=r"another worker of this host has been pulling for 0\.2 s"):
                staging.receive(wanted(flat), lambda into, before: None, 0.2)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            got = staging.receive(wanted(flat), lambda into, before: into.copy_(flat), 5)  # type: ignore[arg-type,return-value]
            assert torch.equal(got, flat)
        finally:
            child.kill()
            child.join()

    def test_a_fill_that_fails_leaves_nothing_that_counts_as_whole(self, flat: torch.Tensor) -> None:
        staging = SharedStaging(KEY)

        def fails(into: torch.Tensor, before: Record | None) -> None:
            raise TransferError("broke off")

        with pytest.raises(TransferError, match="broke off"):
            staging.receive(wanted(flat), fails, 5)
        record = record_of(KEY)
        assert record is not None
        assert record.holds == ""

    def test_closing_takes_the_record_along_and_a_dead_process_s_is_swept(
        self, flat: torch.Tensor, tmp_path: Path
    ) -> None:
        staging = SharedStaging(KEY)
        staging.receive(wanted(flat), lambda into, before: None, 5)
        assert record_of(KEY) is not None
        staging.close()
        folder = tmp_path / f"slipstream-{os.getuid()}"
        assert list(folder.iterdir()) == []
        (folder / f"{KEY}.json").write_text('{"pid": 4194999, "fd": 3, "total_bytes": 1}')
        SharedStaging("f" * 16)
        assert list(folder.iterdir()) == []

    def test_i8_a_folder_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / f"slipstream-{os.getuid()}"
        folder.mkdir(mode=0o755)
        with pytest.raises(PermissionError, match="only this user can read"):
            SharedStaging(KEY)

    @pytest.mark.parametrize("key", ["", "../../etc/passwd", "0123456789ABCDEF", "0" * 17])
    def test_i8_a_key_that_is_none_never_reaches_a_path(self, key: str) -> None:
        assert record_of(key) is None
        with pytest.raises(ValueError, match="must be 16 hex digits"):
            SharedStaging(key)


def _fill_forever(started: Any, folder: str) -> None:
    def fill(into: torch.Tensor, before: Record | None) -> None:
        started.set()
        time.sleep(120)

    tempfile.tempdir = folder
    SharedStaging(KEY).receive(wanted(torch.zeros(300_000, dtype=torch.uint8)), fill, 5)


@asynccontextmanager
async def api_process() -> AsyncIterator[str]:
    """The route as uvicorn serves it, as in vLLM's API process."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await serve_chunks(scope, send)

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110  uvicorn says it in no other way
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}/slipstream/chunks/{KEY}"
    finally:
        server.should_exit = True
        await task


class TestPeer:
    @pytest.fixture
    def staged(self, flat: torch.Tensor) -> Iterator[SharedStaging]:
        staging = SharedStaging(KEY)
        staging.receive(wanted(flat), lambda into, before: into.copy_(flat), 5)  # type: ignore[arg-type,return-value]
        yield staging
        staging.close()

    async def test_a_server_passes_on_what_it_staged(self, flat: torch.Tensor, staged: SharedStaging) -> None:
        into = bytearray(len(flat))
        async with api_process() as url:
            report = await on_thread(Pull(ChunkList.of(flat, 100_000), SECRET, [url], memoryview(into), 10).run)
        assert bytes(into) == flat.numpy().tobytes()
        assert report.by_source == {url: len(flat)}

    @pytest.mark.parametrize("what", ["secret", "version", "nothing"])
    async def test_i8_it_refuses_who_brings_no_secret_or_wants_another_version(
        self, flat: torch.Tensor, staged: SharedStaging, what: str
    ) -> None:
        chunks = ChunkList.of(flat if what != "version" else flat.flip(0), 100_000)
        secret = SECRET if what != "secret" else "guessed"
        if what == "nothing":
            staged.close()
        expected = {"secret": 401, "version": 412, "nothing": 404}[what]
        async with api_process() as url:
            pull = Pull(chunks, secret, [url], memoryview(bytearray(len(flat))), 10)
            with pytest.raises(TransferError, match=f"HTTP {expected}"):
                await on_thread(pull.run)


class TestOffers:
    @pytest.fixture
    def offer(self, monkeypatch: pytest.MonkeyPatch) -> Offer:
        monkeypatch.setattr(offers, "PATIENCE_S", 0.2)
        return Offer("k", "learner", ChunkList(1, 0, []))

    async def test_the_learner_serves_a_few_and_the_others_pull_from_those(self, offer: Offer) -> None:
        asked: list[str] = []

        async def server(name: int) -> None:
            async with offer.seat(f"peer-{name}") as urls:
                assert urls[-1] == "learner"
                asked.append(urls[0])
                await asyncio.sleep(0.01)

        await asyncio.gather(*(server(name) for name in range(16)))
        assert asked.count("learner") == offers.LEARNER_SEATS
        assert all(asked.count(url) <= 14 for url in asked)
        assert len(set(asked)) > 4

    async def test_nobody_waits_long_behind_a_server_that_hangs(self, offer: Offer) -> None:
        async with offer.seat("a"), offer.seat("b"):
            began = time.monotonic()
            async with offer.seat("c") as urls:
                assert 0.1 < time.monotonic() - began < 2
                assert len(urls) == 1

    async def test_a_host_from_whom_a_pull_failed_is_not_named_again(self, offer: Offer) -> None:
        async with offer.seat("a"):
            pass

        async def fail() -> None:
            async with offer.seat("b") as urls:
                assert urls[0] == "a"
                raise TransferError("it was not the learner's")

        with pytest.raises(TransferError):
            await fail()
        async with offer.seat("c") as urls:
            assert len(urls) == 1

    async def test_a_server_that_cannot_serve_is_never_named(self, offer: Offer) -> None:
        async with offer.seat(None):
            pass
        async with offer.seat("c") as urls:
            assert len(urls) == 1
