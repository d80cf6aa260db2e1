"""The client of the queue, used by worker, learner, weight sync and command line.

A call that cannot reach the queue, or gets a 5xx, is retried with growing pauses for `patience_s`, besides a
long-poll's own wait: so the queue can be killed and restarted during a run. Every route is safe to repeat. A refusal
(4xx) is never retried but raised as `QueueRefused` with its reason; only a full queue is waited for, for
`FULL_PATIENCE_S`. Errors name the URL that was asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from slipstream.protocol import access, codec, reasons, tracing
from slipstream.protocol.addresses import CHECK_EVERY_S, Moved, QueueUrls
from slipstream.protocol.messages import (
    BeginSession,
    Checkpointed,
    ErrorBody,
    FinishRun,
    Group,
    LeaseAck,
    LeaseRenewal,
    LeaseRenewed,
    LeaseReply,
    LeaseRequest,
    PolicyCommand,
    RunPosition,
    Server,
    ServerChange,
    TicketFailure,
    TicketReply,
    TicketRequest,
    Waiting,
    WorkerReply,
    WorkerReport,
)
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Evaluation, EvaluationRequest, Status


def connection_failure(error: BaseException) -> str:
    """Describe an error of aiohttp's client; never empty."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return of_host(error.host, error.os_error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def of_host(host: str, error: BaseException) -> str:
    """Describe a failed lookup of a host name, whose error numbers are not those of `os.strerror`."""
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return f"host name {host} cannot be looked up now: {error.strerror}"
    return f"host name {host} is not known"


T = TypeVar("T")

logger = logging.getLogger(__name__)

MSGPACK = "application/msgpack"

JSON = "application/json"

_ALONE = wait_random_exponential(multiplier=0.2, max=5.0)
_AMONG_SEVERAL = wait_random_exponential(multiplier=0.1, max=1.0)

# Answers of a web server that knows no POST: neither of a queue nor of a proxy before a queue that restarts.
_NO_QUEUES = (501, 505)

# Answers of a proxy that knows no way to its queue for a while. One of our own queue has a reason.
_OF_A_PROXY = (403, 404, 408, 425)

# Answers of a queue that is not the active one, or cannot be, and of a proxy before one that is away: another is asked.
_ASK_ANOTHER = (reasons.STANDS_BY, reasons.STORE_FAILED, reasons.NOT_READY, *map(reasons.http, (502, 503, 504)))

# Nothing leaves the queue while a learner writes a checkpoint or evaluates.
FULL_PATIENCE_S = 900.0


_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0
_MAX_DOUBLINGS = 10


def retry_pause_s(pauses: int) -> float:
    """Return the seconds of the next pause after `pauses` earlier ones: 0.25, doubled each time, at most 10."""
    return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(pauses, _MAX_DOUBLINGS))


class QueueError(RuntimeError):
    """The queue did not do what was asked."""


class QueueRefused(QueueError):
    """The queue refused a request (4xx). `reason` is its code; `retry_after_s` is set with 429."""

    def __init__(self, status: int, problem: ErrorBody, retry_after_s: float | None = None, url: str = "") -> None:
        asked = f" [{url}]" if url else ""
        # A person reads these reasons, and did not ask for the request's URL.
        alone = problem.reason in (reasons.FINGERPRINT, reasons.SESSION_AWAITED)
        super().__init__(problem.message if alone else f"{problem.message} ({problem.reason}){asked}")
        self.status = status
        self.reason = problem.reason
        self.retry_after_s = retry_after_s


class RunFinished(QueueError):
    """The run is finished: there are no more tickets."""


class GaveUp(QueueError):
    """The queue gave the run up because its first groups all failed; the text is the queue's."""


class Unreachable(QueueError):
    """The queue did not answer within the caller's patience."""


class _Transient(Exception):
    """A failure that may pass: no connection, a time-out or a 5xx. `retry_after_s`: when the queue wants to be asked
    again; `reason`: the queue's code, "" without an answer of one."""

    def __init__(self, message: str, retry_after_s: float | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class QueueClient:
    """Async client of one queue. Use it as a context manager, on one event loop.

    Args:
        url: URL of the queue; or of several on one database, separated by commas. Of these the active one is asked.
        token: Sent as bearer token.
        patience_s: How long a call is retried, seconds; without any, each URL is asked once.
        timeout_s: Time-out of one try, besides a long-poll's own wait, seconds.
        said_by: Names the source of the URL, for the error if there is no queue.

    Attributes:
        retries: Number of tries after the first of each call.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        patience_s: float = 300.0,
        timeout_s: float = 30.0,
        said_by: str = "queue.url, queue.host and queue.port of its run file, or --queue, say",
    ) -> None:
        try:
            self._urls = QueueUrls(url)
        except ValueError as error:
            raise QueueError(str(error)) from None
        self.patience_s = patience_s
        self.timeout_s = timeout_s
        self.retries = 0
        self._said_by = said_by
        self._absent = self._was_understood = False
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the queue that is asked."""
        return self._urls.current

    async def __aenter__(self) -> Self:
        # The queue closes idle connections after 75 s. Ours close first, so that none breaks in use.
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        )
        if self._urls.are_several:
            self._watch = asyncio.create_task(self._urls.watch(self._is_active))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()

    async def tickets(self, request: TicketRequest) -> TicketReply:
        """Wait up to `request.wait_s` for tickets; an empty reply means none yet. Raises `RunFinished`, `GaveUp`."""
        try:
            return await self._read(_tickets, TicketReply, "POST", access.TICKETS, request, request.wait_s)
        except QueueRefused as refusal:
            if refusal.reason == reasons.RUN_FINISHED:
                raise RunFinished(str(refusal)) from None
            raise

    async def fail_ticket(self, ticket_id: str, failure: TicketFailure) -> None:
        await self.call("POST", access.TICKET_FAIL_OF.format(id=ticket_id), failure)

    async def heartbeat(self, report: WorkerReport) -> WorkerReply:
        return await self._ask(WorkerReply, "POST", access.WORKER_OF.format(id=report.worker_id), report)

    async def sign_off(self, worker_id: str) -> None:
        """Sign off a worker that ends and has no request on any server."""
        await self.call("DELETE", access.WORKER_OF.format(id=quote(worker_id, safe="")))

    async def submit(self, group: Group) -> bool:
        """Submit a group. While the queue is full, wait and try again for max(`patience_s`, `FULL_PATIENCE_S`).

        Returns:
            True if the group is new, False if the queue had it already.

        Raises:
            QueueRefused: 410, the ticket or the run has ended; 413, too large; 422, the group breaks a rule.
            QueueError: The queue stayed full.
        """
        data = codec.encode(group)
        path = access.GROUP_OF.format(id=group.ticket_id)
        patience_s = max(self.patience_s, FULL_PATIENCE_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return await self.call("PUT", path, data) == b"new"
            except QueueRefused as refusal:
                if refusal.status != 429:
                    raise
                pause_s = refusal.retry_after_s or 1.0
                if time.monotonic() + pause_s > deadline:
                    raise QueueError(
                        f"the queue has had no room for group {group.ticket_id} for {patience_s:.0f} s: {refusal}; "
                        f"does the learner still make steps? See `slipstream status`"
                    ) from refusal
                await asyncio.sleep(pause_s)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Wait up to `request.wait_s` for groups. The reply may hold none."""
        return await self._read(codec.decode, LeaseReply, "POST", access.LEASES, request, request.wait_s)

    async def ack(self, lease_id: str, ack: LeaseAck) -> RunPosition:
        return await self._ask(RunPosition, "POST", access.LEASE_ACK_OF.format(id=lease_id), ack)

    async def renew(self, lease_id: str, session: int, have: Sequence[str] = ()) -> dict[str, str]:
        """Renew a lease. Returns which of the groups in `have` must not be trained, each with its reason."""
        path = access.LEASE_RENEW_OF.format(id=lease_id)
        return (await self._ask(LeaseRenewed, "POST", path, LeaseRenewal(session, list(have)))).revoked

    async def release(self, lease_id: str, session: int) -> None:
        """Return a lease's groups untrained."""
        await self.call("POST", access.LEASE_RELEASE_OF.format(id=lease_id), LeaseRenewal(session))

    async def position(self) -> RunPosition:
        return await self._ask(RunPosition, "GET", access.POLICY)

    async def begin_session(self, begin: BeginSession) -> RunPosition:
        return await self._command(begin)

    async def checkpointed(self, session: int, step: int) -> RunPosition:
        return await self._command(Checkpointed(session, step))

    async def waiting(self, session: int, what: str | None) -> RunPosition:
        return await self._command(Waiting(session, what))

    async def servers(self) -> list[Server]:
        return await self._ask(list[Server], "GET", access.SERVERS)

    async def put_server(self, server: Server, session: int | None = None) -> Server:
        """Register a server or change its state. Raises `QueueRefused` (409) for a change that is not allowed.

        Without the learner's session a server can only be registered as joining or reported as down.
        """
        path = access.SERVER_OF.format(name=server.name)
        return await self._ask(Server, "PUT", path, ServerChange(server, session))

    async def remove_server(self, name: str, now: bool = False) -> list[Server]:
        """Let a server drain, or remove it `now`. Returns the servers that are registered then.

        One that has left before is no error. Raises `QueueRefused` for one that never was registered.
        """
        path = access.SERVER_OF.format(name=quote(name, safe=""))
        return await self._ask(list[Server], "DELETE", f"{path}?now=true" if now else path)

    async def status(self) -> Status:
        return await self._ask(Status, "GET", access.STATUS)

    async def evaluate(self, request: EvaluationRequest) -> list[Evaluation]:
        """Ask for an evaluation. Returns all that the queue knows, in the order of their requests."""
        return await self._ask(list[Evaluation], "POST", access.EVALUATIONS, request)

    async def evaluations(self, wait_s: float = 0.0) -> list[Evaluation]:
        """Return all evaluations that the queue knows. While one is open, wait up to `wait_s` for one to end."""
        path = f"{access.EVALUATIONS}?wait_s={wait_s:g}"
        return await self._read(codec.decode_json, list[Evaluation], "GET", path, wait_s=wait_s)

    async def rollouts(self, limit: int, worst: bool = False, evals: bool = False) -> list[RolloutView]:
        """Return at most `limit` recent rollouts, newest first, or lowest reward first if `worst`.

        `evals`: those of evaluations instead of training.
        """
        asked = f"limit={limit}&worst={str(worst).lower()}&eval={str(evals).lower()}"
        return await self._ask(list[RolloutView], "GET", f"{access.ROLLOUTS}?{asked}")

    async def finish(self, session: int) -> None:
        await self.call("POST", access.FINISH, FinishRun(session))

    async def _command(self, command: PolicyCommand) -> RunPosition:
        return await self._ask(RunPosition, "POST", access.POLICY, command)

    async def _ask(self, kind: type[T], method: str, path: str, message: msgspec.Struct | None = None) -> T:
        return await self._read(codec.decode_json, kind, method, path, message)

    async def _read(
        self,
        decode: Callable[[bytes, type[T]], T],
        kind: type[T],
        method: str,
        path: str,
        message: msgspec.Struct | None = None,
        wait_s: float = 0.0,
    ) -> T:
        """Send one request as `call` does, and return the answer as a `kind`.

        An answer that is none is what no queue has said, where an earlier one was: something between cut or padded it.
        It is asked for again, as one that did not come.
        """

        def read(body: bytes) -> T:
            try:
                answer = decode(body, kind)
            except codec.DecodeError as error:
                text = f"{self.url}{path} answered with something that is {error}"
                if self._was_understood:
                    raise _Transient(f"{text}; is there a proxy that changes answers?") from error
                raise QueueError(f"{text}; is it a Slipstream queue of this version?") from error
            self._was_understood = True
            return answer

        return await self._try(read, method, path, message, wait_s)

    async def call(
        self, method: str, path: str, message: msgspec.Struct | bytes | None = None, wait_s: float = 0.0
    ) -> bytes:
        """Send one request, again while the queue is away, and return the body of the answer.

        Args:
            method: HTTP method.
            path: Path on the queue, with its query.
            message: Body: a message, or bytes as they are; None for none.
            wait_s: Seconds for which the queue may hold the request.

        Raises:
            QueueRefused: The queue refused it.
            Unreachable: The queue did not answer.
        """
        return await self._try(bytes, method, path, message, wait_s)

    async def _try(
        self,
        read: Callable[[bytes], T],
        method: str,
        path: str,
        message: msgspec.Struct | bytes | None,
        wait_s: float,
    ) -> T:
        data, headers = _body(message)
        headers |= tracing.headers()
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_Transient),
            wait=self._pause_s,
            stop=stop_after_delay(self.patience_s + wait_s) & stop_after_attempt(self._urls.count),
            before_sleep=self._say_absent,
        )
        try:
            async for attempt in attempts:
                with attempt:
                    if attempt.retry_state.attempt_number > 1:
                        self.retries += 1
                    answer = read(await self._once(method, path, data, headers, self.timeout_s + wait_s))
                    self._say_present()
                    return answer
        except RetryError as error:
            last = error.last_attempt.exception()
            waited = f" for {self.patience_s:.0f} s" if self.patience_s else ""
            if isinstance(last, _Transient) and last.reason == reasons.STANDS_BY:
                raise Unreachable(
                    f"no active queue at {self._urls}{waited} ({last}); give the active one's URL, or those of all, "
                    f"separated by commas: {self._said_by} where it is looked for"
                ) from None
            queues = (
                f"none of the queues at {self._urls} answered"
                if self._urls.are_several
                else (f"the queue at {self.url} did not answer")
            )
            raise Unreachable(
                f"{queues}{waited} ({last}); is it running, and is the URL right? {self._said_by} where it is looked "
                f"for"
            ) from None
        raise AssertionError("unreachable: the retry loop returns or raises")

    def _pause_s(self, call: RetryCallState) -> float:
        """Return the seconds before the next try: random and growing, or what the queue asked for."""
        error = call.outcome.exception() if call.outcome is not None else None
        asked_s = error.retry_after_s if isinstance(error, _Transient) else None
        pause_s = _AMONG_SEVERAL(call) if self._urls.are_several else _ALONE(call)
        return max(pause_s, min(asked_s or 0.0, _MAX_PAUSE_S))

    async def _is_active(self, url: str) -> bool:
        """Tell whether the queue at a URL answers as the active one."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=CHECK_EVERY_S)
        try:
            async with self._session.get(url + access.READY, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _say_absent(self, call: RetryCallState) -> None:
        """Log one line for each absence of the queue, since no wait is invisible (I7)."""
        if self.patience_s and not self._absent and call.outcome is not None:
            self._absent = True
            why = call.outcome.exception()
            logger.warning("waiting for the queue at %s, for up to %.0f s: %s", self.url, self.patience_s, why)

    def _say_present(self) -> None:
        if self._absent:
            self._absent = False
            logger.info("the queue at %s answers", self.url)

    async def _once(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("use the client as a context manager: async with QueueClient(...) as client")
        url = self.url
        asked = f"{method} {url}{path}"
        sending = self._send(self._session, method, url + path, data, headers, timeout_s)
        try:
            status, body, retry_after_s = await self._urls.unless_moved(url, sending)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._urls.failed(url)
            raise _Transient(f"{asked}: {connection_failure(error)}") from error
        except Moved:
            raise _Transient(f"{asked}: another queue is active now, at {self.url}") from None
        if status >= 500 and status not in _NO_QUEUES:
            why = _problem(status, body)
            if why.reason in _ASK_ANOTHER and self._urls.are_several:
                self._urls.failed(url)
                retry_after_s = None  # that was about this queue, and another one is asked next
            text = f": {why.message}" if reasons.is_ours(why.reason) else ""
            raise _Transient(f"{asked}: HTTP {status}{text}", retry_after_s, why.reason)
        if status >= 400:
            problem = _problem(status, body)
            if problem.reason == reasons.GAVE_UP:
                raise GaveUp(problem.message)
            if self._was_understood and status in _OF_A_PROXY and problem.reason == reasons.http(status):
                raise _Transient(f"{asked}: {problem.message}")
            raise QueueRefused(status, problem, retry_after_s, asked)
        return body

    @staticmethod
    async def _send(
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        data: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes, float | None]:
        """Return status, body and Retry-After of the answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
            return response.status, await response.read(), _retry_after(response)


def _body(message: msgspec.Struct | bytes | None) -> tuple[bytes | None, dict[str, str]]:
    if message is None:
        return None, {}
    if isinstance(message, bytes):
        return message, {"Content-Type": MSGPACK}
    return codec.encode_json(message), {"Content-Type": JSON}


def _tickets(body: bytes, kind: type[TicketReply]) -> TicketReply:
    """Read the answer to a request for tickets, which is empty where there are none yet."""
    return codec.decode_json(body, kind) if body else kind([], None)


def _problem(status: int, body: bytes) -> ErrorBody:
    try:
        return codec.decode_json(body, ErrorBody)  # type: ignore[no-any-return]
    except codec.DecodeError:
        answer = " ".join(body.decode("utf-8", "replace").split())[:200] or f"HTTP {status}"
        return ErrorBody(
            reasons.http(status),
            f"that is not a Slipstream queue, which would not answer {answer}: give the queue's URL",
        )


def _retry_after(response: Any) -> float | None:
    value = response.headers.get("Retry-After")
    try:
        return float(value) if value is not None else None
    except ValueError:
        return None
