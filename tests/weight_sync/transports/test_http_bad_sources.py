"""Sources that trickle, cut, lie, answer nonsense or go silent: a pull passes them over in time."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http import pull_sources
from slipstream.weight_sync.transports.http.blob_server import BlobServer
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.pull import Pull, PullReport

CHUNK = 1 << 20
SIZE = 6 * CHUNK + 777

# Answers one connection, which it reads the requests of.
Handler = Callable[[socket.socket], None]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_sources, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(pull_sources, "SILENCE_S", 0.3)
    monkeypatch.setattr(pull_sources, "PACE_S", 0.5)


@contextmanager
def source(handler: Handler) -> Iterator[str]:
    """The URL of a source that answers every connection by `handler`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            handler(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/slipstream/chunks/0"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def asked(connection: socket.socket) -> tuple[int, int]:
    """The range of the next request. Raises OSError where none comes."""
    text = b""
    while b"\r\n\r\n" not in text:
        piece = connection.recv(4096)
        if not piece:
            raise OSError("no request")
        text += piece
    found = re.search(rb"bytes=(\d+)-(\d+)", text)
    assert found is not None
    return int(found[1]), int(found[2]) + 1


def heading(size: int | str, more: str = "") -> bytes:
    return f"HTTP/1.1 206 Partial Content\r\nContent-Length: {size}\r\n{more}\r\n".encode()


def drip(connection: socket.socket, text: bytes = b"z") -> None:
    for _ in range(400):
        connection.sendall(text)
        time.sleep(0.05)


def trickles(connection: socket.socket) -> None:
    start, end = asked(connection)
    connection.sendall(heading(end - start))
    drip(connection)


def trickles_in_its_headers(connection: socket.socket) -> None:
    asked(connection)
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nx: ")
    drip(connection)


def trickles_in_its_refusal(connection: socket.socket) -> None:
    asked(connection)
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 299\r\n\r\n")
    drip(connection)


def says_nothing(connection: socket.socket) -> None:
    time.sleep(20)


def lies(connection: socket.socket) -> None:
    while True:
        start, end = asked(connection)
        connection.sendall(heading(end - start) + bytes(end - start))


def lies_and_cuts(connection: socket.socket) -> None:
    """The half that is wrong is mixed with the right half of another source."""
    start, end = asked(connection)
    connection.sendall(heading(end - start) + bytes((end - start) // 2))


def answers(text: bytes) -> Handler:
    def handler(connection: socket.socket) -> None:
        asked(connection)
        connection.sendall(text)

    return handler


BAD: dict[str, Handler] = {
    "trickles": trickles,
    "trickles_in_its_headers": trickles_in_its_headers,
    "trickles_in_its_refusal": trickles_in_its_refusal,
    "says_nothing": says_nothing,
    "lies": lies,
    "lies_and_cuts": lies_and_cuts,
    "length_abc": answers(heading("abc")),
    "length_digits_of_another_alphabet": answers(heading("٣")),
    "length_negative": answers(heading(-5)),
    "no_length": answers(b"HTTP/1.1 206 x\r\n\r\nzzz"),
    "no_http": answers(b"\0\1\2\3\n\n"),
    "endless_headers": answers(b"HTTP/1.1 206 x\r\n" + b"a: b\r\n" * 200 + b"\r\n"),
    "bad_chunks": answers(heading(CHUNK, "Transfer-Encoding: chunked\r\n") + b"zz\r\nhello\r\n"),
    "negative_chunk": answers(heading(CHUNK, "Transfer-Encoding: chunked\r\n") + b"-5\r\nhello\r\n"),
    "status_abc": answers(b"HTTP/1.1 abc x\r\n\r\n"),
    "redirect": answers(b"HTTP/1.1 302 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
}


def pull(flat: torch.Tensor, depot: BlobServer, urls: list[str], timeout_s: float = 20) -> PullReport:
    """A pull that must bring the right bytes."""
    into = memoryview(bytearray(SIZE))
    report = Pull(ChunkList.of(flat, CHUNK), depot.secret, urls, into, timeout_s).run()
    assert bytes(into) == flat.numpy().tobytes()
    return report


@pytest.mark.parametrize("name", BAD)
def test_a_bad_peer_is_passed_over_in_time(depot: BlobServer, flat: torch.Tensor, name: str) -> None:
    with source(BAD[name]) as bad:
        report = pull(flat, depot, [bad, depot.url_of(depot.put(flat))])
    assert report.seconds < 5


def test_all_bad_peers_at_once_are_passed_over(depot: BlobServer, flat: torch.Tensor) -> None:
    with ExitStack() as stack:
        bad = [stack.enter_context(source(handler)) for handler in BAD.values()]
        assert pull(flat, depot, [*bad, depot.url_of(depot.put(flat))], 60).seconds < 30


def test_a_slow_network_is_no_bad_source(flat: torch.Tensor) -> None:
    """Both are far below the pace that is asked of them, and both are used to the end."""
    with BlobServer("127.0.0.1", mbytes_per_s=2) as depot:
        url = depot.url_of(depot.put(flat))
        report = pull(flat, depot, [url, url], 60)
    assert report.seconds < 20
    assert report.bytes_pulled == SIZE


def test_a_proxy_that_cuts_off_again_and_again_only_costs_new_connections(
    depot: BlobServer, flat: torch.Tensor
) -> None:
    whole = flat.numpy().tobytes()

    def cuts(connection: socket.socket) -> None:
        start, end = asked(connection)
        connection.sendall(heading(end - start) + whole[start : min(end, start + 100_000)])

    with pytest.MonkeyPatch.context() as patch, source(cuts) as url:
        patch.setattr(pull_sources, "RETRY_PAUSE_S", 1.0)
        report = pull(flat, depot, [url])
    assert report.seconds < 5
    assert report.bytes_pulled == SIZE
    assert report.resumed > 50


def test_a_source_that_closes_after_each_answer_is_asked_over_new_connections(
    depot: BlobServer, flat: torch.Tensor
) -> None:
    whole = flat.numpy().tobytes()

    def closes(connection: socket.socket) -> None:
        start, end = asked(connection)
        connection.sendall(heading(end - start, "Connection: close\r\n") + whole[start:end])

    with source(closes) as url:
        assert pull(flat, depot, [url]).resumed == 0


def test_a_proxy_that_says_503_for_a_moment_is_asked_again(depot: BlobServer, flat: torch.Tensor) -> None:
    whole, refusals = flat.numpy().tobytes(), [503, 502, 504]

    def hesitates(connection: socket.socket) -> None:
        while True:
            start, end = asked(connection)
            if refusals:
                connection.sendall(f"HTTP/1.1 {refusals.pop()} x\r\nContent-Length: 0\r\n\r\n".encode())
            else:
                connection.sendall(heading(end - start) + whole[start:end])

    with source(hesitates) as url:
        pull(flat, depot, [url])


def test_a_learner_that_is_gone_ends_the_pull_with_what_to_do(
    flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.weight_sync.transports.http.pull.MAX_REFUSED_S", 0.5)
    depot = BlobServer("127.0.0.1", mbytes_per_s=4)
    depot.start()
    url = depot.url_of(depot.put(flat))
    threading.Timer(0.3, depot.stop).start()
    began = time.monotonic()
    remedy = r"refused for \d+ s: the learner is gone, or weight_sync.host and weight_sync.http_port do not lead"
    with pytest.raises(TransferError, match=remedy):
        Pull(ChunkList.of(flat, CHUNK), depot.secret, [url], memoryview(bytearray(SIZE)), 60).run()
    assert time.monotonic() - began < 10


def test_a_pull_that_is_late_says_what_each_source_did(depot: BlobServer, flat: torch.Tensor) -> None:
    wanted = "7 of 7 chunks are missing.*: OSError.*'abc'.*: it said nothing for"
    with source(BAD["length_abc"]) as bad, source(says_nothing) as silent, pytest.raises(TransferError, match=wanted):
        pull(flat, depot, [bad, silent], 1.5)


def test_a_pull_that_is_stopped_ends_at_once_though_its_sources_are_silent(flat: torch.Tensor) -> None:
    with source(says_nothing) as silent:
        going = Pull(ChunkList.of(flat, CHUNK), "s", [silent], memoryview(bytearray(SIZE)), 60)
        threading.Timer(0.3, going.stop, ["the learner was let go"]).start()
        began = time.monotonic()
        with pytest.raises(TransferError, match="the learner was let go"):
            going.run()
        assert time.monotonic() - began < 2
        assert not going.abandoned
