"""Gives requests their servers: waits until one may be used, ends the requests on one that leaves, avoids one that
fails.

Each request runs inside `ServerPool.request`. When a server stops serving, its requests end at once. A server that
still answers is asked to abort them, so that it returns the tokens so far; tokens that it does not return are sampled
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slipstream.protocol import reasons
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.versions import describe_label
from slipstream.rollout_worker.inference.failures import (
    BadSample,
    Breaker,
    Doubtful,
    EpisodeFailed,
    RequestRejected,
    ServerFailed,
    ServerLeft,
    ServerUnfit,
)
from slipstream.rollout_worker.inference.router import Affinity, Leave, Left, Router

logger = logging.getLogger(__name__)

ReportServer = Callable[[Server], Awaitable[None]]
Abort = Callable[[str, Sequence[str]], Awaitable[None]]

# Seconds that a server that left has to answer with the tokens so far.
ABORT_GRACE_S = 5.0


class Request:
    """A request that runs on `server`. Set `id` when it is sent: the server aborts it by this id."""

    def __init__(self, server: Server, tokens: int, limit: asyncio.Timeout, trial: bool) -> None:
        self.server = server
        self.id: str | None = None
        self.limit = limit
        self.tokens = tokens
        self.trial = trial
        self.why = ""


class ServerPool:
    """The servers that requests may use. `run` has to run meanwhile.

    Args:
        report: Tells the queue a server's new state.
        abort: Asks the server at a URL to abort requests by id.
        notify: Takes a server's name and a text for people.
        ask: Has the registry fetched soon.
        later: Calls back after a number of seconds.
        clock: Seconds, monotonic.

    Attributes:
        waiting: Number of episodes that wait for a server.
        run_id: Id of this run, with which the labels of its weights begin.
        fleet: Names the state of the registry that was taken in last.
    """

    def __init__(
        self,
        report: ReportServer,
        abort: Abort | None = None,
        notify: Callable[[str, str], None] = lambda name, text: None,
        ask: Callable[[], None] = lambda: None,
        later: Callable[[float, Callable[[], None]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        abort_grace_s: float = ABORT_GRACE_S,
    ) -> None:
        self.waiting = 0
        self.run_id = self.fleet = ""
        self._router = Router()
        self._breakers: defaultdict[str, Breaker] = defaultdict(Breaker)
        self._requests: defaultdict[str, set[Request]] = defaultdict(set)
        self._to_abort: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()
        self._news = asyncio.Event()
        self._report = report
        self._abort = abort
        self._notify = notify
        self._ask = ask
        self._later = later
        self._clock = clock
        self._abort_grace_s = abort_grace_s

    @property
    def serving(self) -> bool:
        """Whether a request could go to any server now."""
        return any(self._admits(name) for name in self._router.serving)

    @property
    def known(self) -> list[str]:
        """Names of the servers that serve by the registry; some may get no requests for a while."""
        return self._router.serving

    @property
    def draining(self) -> dict[str, int]:
        """Number of running requests on each draining server."""
        return {name: len(self._requests[name]) for name in sorted(self._router.draining)}

    @property
    def tick(self) -> int:
        """Number of updates of the registry so far, which an `Affinity` is born at."""
        return self._router.tick

    @property
    def newest_version(self) -> int:
        """The newest version that the registry has named for any server; 0 before the first."""
        return self._router.newest_version

    async def wait_serving(self) -> None:
        while not self.serving:
            await self._news.wait()

    async def run(self) -> None:
        """Ask servers to abort requests. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                url, ids = await self._to_abort.get()
                tasks.create_task(self._aborted(url, ids))

    def update(self, servers: Iterable[Server], run_id: str = "", fleet: str = "") -> None:
        """Take in the registry from a reply of the queue; `fleet` names its state."""
        self.run_id, self.fleet = run_id, fleet
        known = self._router.draining
        for left in self._router.update(servers):
            if left.how is not Leave.FINISH:
                self._end_requests(left)
        if self._router.draining - known:
            self._ask()  # the queue waits for the number of requests there
        self._tell_waiting()

    def others(self, name: str | None) -> bool:
        """Return whether a request could go to another server now."""
        return any(other != name and self._admits(other) for other in self._router.serving)

    def lone(self, name: str) -> bool:
        """Return whether the registry lists no other serving server, not even one that gets no requests now."""
        return all(other == name for other in self._router.serving)

    def blame(self, refusal: RequestRejected) -> None:
        """Count a refusal as the server's failure, because another server took the request; once for each refusal."""
        if refusal.server is not None and not refusal.blamed:
            refusal.blamed = True
            self._failed(refusal.server, self._breakers[refusal.server.name], False, refusal)

    @asynccontextmanager
    async def request(
        self, affinities: Sequence[Affinity], prompt: int, expected: int, avoid: str | None = None
    ) -> AsyncIterator[Request]:
        """Choose a server for a request of all the affinities, which runs inside. Waits while none may be used.

        Args:
            prompt: Tokens of the prompt.
            expected: Expected tokens of each continuation.
            avoid: A server that is used only if there is no other.

        Raises:
            ServerLeft: The server left meanwhile.
            EpisodeFailed: No server's tokens would be trained on.
        """
        tokens = prompt + expected * len(affinities)
        server = await self._place(affinities, tokens, avoid)
        breaker = self._breakers[server.name]
        request = Request(server, tokens, asyncio.timeout(None), breaker.began())
        self._router.begin(server.name, tokens)
        self._requests[server.name].add(request)
        try:
            async with request.limit:
                yield request
        except TimeoutError:
            raise ServerLeft(f"{server.name} at {server.url} left: {request.why}") from None
        except ServerFailed as error:
            self._failed(server, breaker, request.trial, error)
            raise
        except Doubtful as error:
            error.server = server
            self._doubted(request, breaker, error)
            raise
        except BaseException:
            breaker.undecided(request.trial)
            self._tell_waiting()
            raise
        else:
            self._answered(breaker)
        finally:
            self._requests[server.name].discard(request)
            self._router.end(server.name, request.tokens)
            if server.name in self._router.draining and not self._requests[server.name]:
                self._ask()

    def shed(self, request: Request, tokens: int) -> None:
        """Remove the tokens of a finished continuation from those in flight."""
        self._router.end(request.server.name, tokens)
        request.tokens -= tokens

    def release(self, affinities: Sequence[Affinity]) -> None:
        self._router.release(affinities)

    def saw_version(self, name: str, version: int) -> None:
        self._router.saw_version(name, version)

    def check_proven(self, affinity: Affinity) -> None:
        """Raise `EpisodeFailed` if the episode has tokens that the queue will not take (I5)."""
        if (name := self._router.tainted(affinity)) is not None:
            what = "weights that failed their proof or left service before it"
            detail = f"server {name} sampled some of its tokens with {what}"
            raise EpisodeFailed(reasons.UNVERIFIED_SERVER, detail, retryable=True)

    async def distrust(self, name: str, label: str) -> None:
        """Stop using a server that samples from weights labelled `label`, which is no version of this run, and tell the
        queue."""
        server = self._router.distrust(name)
        if server is None:
            return
        reason = f"sampled from {describe_label(label, self.run_id)}"
        self._end_requests(Left(server, Leave.CUT, f"it {reason}"))
        self._tell_waiting()
        logger.warning("%s %s: it is not used until it is proven again", name, reason)
        await self._report(Server(name, server.url, ServerState.JOINING, None, reason))

    async def _place(self, affinities: Sequence[Affinity], tokens: int, avoid: str | None) -> Server:
        began = None
        while True:
            if self._router.barred(affinities):
                detail = "the servers were proven again at the version that had failed; only new tickets may use them"
                raise EpisodeFailed(reasons.UNVERIFIED_SERVER, detail, retryable=True)
            server = self._router.place(affinities, tokens, avoid, self._admits)
            if server is not None:
                break
            began = self._clock() if began is None else began
            self.waiting += len(affinities)
            try:
                await self._news.wait()
            finally:
                self.waiting -= len(affinities)
        if began is not None:
            for affinity in affinities:
                affinity.waited_s += self._clock() - began
        return server

    def _admits(self, name: str) -> bool:
        return name not in self._breakers or self._breakers[name].admits

    def _answered(self, breaker: Breaker) -> None:
        if breaker.failures:
            breaker.succeeded()
            self._tell_waiting()

    def _doubted(self, request: Request, breaker: Breaker, error: Doubtful) -> None:
        """A lone server that refuses works, for all one can tell. Where there are others, a refusal is its failure once
        another has taken the request; at once on trial, and while no other may be asked."""
        name = request.server.name
        if isinstance(error, BadSample) or (not self.lone(name) and (request.trial or not self.others(name))):
            if isinstance(error, RequestRejected):
                error.blamed = True
            self._failed(request.server, breaker, request.trial, error)
        elif self.lone(name):
            self._answered(breaker)

    def _failed(self, server: Server, breaker: Breaker, trial: bool, error: ServerFailed | Doubtful) -> None:
        """Count a failure. After several in a row the server gets no requests for a while."""
        name = server.name
        pause_s = breaker.failed(isinstance(error, ServerUnfit), trial)
        if pause_s is None:
            return
        self._notify(
            name,
            f"server {name} at {server.url} was left alone for {pause_s:g} s and longer, after "
            f"{breaker.failures} failures in a row; the last: {error}",
        )
        later = self._later or asyncio.get_running_loop().call_later
        later(pause_s, lambda: self._pause_over(breaker))
        self._ask()

    def _pause_over(self, breaker: Breaker) -> None:
        breaker.pause_over()
        self._tell_waiting()

    def _end_requests(self, left: Left) -> None:
        """End the requests on a server that left. A server that comes back under its name starts without failures."""
        name = left.server.name
        self._breakers.pop(name, None)
        running = [request for request in self._requests[name] if not request.limit.expired()]
        if not running:
            return
        logger.warning("%s left: %s; %d requests continue elsewhere", name, left.why, len(running))
        grace_s = 0.0
        if left.how is Leave.ABORT and self._abort is not None:
            grace_s = self._abort_grace_s
            ids = [request.id for request in running if request.id is not None]
            self._to_abort.put_nowait((left.server.url, ids))
        for request in running:
            request.why = left.why
            request.limit.reschedule(asyncio.get_running_loop().time() + grace_s)

    async def _aborted(self, url: str, ids: Sequence[str]) -> None:
        assert self._abort is not None
        try:
            await self._abort(url, ids)
        except (ServerFailed, RequestRejected) as error:
            logger.warning("%d requests are sampled again, not continued: %s", len(ids), error)

    def _tell_waiting(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
