"""What stands before the application is bounded, and no web page gets in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import perf_counter, process_time, sleep
from typing import Any

import aiohttp
import pytest
import uvicorn
from prometheus_client import generate_latest

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import JSON, QueueClient
from slipstream.protocol.messages import BeginSession, ErrorBody, LeaseRequest, Server, TicketRequest, WorkerReport
from slipstream.protocol.status import Status
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.api.connection import Connection, ConnectionLimits, bounded_by
from slipstream.rollout_queue.api.connection_pool import MIN_DESCRIPTORS, ConnectionPool, Kind, Shares, fit, kind_of
from slipstream.rollout_queue.api.requests import ByteBudget
from slipstream.rollout_queue.broker import learner
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger import validation
from slipstream.rollout_queue.observe.observations import Observations
from slipstream.rollout_queue.service import listen
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config, group
from tests.kit.messages import SERVER
from tests.kit.queue import Served, listening, serve_version, serving, until

MIB = 1024**2
SHARES = Shares(16)
PATIENCE_S = 5.0
STATUS = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def door(shares: Shares = SHARES, token: str | None = None, **limits: Any) -> AsyncIterator[int]:
    """The port of a queue behind our connections; time-outs are short where the test is about them."""
    async with counted_door(shares, token, **limits) as (port, _):
        yield port


@asynccontextmanager
async def counted_door(
    shares: Shares = SHARES, token: str | None = None, **limits: Any
) -> AsyncIterator[tuple[int, Observations]]:
    """As `door`, and what the queue has observed."""
    app = create_app(config(queue={"token": token}), MemoryStore())
    broker: Broker = app.state.broker
    seen = broker.observations
    pool = ConnectionPool(shares, seen.connections, broker.clock.monotonic)
    http = bounded_by(pool, seen.histograms, ConnectionLimits(**limits))
    server = _Server(uvicorn.Config(app, http=http, access_log=False, log_level="warning", ws="none"))
    with listen("127.0.0.1", 0) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield listener.getsockname()[1], seen
            finally:
                broker.close_waits()
                server.should_exit = True


async def talk(port: int, *parts: bytes) -> bytes:
    """Return the queue's answer to these bytes until it ends the connection, or for half a second if it does not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            while not answer.endswith(b"}") and (data := await reader.read(65536)):
                answer += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


async def healthz(port: int) -> float:
    """Seconds until a new connection has the liveness probe's answer."""
    started = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH)
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    return perf_counter() - started


def post(body: bytes = b"{}", path: str = access.TICKETS, **headers: str) -> bytes:
    lines = {"Host": "127.0.0.1", "Content-Type": JSON, "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value != "none")
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@pytest.mark.parametrize("pieces", [1, 64], ids=["in one piece", "in 64"])
async def test_a_head_of_64_mib_is_refused_at_once(pieces: int) -> None:
    head = b"GET /v1/status HTTP/1.1\r\nX: " + b"a" * (64 * MIB)
    size = len(head) // pieces + 1
    async with door(token="secret") as port:
        started = process_time()
        attack = asyncio.create_task(talk(port, *(head[i : i + size] for i in range(0, len(head), size))))
        for _ in range(20):
            await healthz(port)
        answer = await attack
        assert process_time() - started < 3.0, "seconds of CPU, both ends; it was quadratic in the size"
        assert answer == b"" or b" 431 " in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\r\n" * 40_000,
    ],
    ids=["url", "headers", "header", "empty lines"],
)
async def test_a_head_has_a_size(head: bytes) -> None:
    async with door() as port:
        assert b" 431 " in await talk(port, head)


async def test_bytes_that_come_one_at_a_time_stay_cheap() -> None:
    async with door() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert b"200" in await reader.readline()
        writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"GET /v1/status HT", b" 408 "), (post(b"{", Content_Length="100"), b" 408 ")],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_connection_that_sends_no_whole_request_is_closed(sent: bytes, answer: bytes) -> None:
    async with door(head_s=0.05, body_s=0.05) as port:
        assert answer in await talk(port, sent)


async def test_a_body_that_trickles_is_refused_and_one_that_flows_is_not() -> None:
    async with door(body_s=0.1, body_bytes=1000) as port:
        for piece, expected in ((100, b" 408 "), (1000, b" 422 ")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b"", Content_Length=str(piece * 20)))
            answered = asyncio.create_task(reader.readline())
            for _ in range(20):
                writer.write(b" " * piece)
                await asyncio.wait([answered], timeout=0.02)
            assert expected in await asyncio.wait_for(answered, PATIENCE_S)
            writer.close()


Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(port: int, count: int, sent: bytes = b"") -> list[Open]:
    found = []
    for _ in range(count):
        found.append(await asyncio.open_connection("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            found[-1][1].write(sent)
    return found


def close(connections: list[Open]) -> None:
    for _, writer in connections:
        writer.close()


def refusal(answer: bytes) -> ErrorBody:
    """Return the body of the last answer."""
    return codec.decode_json(answer.rpartition(b"\r\n\r\n")[2], ErrorBody)


POLL = post(codec.encode_json(TicketRequest("w", 1, wait_s=30.0)))


@pytest.mark.parametrize("sent", [b"", b"GET /"], ids=["silent", "half a head"])
async def test_connections_without_a_request_make_room_for_new_ones(sent: bytes) -> None:
    async with door(Shares(1, new=18)) as port:
        open_ = await opened(port, 100, sent)
        assert b" 200 " in await talk(port, STATUS)
        assert await healthz(port) < 0.5
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in open_[:70]:
                with contextlib.suppress(ConnectionResetError):  # it was ended before it had read the request
                    assert await reader.read() == b""
        close(open_)


async def test_a_fleet_beyond_its_share_is_refused_in_words_and_nobody_else_is() -> None:
    async with counted_door(Shares(2)) as (port, seen):
        polls = await opened(port, 8, POLL)
        await until(lambda: seen.connections.open["worker"] == 8)
        for _ in range(3):
            answer = await talk(port, POLL)
            assert b" 503 " in answer
            assert b"\r\nretry-after: 5\r\n" in answer
            assert b"\r\nconnection: close\r\n" in answer
            problem = refusal(answer)
            assert problem.reason == reasons.BUSY
            assert "2 workers have (queue.max_workers)" in problem.message
        status = codec.decode_json((await talk(port, STATUS)).partition(b"\r\n\r\n")[2], Status).connections
        assert (status.refused, status.open["worker"], status.limits["worker"]) == (3, 8, 8)
        assert b" 422 " in await talk(port, post(path=access.LEASES))
        assert await healthz(port) < 0.5
        assert not any(reader.at_eof() for reader, _ in polls)
        close(polls[:1])
        await until(lambda: seen.connections.open["worker"] < 8)
        assert b" 422 " in await talk(port, post())
        close(polls)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (b"/v1/tickets", Kind.WORKER),
        (b"/v1/groups/0.0?a=b", Kind.WORKER),
        (b"/v1/%74ickets", Kind.WORKER),
        (b"http://queue:1/v1/tickets", Kind.WORKER),
        (b"http://queue:1/v1%2Fworkers/w?a=http://x/healthz", Kind.WORKER),
        (b"http://queue:1", Kind.CONTROL),
        (b"*", Kind.CONTROL),
        (b"/v1/leases", Kind.CONTROL),
        (b"/healthz?a", Kind.HEALTH),
    ],
)
def test_a_request_has_its_kind_however_its_target_is_written(target: bytes, kind: Kind) -> None:
    """A worker could take the learner's connections up: it wrote its polls in another way."""
    assert kind_of(target) is kind


async def test_operators_beyond_their_share_are_refused_and_workers_are_not() -> None:
    waits = b"GET /v1/evaluations?wait_s=30 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lease = post(codec.encode_json(LeaseRequest(0, "l", 1, wait_s=30.0)), path=access.LEASES)
    async with counted_door(Shares(2, control=3)) as (port, seen):
        held = await opened(port, 3, post(b"{", path=access.LEASES, Content_Length="100"))
        await until(lambda: seen.connections.open["control"] == 3)
        for asked in (STATUS, waits, lease):
            problem = refusal(await talk(port, asked))
            assert problem.reason == reasons.BUSY
            assert "operators" in problem.message
        assert b" 422 " in await talk(port, post())
        assert await healthz(port) < 0.5
        assert seen.connections.status(0.0).refused == 0, "of workers"
        close(held)


async def test_idle_connections_give_their_places_up_to_those_of_their_kind() -> None:
    async with counted_door(Shares(2, control=3)) as (port, seen):
        idle_workers, idle_operators = await opened(port, 8, post()), await opened(port, 3, STATUS)
        for reader, _ in idle_workers + idle_operators:
            assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        polls = await opened(port, 8, POLL)
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in idle_workers:
                await reader.read()
        assert seen.connections.open["worker"] == 8
        newest = await opened(port, 1, STATUS)
        async with asyncio.timeout(PATIENCE_S):
            await idle_operators[0][0].read()
            assert (await newest[0][0].readline()).startswith(b"HTTP/1.1 200 ")
        assert seen.connections.open["control"] == 3
        close(idle_workers + idle_operators + polls + newest)


async def test_a_kept_connection_is_not_closed_while_its_next_request_is_answered() -> None:
    async with counted_door(Shares(1)) as (port, seen):
        held = await opened(port, 4, post())
        for number, (reader, writer) in enumerate(held):
            assert b" 422 " in await reader.readuntil(b"}")
            writer.write(post(codec.encode_json(TicketRequest(f"w{number}", 1, wait_s=30.0))))
        await until(lambda: {f"w{number}" for number in range(4)} <= {wait.who for wait in seen.waits.list(0.0)})
        assert refusal(await talk(port, POLL)).reason == reasons.BUSY
        assert not any(reader.at_eof() for reader, _ in held)
        close(held)


async def test_a_connection_that_reads_its_refusal_holds_no_place_of_workers() -> None:
    put = post(b"", "/v1/groups/9.0", Content_Length="60000000").replace(b"POST", b"PUT", 1)
    async with counted_door(Shares(1)) as (port, seen):
        held = await opened(port, 4, put)
        for reader, _ in held:
            assert b" 410 " in await reader.readuntil(b"}")
        await until(lambda: +seen.connections.open == {"closing": 4})
        polls = await opened(port, 4, POLL)
        await until(lambda: +seen.connections.open == {"closing": 4, "worker": 4})
        close(held + polls)


async def test_a_connection_that_is_half_closed_holds_no_place() -> None:
    async with counted_door(Shares(1)) as (port, seen):
        polls = await opened(port, 4, POLL)
        await until(lambda: seen.connections.open["worker"] == 4)
        for _, writer in polls:
            writer.write_eof()
        await until(lambda: seen.connections.open["worker"] == 0)
        assert b" 422 " in await talk(port, post())
        close(polls)


async def test_a_kept_connection_is_counted_where_its_newest_request_belongs() -> None:
    async with counted_door() as (port, seen):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: seen.connections.open["new"] == 1)
        for request, kind in ((STATUS, "control"), (post(), "worker"), (HEALTH, "health"), (POLL, "worker")):
            writer.write(request)
            await until(lambda kind=kind: +seen.connections.open == {kind: 1})  # type: ignore[misc]
            if request is not POLL:
                assert (await reader.readline()).startswith(b"HTTP/1.1 ")
                await reader.read(100_000)
        writer.close()
        await until(lambda: not +seen.connections.open)


@pytest.mark.parametrize("together", [True, False], ids=["in one piece", "one after the other"])
async def test_a_second_request_before_the_first_answer_is_refused_after_that_answer(together: bool) -> None:
    poll = post(codec.encode_json(TicketRequest("w", 1, wait_s=0.3)))
    async with counted_door() as (port, seen):
        for first, status in ((HEALTH, b"200"), (poll, b"204")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if together:
                writer.write(first + STATUS * 500)
            else:
                writer.write(first)
                if first is poll:
                    await until(lambda: seen.connections.open["worker"] == 1)
                writer.write(STATUS * 500)
            async with asyncio.timeout(PATIENCE_S):
                answer = await reader.read()
            answers = answer.split(b"HTTP/1.1 ")[1:]
            assert answers[0].startswith(status)
            assert not any(other.startswith(b"400") for other in answers[:-1])
            assert answers[-1].startswith(b"400")
            assert b"\r\nconnection: close\r\n" in answers[-1]
            assert "send one at a time" in refusal(answers[-1]).message
            writer.close()
        assert await healthz(port) < 0.5


@pytest.mark.parametrize("after", [b"\0" * 99, b"GET\r\n\r\n"])
async def test_what_is_no_request_is_refused_after_the_answer_before_it(after: bytes) -> None:
    async with door() as port:
        answer = await talk(port, HEALTH + after)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 400 ") == 1


async def test_requests_one_after_the_other_are_all_answered() -> None:
    async with door() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(20):
            writer.write(post())
            assert b" 422 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        writer.close()


@pytest.mark.parametrize(
    "twice",
    [
        "Host: localhost\r\nHost: localhost",
        "Host: localhost\r\nhOST: evil.example",
        "Authorization: Bearer a\r\nAuthorization: Bearer b",
        "Content-Type: application/json\r\nContent-Type: text/plain",
        "Origin: null\r\nOrigin: null",
        "Content-Length: 2\r\nContent-Length: 2",
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
    ],
)
async def test_a_request_that_could_be_read_in_two_ways_is_refused(twice: str) -> None:
    name = twice.partition(":")[0].lower()
    async with door() as port:
        answer = await talk(port, f"POST {access.TICKETS} HTTP/1.1\r\n{twice}\r\n\r\n{{}}".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        problem = refusal(answer)
        assert problem.reason == "http_400"
        assert name in problem.message.lower()
        assert await healthz(port) < 0.5


async def test_a_trailer_is_not_kept_and_a_body_in_tiny_pieces_is_refused() -> None:
    chunked = post(b"", Transfer_Encoding="chunked", Content_Length="none")
    async with door() as port:
        trailed = chunked + b"2\r\n{}\r\n0\r\nX: y\r\nContent-Type: text/plain\r\n\r\n"
        assert b" 422 " in await talk(port, trailed)
        for tiny in (b"1;" + b"x" * MIB, b"1\r\na\r\n" * 9999, b"0\r\n" + b"X: y\r\n" * 9999):
            assert b" 400 " in await talk(port, chunked, tiny)


async def test_an_answer_comes_through_although_the_body_is_still_on_its_way() -> None:
    async with door(token="secret") as port:
        assert b" 401 " in await talk(port, post(b"a" * 100, Content_Length="100000000"), b"b" * MIB)


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99]
)
async def test_what_is_no_http_is_a_problem_without_a_line_in_the_log(
    raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with door() as port:
        answer = await talk(port, raw)
    assert b" 400 " in answer
    assert codec.decode_json(answer.partition(b"\r\n\r\n")[2], ErrorBody).reason == "http_400"
    assert not caplog.records


@pytest.mark.parametrize("sent", [0, 10], ids=["at once", "in the middle"])
async def test_a_client_that_hangs_up_prints_no_traceback(sent: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    poll = post(codec.encode_json(TicketRequest("w", 1, wait_s=0.2)))
    async with door() as port:
        for request in (post(b"x" * sent, Content_Length="1000"), poll, STATUS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
        await asyncio.sleep(0.3)
        await healthz(port)
    assert not caplog.records


@pytest.mark.parametrize(
    ("headers", "wrong"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "evil.example:8200"}, "Host"),
        ({"Host": "none"}, "Host"),
        ({"Host": "[::1"}, "Host"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1:1"}, "Origin"),
        ({"Content_Type": "text/plain"}, "Content-Type"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, "Content-Type"),
        ({"Content_Type": "multipart/form-data; boundary=application/json"}, "Content-Type"),
        ({"Content_Type": "none"}, "Content-Type"),
        ({"Content_Type": "none", "Content_Length": "none", "Transfer_Encoding": "chunked"}, "Content-Type"),
    ],
)
async def test_a_web_page_can_change_nothing(headers: dict[str, str], wrong: str) -> None:
    async with door() as port:
        body = b"0\r\n\r\n" if "Transfer_Encoding" in headers else b"{}"
        answer = await talk(port, post(body, path=access.FINISH, **headers))
        assert b" 403 " in answer
        problem = codec.decode_json(answer.partition(b"\r\n\r\n")[2], ErrorBody)
        assert problem.reason == reasons.ORIGIN
        assert problem.message.startswith(f"{wrong} is ")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:8200"},
        {"Host": "127.0.0.9"},
        {"Host": "[::1]:8200"},
        {"Host": "LOCALHOST"},
        {"Host": socket.gethostname()},
        {"Host": "127.0.0.1:8200", "Origin": "http://127.0.0.1:8200"},
        {"Content_Type": "application/json; charset=utf-8"},
    ],
)
async def test_programs_on_this_machine_are_heard(headers: dict[str, str]) -> None:
    async with door() as port:
        assert b" 422 " in await talk(port, post(**headers))


async def test_a_name_that_was_turned_to_this_machine_reads_nothing_unless_it_has_the_token() -> None:
    rebound = b"GET /v1/status HTTP/1.1\r\nHost: evil.example\r\n"
    async with door() as port:
        assert b" 403 " in await talk(port, rebound + b"\r\n")
    async with door(token="secret") as port:
        assert b" 200 " in await talk(port, rebound + b"Authorization: Bearer secret\r\n\r\n")


@pytest.mark.parametrize(
    ("status", "reason", "path", "body"),
    [
        (413, "too_large", "/v1/servers/a", {"name": "a" * 20 * MIB, "url": "u"}),
        (413, "too_large", "/v1/servers/a", {"server": {"name": "a", "url": "u" * 1025}}),
        (413, "too_large", access.TICKETS, {"worker_id": "w" * 1000, "max_tickets": 1}),
        (413, "too_large", "/v1/workers/w", {"worker_id": "w", "ticket_ids": ["t" * 1000]}),
        (413, "too_large", "/v1/workers/w", {"worker_id": "w", "ticket_ids": [], "failures": {"f" * 300: 1}}),
        (
            422,
            "too_many",
            "/v1/workers/w",
            {"worker_id": "w", "ticket_ids": [], "failures": {str(i): i for i in range(1001)}},
        ),
        (413, "too_large", access.LEASES, {"session": 1, "lease_id": "l" * 300, "max_groups": 1}),
        (422, "decode", access.LEASES, {"session": 2**63, "lease_id": "l", "max_groups": 1}),
    ],
)
async def test_what_would_be_kept_is_bounded(status: int, reason: str, path: str, body: dict[str, Any]) -> None:
    method = "PUT" if path.startswith(access.SERVERS) else "POST"
    async with (
        serving(config()) as queue,
        aiohttp.ClientSession(headers={"Content-Type": JSON}) as session,
        session.request(method, queue.url + path, data=codec.encode_json(body)) as response,
    ):
        assert (response.status, codec.decode_json(await response.read(), ErrorBody).reason) == (status, reason)


async def test_a_large_worker_still_renews_its_tickets() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.heartbeat(WorkerReport("w", [f"{number}.0" for number in range(10_000)]))


async def test_a_lease_answer_is_bounded_and_the_next_brings_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _with_groups(5) as (_, client, size):
        monkeypatch.setattr(learner, "MAX_LEASE_BYTES", 2 * size)
        have: list[str] = []
        counts = []
        while len(have) < 5:
            reply = await client.lease(LeaseRequest(1, "l", 5 - len(have), have=have, wait_s=0.0))
            have += [codec.decode(bytes(data), group_type()).ticket_id for data in reply.groups]
            counts.append(len(reply.groups))
        assert counts == [2, 2, 1]
        assert len(set(have)) == 5
        monkeypatch.setattr(learner, "MAX_LEASE_BYTES", 1)
        assert len((await client.lease(LeaseRequest(1, "l", 0, wait_s=0.0))).groups) == 1


def group_type() -> Any:
    return type(group())


@asynccontextmanager
async def _with_groups(count: int) -> AsyncIterator[tuple[Served, QueueClient, int]]:
    async with serving(config(learner={"groups_per_step": count})) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        for ticket in (await client.tickets(TicketRequest("w", count, wait_s=0.0))).tickets:
            sent = group(ticket)
            await client.submit(sent)
        yield queue, client, len(codec.encode(sent))


@pytest.mark.parametrize(
    ("descriptors", "workers"), [(2**31, 2048), (12960, 2048), (12959, 2047), (1024, 101), (MIN_DESCRIPTORS, 10)]
)
def test_connections_fit_the_file_descriptors(descriptors: int, workers: int) -> None:
    shares = fit(2048, descriptors)
    assert shares.max_workers == workers
    assert shares.descriptors <= descriptors
    assert all(shares.limits.values())
    assert fit(3, MIN_DESCRIPTORS).max_workers == 3


RAISED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from slipstream.rollout_queue.api.connection_pool import raise_descriptors
print(raise_descriptors(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_file_descriptors_is_raised_to_the_hard_one() -> None:
    made = subprocess.run([sys.executable, "-c", RAISED, "128"], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "128 128 128"


async def test_a_body_for_a_ticket_that_is_not_out_is_refused_before_it_is_read() -> None:
    put = post(b"", "/v1/groups/9.0", Content_Length="60000000").replace(b"POST", b"PUT", 1)
    async with door() as port:
        assert b" 410 " in await talk(port, put)


async def test_a_groups_put_is_observed_with_its_bytes() -> None:
    async with counted_door() as (port, seen):
        put = post(b"x" * 60, "/v1/groups/9.0").replace(b"POST", b"PUT", 1)
        assert b" 410 " in await talk(port, put)
        assert b" 422 " in await talk(port, post())
        observed = generate_latest(seen.histograms.registry).decode()
    assert "slipstream_put_bytes_sum 60.0" in observed
    assert "slipstream_put_seconds_count 1.0" in observed


async def test_bodies_that_are_read_at_one_time_share_a_bounded_room() -> None:
    app = create_app(config(), MemoryStore())
    bodies: ByteBudget = app.state.bodies
    async with listening(app) as url, QueueClient(url, patience_s=5.0) as client:
        await client.put_server(Server(SERVER, "http://127.0.0.1:8100"))
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        tickets = (await client.tickets(TicketRequest("w", 2, wait_s=0.0))).tickets
        body = codec.encode(group(tickets[0]))
        with bodies.share() as others:
            others.grow(256 * MIB - len(body) + 1)
            async with (
                aiohttp.ClientSession(headers={"Content-Type": JSON}) as session,
                session.put(f"{url}/v1/groups/{tickets[0].id}", data=body) as response,
            ):
                assert response.status == 429
                assert codec.decode_json(await response.read(), ErrorBody).reason == reasons.FULL
        assert bodies.taken == 0
        assert await client.submit(group(tickets[0])) is True
        assert await client.submit(group(tickets[0])) is False
        assert bodies.taken == 0


async def test_a_body_that_flows_for_ever_is_refused() -> None:
    async with door(body_s=0.02, body_bytes=1, whole_body_s=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", Content_Length="60000"))
        answered = asyncio.create_task(reader.readline())
        while not answered.done():
            writer.write(b" " * 50)
            await asyncio.wait([answered], timeout=0.005)
        assert b" 408 " in answered.result()
        writer.close()


async def test_groups_are_judged_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    read = validation.read

    def watched(*arguments: Any) -> validation.Arrival:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        sleep(0.02)
        at_once -= 1
        return read(*arguments)

    monkeypatch.setattr(validation, "read", watched)
    async with serving(config()) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        tickets = (await client.tickets(TicketRequest("w", 4, wait_s=0.0))).tickets
        assert await asyncio.gather(*(client.submit(group(ticket)) for ticket in tickets)) == [True] * len(tickets)
    assert len(tickets) > 1
    assert most == 1


@pytest.mark.parametrize("split", [20, -1], ids=["in its head", "in its body"])
def test_a_request_that_came_while_the_process_was_stopped_is_answered(split: int) -> None:
    """Time-outs are called before what has come is read."""
    uvloop = pytest.importorskip("uvloop")
    whole, (ours, theirs) = post(), multiprocessing.Pipe()

    async def serve() -> None:
        async with door(head_s=0.5, body_s=0.5) as port:
            theirs.send(port)
            await asyncio.sleep(60)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    try:
        port = ours.recv()
        with socket.create_connection(("127.0.0.1", port), 30.0) as client:
            client.sendall(whole[:split])
            asyncio.run(healthz(port))  # so that the first part has been read
            os.kill(process.pid or 0, signal.SIGSTOP)
            client.sendall(whole[split:])
            sleep(2.0)
            os.kill(process.pid or 0, signal.SIGCONT)
            assert b" 422 " in client.recv(65536)
    finally:
        process.kill()
        process.join()


async def test_i8_a_client_that_never_reads_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that hangs would keep its place, though it counts no longer as one that is open."""
    made, enter = list[Connection](), Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        made.append(self)
        enter(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with door(unread_s=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STATUS)
        await reader.readline()
        made[0].pause_writing()
        made[0].resume_writing()
        await asyncio.sleep(0.6)
        assert not made[0].transport.is_closing()
        made[0].pause_writing()
        await until(lambda: made[0].transport.is_closing())
        writer.close()
