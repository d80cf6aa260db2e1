"""The client outlives the queue's absence, within bounds, and never repeats what the queue refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from aiohttp import web

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import GaveUp, QueueClient, QueueError, QueueRefused, RunFinished, Unreachable
from slipstream.protocol.messages import (
    BeginSession,
    ErrorBody,
    FinishRun,
    Group,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    PolicyCommand,
    Rollout,
    RunPosition,
    Segment,
    Server,
    ServerChange,
    ServerState,
    Ticket,
    TicketFailure,
    TicketReply,
    TicketRequest,
    VersionSpan,
    WorkerReport,
)

POLICY = RunPosition(
    version=3, step=3, total_steps=9, session=1, checkpoint_step=None, served_version=3, finished=False
)
TICKETS = TicketReply([Ticket("t-1", 7, 8, 0, 3, 60.0)], [Server("vllm-0", "http://a:1", ServerState.SERVING, 3)])
BEGIN = BeginSession(2, 2, 9, resume=True)
SERVING = Server("vllm-0", "http://a:1", ServerState.SERVING, 3)
MAX_WAIT_S = 5.0  # far above what any call here may take, far below the defaults

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Call(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class FakeQueue:
    """Gives the scripted answers one after another, the last one for ever, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.calls: list[Call] = []
        self.asked = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(Call(request.method, request.path, dict(request.headers), await request.read()))
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@asynccontextmanager
async def running(*answers: Answer) -> AsyncIterator[FakeQueue]:
    queue = FakeQueue(*answers)
    await queue.start()
    try:
        yield queue
    finally:
        await queue.stop()


def says(message: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """Answers with a message in JSON, or with bytes as they are."""
    body = message if isinstance(message, bytes) else b"" if message is None else codec.encode_json(message)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return answer


async def drops(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Promises more bytes than it sends."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


def after(seconds: float, then: Answer) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await then(request)

    return answer


def a_group() -> Group:
    segment = Segment(
        np.array([5, 6], dtype=np.int32),
        np.ones(2, dtype=np.bool_),
        np.array([-0.5, -1.0], dtype=np.float32),
        [VersionSpan(3, 0, 2, 0)],
    )
    return Group("t-1", 7, 0, [Rollout([segment], 1.0, "stop")] * 2, "w", ["vllm-0"], 1.0, 2.0)


cut, padded = says(codec.encode_json(POLICY)[:20]), says(codec.encode_json(POLICY) + b"  }")


@pytest.mark.parametrize(
    "failure",
    [
        says(status=500),
        says(status=503),
        drops,
        breaks_off,
        says(b""),
        says(b"<html>"),
        says(b"<html>", 404),
        cut,
        padded,
    ],
    ids=["500", "503", "drop", "break", "empty", "page", "404", "cut", "padded"],
)
async def test_a_failure_that_passes_is_tried_again(failure: Answer) -> None:
    answers = says(POLICY), failure, failure, says(POLICY)
    async with running(*answers) as queue, QueueClient(queue.url, patience_s=10) as client:
        assert await client.position() == POLICY
        assert await client.position() == POLICY
        assert client.retries >= 1  # aiohttp itself repeats a GET once whose connection was dropped
        assert len(queue.calls) == 4


async def test_answers_that_something_between_spoils_for_good_end_with_the_patience() -> None:
    async with running(says(POLICY), cut) as queue, QueueClient(queue.url, patience_s=0.2) as client:
        await client.position()
        with pytest.raises(Unreachable, match=r"/v1/policy answered with.*truncated; is there a proxy"):
            await client.position()
        assert len(queue.calls) == client.retries + 2


async def test_a_repeated_submission_is_byte_for_byte_the_same() -> None:
    """the queue can tell a repetition by its key and its content."""
    async with running(drops, says(b"known")) as queue, QueueClient(queue.url, patience_s=10) as client:
        assert await client.submit(a_group()) is False
        first, second = queue.calls
        assert (first.method, first.path, first.body) == (second.method, second.path, second.body)


async def test_a_queue_that_is_not_there_is_unreachable_after_the_patience() -> None:
    async with running(says(POLICY)) as queue:
        url = queue.url
    started = perf_counter()
    async with QueueClient(url, patience_s=1.0) as client:
        with pytest.raises(Unreachable, match=f"the queue at {url} did not answer") as error:
            await client.position()
    assert "is it running, and is the URL right?" in str(error.value)
    assert f"GET {url}/v1/policy" in str(error.value)
    assert client.retries >= 1
    assert 1.0 <= perf_counter() - started < MAX_WAIT_S


async def test_i7_the_wait_for_an_absent_queue_is_logged_once_with_its_url(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slipstream.protocol.client")
    async with running(drops, drops, drops, says(POLICY)) as queue, QueueClient(queue.url, patience_s=10) as client:
        await client.position()
        await client.position()
    waiting, answers = (record.getMessage() for record in caplog.records)
    assert waiting.startswith(f"waiting for the queue at {queue.url}, for up to 10 s: GET {queue.url}/v1/policy: ")
    assert answers == f"the queue at {queue.url} answers"


async def test_without_patience_an_absent_queue_is_told_at_once_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(says(POLICY)) as queue:
        url = queue.url
    async with QueueClient(url, patience_s=0) as client:
        with pytest.raises(Unreachable, match=r"did not answer \("):
            await client.position()
    assert client.retries == 0
    assert not caplog.records


STANDS_BY = ErrorBody("stands_by", "this queue stands by: the active one is at http://other:8200")


@pytest.mark.parametrize("order", ["{0},{1}", "{1},{0}"])
async def test_without_patience_each_of_several_queues_is_asked_once(
    order: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(says(STANDS_BY, status=503)) as standby, running(says(POLICY)) as active:
        async with QueueClient(order.format(standby.url, active.url), patience_s=0) as client:
            assert await client.position() == POLICY
        async with QueueClient(f"{standby.url},{standby.url}", patience_s=0) as client:
            with pytest.raises(Unreachable, match=f"no active queue at {standby.url}, {standby.url} "):
                await client.position()
            assert client.retries == 1
    async with QueueClient(f"{active.url},{standby.url}", patience_s=0) as client:
        with pytest.raises(Unreachable, match=f"none of the queues at {active.url}, {standby.url} answered \\("):
            await client.position()
    assert not caplog.records


async def test_the_url_of_a_queue_that_stands_by_is_told_with_that_of_the_active_one() -> None:
    async with running(says(STANDS_BY, status=503)) as queue, QueueClient(queue.url, patience_s=0) as client:
        with pytest.raises(Unreachable, match=r"no active queue.* at http://other:8200\); give the active one's URL"):
            await client.position()


async def test_a_queue_that_goes_on_failing_is_unreachable_and_the_message_says_how_it_failed() -> None:
    async with running(says(status=500)) as queue, QueueClient(queue.url, patience_s=0.2) as client:
        with pytest.raises(Unreachable, match=f"GET {queue.url}/v1/policy: HTTP 500"):
            await client.position()
        assert len(queue.calls) == client.retries + 1


async def test_a_service_that_speaks_no_http_is_unreachable() -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01 220 ready\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(garble, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, QueueClient(f"http://{host}:{port}", patience_s=0.2) as client:
        with pytest.raises(Unreachable):
            await client.position()


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 413, 422, 429])
async def test_a_refusal_is_raised_with_its_reason_and_never_retried(status: int) -> None:
    refusal = says(ErrorBody("a_code", "lower x"), status=status)
    async with running(refusal) as queue, QueueClient(queue.url) as client:
        with pytest.raises(QueueRefused, match=r"lower x \(a_code\)") as error:
            await client.ack("lease", LeaseAck(1))
        assert (error.value.status, error.value.reason, error.value.retry_after_s) == (status, "a_code", None)
        assert len(queue.calls) == 1


@pytest.mark.parametrize(("body", "message"), [(b"<html>no", "<html>no"), (b"", "HTTP 404"), (b"\xff", "\ufffd")])
async def test_a_refusal_by_someone_else_than_a_queue_is_still_told(body: bytes, message: str) -> None:
    async with running(says(body, status=404)) as queue, QueueClient(queue.url) as client:
        with pytest.raises(QueueRefused) as error:
            await client.position()
        assert error.value.reason == "http_404"
        told = f"that is not a Slipstream queue, which would not answer {message}: give the queue's URL"
        assert str(error.value) == f"{told} (http_404) [GET {queue.url}/v1/policy]"


async def test_a_page_of_another_web_server_is_told_in_one_short_line() -> None:
    page = b"<!DOCTYPE HTML>\n<html>\n" + b"<p>Not Found</p>\n" * 100
    async with running(says(page, status=404)) as queue, QueueClient(queue.url) as client:
        with pytest.raises(QueueRefused) as error:
            await client.servers()
    told = str(error.value).partition(" answer ")[2].partition(": give the queue's URL")[0]
    assert told.startswith("<!DOCTYPE HTML> <html> <p>Not")
    assert len(told) == 200


async def test_a_web_server_that_knows_no_post_is_not_waited_for() -> None:
    """501: what Python's http.server says to a POST; a queue never does."""
    async with running(says(b"<html>Unsupported method", status=501)) as queue, QueueClient(queue.url) as client:
        async with asyncio.timeout(MAX_WAIT_S):
            with pytest.raises(QueueRefused, match=r"not a Slipstream queue.*Unsupported method"):
                await client.begin_session(BeginSession(0, 0, 1, resume=False))
        assert len(queue.calls) == 1


async def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **settings: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    async with QueueClient("http://nosuchhost:8200", patience_s=0) as client:
        with pytest.raises(Unreachable, match="host name nosuchhost is not known"):
            await client.servers()


async def test_a_full_queue_is_waited_for_as_long_as_it_says() -> None:
    full = says(ErrorBody("full", "the queue is full"), status=429, headers={"Retry-After": "0.15"})
    async with running(full, full, says(b"new", status=201)) as queue, QueueClient(queue.url) as client:
        started = perf_counter()
        assert await client.submit(a_group()) is True
        assert 0.3 <= perf_counter() - started < MAX_WAIT_S
        assert len(queue.calls) == 3
        assert client.retries == 0


@pytest.mark.parametrize("status", [410, 413, 422])
async def test_a_group_that_is_not_taken_is_not_submitted_again(status: int) -> None:
    async with (
        running(says(ErrorBody("code", "no"), status=status)) as queue,
        QueueClient(queue.url) as client,
    ):
        with pytest.raises(QueueRefused):
            await client.submit(a_group())
        assert len(queue.calls) == 1


async def test_a_queue_that_stays_full_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.protocol.client.FULL_PATIENCE_S", 0.2)
    full = says(ErrorBody("full", "the queue is full"), status=429, headers={"Retry-After": "0.05"})
    async with running(full) as queue, QueueClient(queue.url, patience_s=0.1) as client:
        with pytest.raises(QueueError, match=r"no room for group t-1 for 0 s: the queue is full.*slipstream status"):
            await client.submit(a_group())
        assert 2 <= len(queue.calls) <= 5


@pytest.mark.parametrize(("status", "reason"), [(410, reasons.TICKET_ENDED), (409, reasons.RUN_FINISHED)])
async def test_waiting_for_room_ends_with_the_ticket_or_the_run(status: int, reason: str) -> None:
    full = says(ErrorBody("full", "the queue is full"), status=429, headers={"Retry-After": "0.01"})
    over = says(ErrorBody(reason, "it is over"), status=status)
    async with running(full, full, over) as queue, QueueClient(queue.url) as client:
        with pytest.raises(QueueRefused, match="it is over"):
            await client.submit(a_group())
        assert len(queue.calls) == 3


@pytest.mark.parametrize(
    "call",
    [lambda client: client.submit(a_group()), lambda client: client.tickets(TicketRequest("w", 1, 0.0))],
    ids=["submit", "tickets"],
)
async def test_a_run_that_gave_up_is_told_in_the_queues_words(call: Callable[[QueueClient], Awaitable[Any]]) -> None:
    text = "the first 8 groups all failed: task.py, line 3: KeyError"
    async with running(says(ErrorBody(reasons.GAVE_UP, text), status=409)) as queue, QueueClient(queue.url) as client:
        with pytest.raises(GaveUp) as error:
            await call(client)
        assert str(error.value) == text
        assert len(queue.calls) == 1


@pytest.mark.parametrize("status", [403, 409])
async def test_a_fingerprint_that_differs_is_told_alone(status: int) -> None:
    differs = says(ErrorBody(reasons.FINGERPRINT, "the tokenizer differs: a, the run has b"), status=status)
    async with running(differs) as queue, QueueClient(queue.url) as client:
        with pytest.raises(QueueRefused) as error:
            await client.heartbeat(WorkerReport("w", []))
        assert str(error.value) == "the tokenizer differs: a, the run has b"
        with pytest.raises(QueueRefused, match="the tokenizer differs"):
            await client.tickets(TicketRequest("w", 1, 0.0))


async def test_no_tickets_yet_is_an_empty_reply() -> None:
    async with running(says(status=204)) as queue, QueueClient(queue.url) as client:
        assert await client.tickets(TicketRequest("w", 1, 0.0)) == TicketReply([], None)


async def test_a_finished_run_ends_the_tickets() -> None:
    finished = says(ErrorBody(reasons.RUN_FINISHED, "the run is over"), status=409)
    async with running(finished) as queue, QueueClient(queue.url) as client:
        with pytest.raises(RunFinished, match="the run is over"):
            await client.tickets(TicketRequest("w", 1, 0.0))
        assert len(queue.calls) == 1


@pytest.mark.parametrize(("token", "expected"), [("secret", "Bearer secret"), (None, None), ("", None)])
async def test_i8_the_token_goes_with_every_call(token: str | None, expected: str | None) -> None:
    async with running(says(POLICY), says(b"new")) as queue, QueueClient(queue.url, token) as client:
        await client.position()
        await client.submit(a_group())
        assert [call.headers.get("Authorization") for call in queue.calls] == [expected, expected]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.position(),
        lambda client: client.put_server(Server("vllm-0", "http://a:1")),
        lambda client: client.begin_session(BeginSession(0, 0, 9, resume=False)),
        lambda client: client.submit(a_group()),
        lambda client: client.tickets(TicketRequest("w", 1, wait_s=0.02)),
    ],
    ids=["policy", "put_server", "begin_session", "submit", "tickets"],
)
async def test_a_queue_that_hangs_holds_no_call_for_ever(call: Callable[[QueueClient], Awaitable[Any]]) -> None:
    async with running(hangs) as queue, QueueClient(queue.url, patience_s=0.1, timeout_s=0.06) as client:
        started = perf_counter()
        with pytest.raises(Unreachable, match="Timeout"):
            await call(client)
        assert perf_counter() - started < MAX_WAIT_S


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda client: client.position(), POLICY),
        (lambda client: client.put_server(SERVING), SERVING),
        (lambda client: client.begin_session(BEGIN), POLICY),
        (lambda client: client.submit(a_group()), b"new"),
        (lambda client: client.tickets(TicketRequest("w", 1, wait_s=0.02)), TICKETS),
    ],
    ids=["policy", "put_server", "begin_session", "submit", "tickets"],
)
async def test_a_call_that_hung_is_tried_again(call: Callable[[QueueClient], Awaitable[Any]], answer: Any) -> None:
    """With patience for any number of tries: in a short one a busy machine comes to none but the first."""
    async with running(hangs, says(answer)) as queue, QueueClient(queue.url, patience_s=60, timeout_s=0.1) as client:
        assert await call(client) == (True if answer == b"new" else answer)
        assert client.retries >= 1


async def test_a_long_poll_may_take_its_own_time_beyond_the_time_out_of_a_call() -> None:
    async with (
        running(after(0.3, says(TICKETS))) as queue,
        QueueClient(queue.url, patience_s=0.1, timeout_s=0.1) as client,
    ):
        assert await client.tickets(TicketRequest("w", 1, wait_s=5.0)) == TICKETS
        assert client.retries == 0


async def test_a_long_poll_that_breaks_late_still_has_the_whole_patience() -> None:
    async with (
        running(after(0.3, drops), says(TICKETS)) as queue,
        QueueClient(queue.url, patience_s=0.1) as client,
    ):
        assert await client.tickets(TicketRequest("w", 1, wait_s=5.0)) == TICKETS
        assert client.retries == 1


async def test_a_queue_restarted_in_the_middle_of_a_long_poll_is_found_again() -> None:
    async with running(hangs, says(TICKETS)) as queue, QueueClient(queue.url, patience_s=30) as client:
        poll = asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=30.0)))
        await queue.asked.wait()
        await queue.stop()
        done, _ = await asyncio.wait([poll], timeout=0.3)  # long enough to find the port closed
        assert not done
        await queue.start()
        assert await asyncio.wait_for(poll, MAX_WAIT_S * 2) == TICKETS
        assert client.retries >= 1


async def test_a_cancelled_call_ends_at_once() -> None:
    async with running(hangs) as queue, QueueClient(queue.url) as client:
        call = asyncio.create_task(client.position())
        await queue.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, MAX_WAIT_S)
        assert len(queue.calls) == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[1]"])
async def test_an_answer_that_makes_no_sense_is_told(body: bytes) -> None:
    async with running(says(body)) as queue, QueueClient(queue.url) as client:
        with pytest.raises(
            QueueError, match=r"/v1/policy answered with something that is not a RunPosition.*is it a Slipstream"
        ):
            await client.position()
        with pytest.raises(QueueError, match=r"/v1/leases answered with something that is not a LeaseReply"):
            await client.lease(LeaseRequest(1, "lease", 1))


@pytest.mark.parametrize("url", ["localhost:8200", "ftp://host", "http://", ""])
def test_something_that_is_no_url_is_told_at_once(url: str) -> None:
    with pytest.raises(QueueError, match="write it as http://host:port"):
        QueueClient(url)


async def test_a_client_that_was_not_entered_says_how_to_use_it() -> None:
    with pytest.raises(RuntimeError, match="async with QueueClient"):
        await QueueClient("http://127.0.0.1:1").position()


async def test_a_group_goes_as_msgpack_under_its_ticket_and_a_lease_brings_it_back() -> None:
    group = a_group()
    reply = LeaseReply("lease", [msgspec.Raw(codec.encode(group))], [4], 60.0)
    async with running(says(b"new"), says(codec.encode(reply))) as queue, QueueClient(queue.url) as client:
        await client.submit(group)
        received = await client.lease(LeaseRequest(1, "lease", 1, wait_s=0.0))
    put, lease = queue.calls
    assert (put.method, put.path, put.headers["Content-Type"]) == ("PUT", "/v1/groups/t-1", "application/msgpack")
    assert codec.decode(put.body, Group).rollouts[0].segments[0].token_ids.tolist() == [5, 6]
    assert (lease.method, lease.path, lease.headers["Content-Type"]) == ("POST", "/v1/leases", "application/json")
    assert bytes(received.groups[0]) == put.body


@pytest.mark.parametrize(
    ("call", "answer", "method", "path", "sent"),
    [
        (lambda c: c.position(), POLICY, "GET", "/v1/policy", None),
        (
            lambda c: c.begin_session(BeginSession(2, 2, 9, resume=True)),
            POLICY,
            "POST",
            "/v1/policy",
            BeginSession(2, 2, 9, resume=True),
        ),
        (lambda c: c.ack("l", LeaseAck(1, ["t"])), POLICY, "POST", "/v1/leases/l/ack", LeaseAck(1, ["t"])),
        (lambda c: c.servers(), TICKETS.servers, "GET", "/v1/servers", None),
        (
            lambda c: c.put_server(TICKETS.servers[0]),
            TICKETS.servers[0],
            "PUT",
            "/v1/servers/vllm-0",
            ServerChange(TICKETS.servers[0]),
        ),
        (
            lambda c: c.put_server(TICKETS.servers[0], session=3),
            TICKETS.servers[0],
            "PUT",
            "/v1/servers/vllm-0",
            ServerChange(TICKETS.servers[0], 3),
        ),
        (
            lambda c: c.fail_ticket("t", TicketFailure("w", "tool")),
            None,
            "POST",
            "/v1/tickets/t/fail",
            TicketFailure("w", "tool"),
        ),
        (lambda c: c.finish(3), None, "POST", "/v1/run/finish", FinishRun(3)),
    ],
    ids=["policy", "begin_session", "ack", "servers", "put_server", "prove_server", "fail_ticket", "finish"],
)
async def test_each_call_sends_its_message_to_its_route_and_reads_the_answer(
    call: Callable[[QueueClient], Awaitable[Any]], answer: Any, method: str, path: str, sent: msgspec.Struct | None
) -> None:
    async with running(says(answer)) as queue, QueueClient(queue.url + "/") as client:
        assert await call(client) == answer
    (made,) = queue.calls
    assert (made.method, made.path) == (method, path)
    if sent is None:
        assert made.body == b""
    else:
        kind = PolicyCommand if isinstance(sent, BeginSession) else type(sent)
        assert codec.decode_json(made.body, kind) == sent


async def test_a_heartbeat_names_the_worker_in_its_path() -> None:
    reply = codec.decode_json(b'{"lost_tickets": ["t-1"], "servers": [], "finished": true}', Any)
    async with running(says(reply)) as queue, QueueClient(queue.url) as client:
        answer = await client.heartbeat(WorkerReport("host-1", ["t-1"]))
    assert (answer.lost_tickets, answer.finished) == (["t-1"], True)
    assert queue.calls[0].path == "/v1/workers/host-1"


def problem(reason: str, status: int = 503) -> Answer:
    return says(ErrorBody(reason, "not now"), status, {"Retry-After": "0.5"})


@pytest.mark.parametrize(
    ("answer", "leaves"),
    [
        (problem(reasons.STANDS_BY), True),
        (problem(reasons.STORE_FAILED), True),
        (problem(reasons.NOT_READY), True),
        (breaks_off, True),
        (says(b"Bad Gateway", 502), True),
        (says(b"no server is up", 503), True),
        (problem(reasons.BUSY), False),
        (problem(reasons.http(500), 500), False),
        (says(b"Internal Server Error", 500), False),
    ],
)
async def test_of_several_queues_one_that_is_not_active_is_left_and_an_active_one_that_fails_is_asked_again(
    answer: Answer, leaves: bool
) -> None:
    async with running(answer, says(POLICY)) as first, running(says(POLICY)) as second:
        async with (
            QueueClient(f"{first.url},{second.url}", patience_s=MAX_WAIT_S) as client,
            asyncio.timeout(MAX_WAIT_S),
        ):
            assert await client.position() == POLICY
            assert client.url == (second.url if leaves else first.url)
        asked = [sum(call.path == access.POLICY for call in queue.calls) for queue in (first, second)]
        assert asked == ([1, 1] if leaves else [2, 0])


async def test_a_call_under_way_goes_on_while_another_call_finds_its_connection_broken() -> None:
    """A single connection may break next to a queue that is active as before."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    broken = [breaks_off]

    async def answers(request: web.Request) -> web.StreamResponse:
        if request.path == access.STATUS:
            asked.set()
            await go_on.wait()
        elif request.path == access.POLICY and broken:
            return await broken.pop()(request)
        return await says(POLICY)(request)

    async with (
        asyncio.timeout(MAX_WAIT_S),
        running(answers) as first,
        running(says(STANDS_BY, status=503)) as second,
        QueueClient(f"{first.url},{second.url}") as client,
    ):
        long_poll = asyncio.create_task(client.call("GET", access.STATUS))
        await asked.wait()
        assert await client.position() == POLICY
        go_on.set()
        await long_poll
        assert len([call for call in first.calls if call.path == access.STATUS]) == 1


async def test_calls_under_way_go_to_the_queue_that_becomes_active_while_another_hangs() -> None:
    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async with (
        asyncio.timeout(MAX_WAIT_S),
        running(hangs) as first,
        running(says(POLICY)) as second,
        QueueClient(f"{first.url},{second.url}", timeout_s=60.0) as client,
    ):
        assert await client.position() == POLICY
        assert client.url == second.url
