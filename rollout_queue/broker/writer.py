"""Makes the calls of the store beside the event loop, and commits decisions in groups.

Decisions go into the store in the order in which they were made, all that have come at a time in one commit. Once a
call has failed every later one is refused, so that memory and store never differ in what anyone was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from protocol import reasons
from rollout_queue.ledger.records import Decision, Refusal
from rollout_queue.store.base import Store, StoreError
from rollout_queue.store.changes import Changes, Payload

P = ParamSpec("P")
T = TypeVar("T")


class Commit:
    """Decisions that go into the store together. Await it before anyone is told of them; raises `Refusal`."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.payloads: dict[str, Payload] = {}
        self._ended = asyncio.Event()
        self._refusal: Refusal | None = None

    def end(self, refusal: Refusal | None = None) -> None:
        """Wake all who wait. `refusal`: why the decisions may not be in the store; None if they are."""
        self._refusal = refusal
        self._ended.set()

    def __await__(self) -> Generator[object, None, None]:
        if not self._ended.is_set():
            yield from self._ended.wait().__await__()
        if self._refusal is not None:
            raise self._refusal


class Writer:
    """The store of a running queue.

    Args:
        store: Its calls are made one at a time: in a thread where they block, else at once.
        failed: Told why the store failed, once.
        committed: Told the seconds and the number of decisions of each commit.

    Attributes:
        failure: What every call is refused with once one has failed.
        nothing: A commit of no decisions, which has ended.
    """

    def __init__(
        self, store: Store, failed: Callable[[StoreError], None], committed: Callable[[float, int], None]
    ) -> None:
        self.failure: Refusal | None = None
        self._store = store
        self._failed = failed
        self._committed = committed
        self._pruned_below = 0
        self._committed_at = time.monotonic()
        self.nothing = self._last = Commit()
        self.nothing.end()
        self._next = Commit()
        self._wanted = asyncio.Event()
        self._under_way: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store") if store.blocks else None

    def begin(self, pruned_below: int) -> None:
        """Note `RunState.pruned_below` of what was loaded."""
        self._pruned_below = pruned_below
        self._committed_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the newest successful commit began. Those in which the process was stopped count."""
        return time.monotonic() - self._committed_at

    def add(self, decision: Decision, payloads: Mapping[str, Payload]) -> Commit:
        """Let a decision be written. Return what to wait for.

        Raises:
            Refusal: STORE_FAILED.
        """
        if self.failure is not None:
            raise self.failure
        commit = self._last = self._next
        commit.decisions.append(decision)
        commit.payloads.update(payloads)
        if self._thread is None:
            self._next = Commit()
            try:
                self._write(commit)
            except BaseException as error:
                raise self.fail(error) from error
            commit.end()
        else:
            self._wanted.set()
        return commit

    async def run(self) -> None:
        """Write until cancelled, or until the store fails."""
        while self.failure is None:
            await self._wanted.wait()
            self._wanted.clear()
            commit, self._next = self._next, Commit()
            try:
                await self.call(self._write, commit)
            except Refusal as refusal:
                commit.end(refusal)
                self._next.end(refusal)
            else:
                commit.end()

    async def flushed(self) -> None:
        """Wait until everything that was added is in the store."""
        await self._last

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store, after everything that was added is in it."""
        await self.flushed()
        return await self.call(function, *args, **kwargs)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store.

        Raises:
            Refusal: STORE_FAILED, now and whenever one failed before.
        """
        if self.failure is not None:
            raise self.failure
        try:
            if self._thread is None:
                return function(*args, **kwargs)
            self._under_way = self._thread.submit(function, *args, **kwargs)
            return await asyncio.wrap_future(self._under_way)
        except asyncio.CancelledError:
            raise  # the call goes on in its thread
        except BaseException as error:
            raise self.fail(error) from error

    def close(self, before: Callable[[], None] = lambda: None) -> None:
        """Close the store once its calls have ended, and `before` was called where they are made.

        A call that is still under way is not waited for longer than it takes to give up.
        """

        def end() -> None:
            before()
            self._store.close()

        if self._thread is None:
            end()
        else:
            if self._under_way is not None and not self._under_way.done():
                self._store.give_up()
            self._thread.submit(end)
            self._thread.shutdown()

    def _write(self, commit: Commit) -> None:
        at, began = time.monotonic(), time.perf_counter()
        changes = Changes.of(commit.decisions, commit.payloads, self._pruned_below)
        self._store.commit(changes)
        self._committed_at = at
        if changes.prune_below is not None:
            self._pruned_below = changes.prune_below
        self._committed(time.perf_counter() - began, len(commit.decisions))

    def fail(self, error: BaseException) -> Refusal:
        """Refuse everything from now on, since memory and store may differ. Returns what to raise."""
        if not isinstance(error, StoreError):
            error = StoreError(f"a change was not completed: {error!r}; start the queue again")
        if self.failure is None:
            self.failure = Refusal(reasons.STORE_FAILED, str(error))
            self._failed(error)
        return self.failure
