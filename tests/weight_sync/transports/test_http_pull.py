"""Chunks over HTTP, both ends real: what breaks off continues, damage is found, nobody reads without the secret."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http import blob_server as depot_module
from slipstream.weight_sync.transports.http import pull_sources as sources_module
from slipstream.weight_sync.transports.http.blob_server import BlobServer, SharedBlobServers
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.listener import Throttle
from slipstream.weight_sync.transports.http.pull import Pull

CHUNK = 1 << 20
SIZE = 5 * CHUNK + 12345


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(sources_module, "SILENCE_S", 1.0)


def pull_of(flat: torch.Tensor, depot: BlobServer, sources: list[str], timeout_s: float = 20, lanes: int = 2) -> Pull:
    return Pull(ChunkList.of(flat, CHUNK), depot.secret, sources, buffer(), timeout_s, lanes=lanes)


def buffer() -> memoryview:
    return memoryview(bytearray(SIZE))


def same(into: memoryview, flat: torch.Tensor) -> bool:
    return bytes(into) == flat.numpy().tobytes()


@contextmanager
def relay(target: str, passes: Callable[[int, bytes], bytes | None]) -> Iterator[str]:
    """A proxy before `target` (a URL): each piece of each answer goes through `passes(connection, piece)`; None breaks
    the connection off. Yields the URL to ask."""
    parts = urlsplit(target)
    assert parts.hostname is not None
    assert parts.port is not None
    upstream = (parts.hostname, parts.port)
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(client: socket.socket, number: int) -> None:
        with client, socket.create_connection(upstream) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            while data := server.recv(65536):
                changed = passes(number, data)
                if changed is None:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(changed)

    def accept() -> None:
        number = 0
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_quietly, args=(forward, client, number), daemon=True).start()
            number += 1

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{parts.path}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)


def _quietly(work: Callable[[socket.socket, int], None], client: socket.socket, number: int) -> None:
    with suppress(OSError):
        work(client, number)


def test_everything_arrives_over_several_connections_and_is_asked_for_once(
    depot: BlobServer, flat: torch.Tensor
) -> None:
    into = buffer()
    report = Pull(ChunkList.of(flat, CHUNK), depot.secret, [depot.url_of(depot.put(flat))], into, 20).run()
    assert same(into, flat)
    assert report.bytes_pulled == SIZE == depot.served
    assert report.resumed == 0


def test_nothing_at_all_is_a_pull_too(depot: BlobServer) -> None:
    empty = torch.zeros(0, dtype=torch.uint8)
    pull = Pull(ChunkList.of(empty), depot.secret, [depot.url_of(depot.put(empty))], memoryview(bytearray()), 5)
    assert pull.run().bytes_pulled == 0


def test_an_interrupted_pull_goes_on_inside_the_chunk_where_it_broke_off(depot: BlobServer, flat: torch.Tensor) -> None:
    seen: dict[int, int] = {}

    def breaks(connection: int, data: bytes) -> bytes | None:
        seen[connection] = seen.get(connection, 0) + len(data)
        return None if connection < 3 and seen[connection] > 600_000 else data

    with relay(depot.url_of(depot.put(flat)), breaks) as url:
        into = buffer()
        report = Pull(ChunkList.of(flat, CHUNK), depot.secret, [url], into, 20, lanes=1).run()
    assert same(into, flat)
    assert report.resumed == 3
    # What was there was not asked for again.
    assert report.bytes_pulled == SIZE


def test_a_damaged_chunk_is_found_and_fetched_again(depot: BlobServer, flat: torch.Tensor) -> None:
    damaged = []

    def damages(connection: int, data: bytes) -> bytes:
        if not damaged and len(data) > 1000:
            damaged.append(data)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    with relay(depot.url_of(depot.put(flat)), damages) as url:
        into = buffer()
        report = Pull(ChunkList.of(flat, CHUNK), depot.secret, [url], into, 20).run()
    assert same(into, flat)
    assert report.bytes_pulled == SIZE + CHUNK


def test_what_is_damaged_at_its_source_is_an_error_that_names_the_chunk(depot: BlobServer, flat: torch.Tensor) -> None:
    other = flat.clone()
    other[2 * CHUNK + 5] ^= 1
    pull = pull_of(flat, depot, [depot.url_of(depot.put(other))])
    with pytest.raises(TransferError, match="chunk 2 arrived 3 times with another digest"):
        pull.run()


def test_a_peer_whose_bytes_are_wrong_is_not_asked_again(depot: BlobServer, flat: torch.Tensor) -> None:
    wrong = depot.url_of(depot.put(torch.zeros_like(flat)))
    right = depot.url_of(depot.put(flat))
    pull = pull_of(flat, depot, [wrong, right], lanes=1)
    report = pull.run()
    assert report.by_source == {wrong: CHUNK, right: SIZE}


def test_a_peer_that_cannot_be_reached_costs_little_and_the_learner_is_asked(
    depot: BlobServer, flat: torch.Tensor
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/slipstream/chunks/0"
    right = depot.url_of(depot.put(flat))
    report = pull_of(flat, depot, [nobody, right]).run()
    assert report.by_source == {right: SIZE}
    assert report.seconds < 2


def test_a_source_that_says_nothing_is_an_error_in_time_that_names_it(depot: BlobServer, flat: torch.Tensor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/slipstream/chunks/0"
        began = time.monotonic()
        with pytest.raises(TransferError, match=rf"{url} failed: not all there after 1.5 s") as late:
            pull_of(flat, depot, [url], timeout_s=1.5).run()
        assert time.monotonic() - began < 6
    assert "; 0.0 of 0.0 MB came" not in str(late.value)
    assert re.search(r"; 0\.0 of [\d.]+ MB came, at 0 MB/s \(none\); in time it needs [\d.]+ MB/s \(", str(late.value))


def test_a_line_that_is_too_slow_says_what_came_and_what_it_would_need(flat: torch.Tensor) -> None:
    megabytes = SIZE / 1e6
    with BlobServer("127.0.0.1", mbytes_per_s=megabytes / 4) as slow:
        url = slow.url_of(slow.put(flat))
        with pytest.raises(TransferError, match="not all there after 2 s") as late:
            pull_of(flat, slow, [url], timeout_s=2).run()
    said = re.search(
        r"([\d.]+) of ([\d.]+) MB came, at ([\d.]+) MB/s \(([\d.]+) MB from (\S+)\); in time it needs ([\d.]+) MB/s, "
        r"or weight_sync.timeout_s = (\d+) at this rate",
        str(late.value),
    )
    assert said is not None, late.value
    came, total, rate, of_source, named, needed, seconds = said.groups()
    assert (float(total), of_source, named) == (pytest.approx(megabytes, abs=0.05), came, url)
    assert 0 < float(came) < megabytes
    assert float(rate) < float(needed) == pytest.approx(megabytes / 2, rel=0.01)
    assert float(seconds) > 2


def test_what_the_learner_does_not_serve_any_more_ends_the_pull_at_once(depot: BlobServer, flat: torch.Tensor) -> None:
    key = depot.put(flat)
    depot.drop(key)
    began = time.monotonic()
    with pytest.raises(TransferError, match="HTTP 404: these weights are not served any more"):
        pull_of(flat, depot, [depot.url_of(key)]).run()
    assert time.monotonic() - began < 2


def test_a_drop_in_mid_pull_sends_no_byte_more(depot: BlobServer, flat: torch.Tensor) -> None:
    """The buffer is filled with the next version then."""
    key = depot.put(flat)

    def drops(connection: int, data: bytes) -> bytes:
        depot.drop(key)
        return data

    with relay(depot.url_of(key), drops) as url, pytest.raises(TransferError, match="404"):
        pull_of(flat, depot, [url], lanes=1).run()


def test_what_the_buffer_holds_already_is_not_pulled(depot: BlobServer, flat: torch.Tensor) -> None:
    into = memoryview(bytearray(flat.numpy().tobytes()))
    into[CHUNK : CHUNK + 9] = bytes(9)
    chunks = ChunkList.of(flat, CHUNK)
    begun = dict.fromkeys(range(6), CHUNK)
    report = Pull(chunks, depot.secret, [depot.url_of(depot.put(flat))], into, 20, begun).run()
    assert same(into, flat)
    assert (report.bytes_pulled, report.resumed) == (CHUNK, 0)


def test_i8_nothing_is_read_without_the_secret_and_its_key(depot: BlobServer, flat: torch.Tensor) -> None:
    key = depot.put(flat)
    for headers, path, status in [
        ({}, key, 401),
        ({"Authorization": "Bearer other"}, key, 401),
        ({"Authorization": f"Bearer {depot.secret}"}, key, 416),
        ({"Authorization": f"Bearer {depot.secret}", "Range": "bytes=0-0"}, "0" * 16, 404),
        ({"Authorization": f"Bearer {depot.secret}", "Range": f"bytes=0-{SIZE}"}, key, 416),
        ({"Authorization": f"Bearer {depot.secret}", "Range": "bytes=5-4"}, key, 416),
        ({"Authorization": f"Bearer {depot.secret}", "Range": "bytes=0-1,3-4"}, key, 416),
        ({"Authorization": f"Bearer {depot.secret}", "Range": "bytes=0-0"}, key, 206),
    ]:
        connection = http.client.HTTPConnection(urlsplit(depot.url).netloc, timeout=5)
        connection.request("GET", f"/slipstream/chunks/{path}", headers=headers)
        answer = connection.getresponse()
        assert answer.status == status, headers
        answer.read()
        connection.close()
    assert depot.served == 1


def test_a_receiver_that_stops_reading_is_cut_off(
    depot: BlobServer, flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(depot_module, "STALL_TIMEOUT_S", 0.3)
    large = torch.zeros(64 * CHUNK, dtype=torch.uint8)
    parts = urlsplit(depot.url)
    with socket.create_connection((parts.hostname, parts.port)) as client:
        request = (
            f"GET /slipstream/chunks/{depot.put(large)} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-{len(large) - 1}\r\n"
            f"Authorization: Bearer {depot.secret}\r\n\r\n"
        )
        client.sendall(request.encode())
        deadline = time.monotonic() + 10
        while "has not read" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "127.0.0.1 has not read for 0.3 s" in caplog.text


def test_the_bound_holds_over_all_who_pull(flat: torch.Tensor) -> None:
    with BlobServer("127.0.0.1", mbytes_per_s=20) as depot:
        url = depot.url_of(depot.put(flat))
        pulls = [pull_of(flat, depot, [url]) for _ in range(2)]
        threads = [threading.Thread(target=pull.run) for pull in pulls]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
    assert 0.8 < seconds / (2 * SIZE / 20e6) < 2


def test_a_throttle_spreads_what_it_lets_pass() -> None:
    now = 100.0
    throttle = Throttle(10, lambda: now)
    assert [throttle.delay(5), throttle.delay(10), throttle.delay(1)] == [0, 0.5, 1.5]
    now = 200.0
    assert throttle.delay(1) == 0
    assert Throttle(0).delay(10**12) == 0


def test_a_port_that_is_taken_is_named_with_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransferError, match=rf"weight_sync.http_port = {port}: cannot listen there.*0: any"):
            BlobServer("127.0.0.1", port).start()


def test_a_depot_is_shared_until_its_last_holder_leaves(flat: torch.Tensor) -> None:
    depots = SharedBlobServers()
    one, two = (depots.take("127.0.0.1", 0, 0.0) for _ in range(2))
    assert one is two
    depots.leave(one)
    pull_of(flat, two, [two.url_of(two.put(flat))]).run()
    depots.leave(two)
    with pytest.raises(TransferError):
        pull_of(flat, two, [two.url_of("0" * 16)], timeout_s=0.3).run()


def test_a_list_whose_parts_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 digests, and 100 bytes in chunks of 10"):
        ChunkList(10, 100, ["00"])
    with pytest.raises(ValueError, match="chunks of 0 bytes"):
        ChunkList(0, 0, [])
