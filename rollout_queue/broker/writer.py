"""Makes the calls of the store next to the event loop, and commits decisions in groups.

Decisions go into the store in the order in which they were made, all that have come at a time in one commit. Once a
call has failed every later one is refused, so that memory and store never differ in what anyone was told. Another queue
may have taken the store over while this process did not run, so an answer that changes nothing waits for a commit too
if there was none for a while.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar, cast

from slipstream.protocol import reasons
from slipstream.rollout_queue.ledger.records import Decision, Refusal
from slipstream.rollout_queue.store.base import MAX_SILENCE_S, Store, StoreError
from slipstream.rollout_queue.store.changes import Changes, Payload

P = ParamSpec("P")
T = TypeVar("T")

_LAST_CALLS_S = 1.0

# A commit that takes less is made on the event loop, where the store can do it at once: handing it to the thread and
# back costs 0.25 ms of CPU. One that takes longer, as on a busy disk, sends the next to the thread, until they are
# brief again.
BRIEF_S = 0.002


class Commit:
    """Decisions that go into the store together. Await it before anyone is told of them; raises `Refusal`."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.payloads: dict[str, Payload] = {}
        self.changes: Changes | None = None
        self._ended = asyncio.Event()
        self._refusal: Refusal | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self, refusal: Refusal | None = None) -> None:
        """Wake all who wait. `refusal`: why the decisions may not be in the store; None if they are."""
        self._refusal = refusal
        self._ended.set()

    def __await__(self) -> Generator[object, None, None]:
        if not self.has_ended:
            yield from self._ended.wait().__await__()
        if self._refusal is not None:
            raise self._refusal


class _Thread:
    """Makes calls one at a time. It hands results back with less ado than an executor: four commits carry a group."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._submitted = 0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted is done, and its result handed back."""
        return not self._submitted

    def submit(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Make a call. `done` gets its result or its error, on the event loop that this is called on."""
        loop = asyncio.get_running_loop()

        def hand_back(result: T | None, error: BaseException | None) -> None:
            self._submitted -= 1
            done(result, error)

        def job() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(hand_back, result, error)

        self._submitted += 1
        self._jobs.put(job)

    def end(self, last: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Make a last call after all others, and wait for it; after a second, `give_up` has to end what still runs."""
        self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(_LAST_CALLS_S)
        if self._thread.is_alive():
            give_up()
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Writer:
    """The store of a running queue.

    Args:
        store: Its calls are made one at a time: in a thread where they block, else at once.
        failed: Told why the store failed, once.
        committed: Told the seconds and the number of decisions of each commit.

    Attributes:
        failure: What every call is refused with once one has failed.
    """

    def __init__(
        self, store: Store, failed: Callable[[StoreError], None], committed: Callable[[float, int], None]
    ) -> None:
        self.failure: Refusal | None = None
        self._store = store
        self._failed = failed
        self._committed = committed
        self._pruned_below = 0
        self._last = Commit()
        self._last.end()
        self._next = Commit()
        self._owned_at = time.monotonic()  # when the newest commit that the store took began
        self._is_writing = False
        self._seconds: dict[bool, float] = {}
        self._thread = _Thread() if store.blocks else None

    def begin(self, pruned_below: int) -> None:
        """Note `RunState.pruned_below` of what was loaded."""
        self._pruned_below = pruned_below
        self._owned_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the newest successful commit began. Those in which the process was stopped count."""
        return time.monotonic() - self._owned_at

    def add(self, decision: Decision, payloads: Mapping[str, Payload]) -> Commit:
        """Let a decision be written, with all others that come before the store is free. Return what to wait for.

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
                commit.end(refusal := self.fail(error))
                raise refusal from error
            commit.end()
        elif not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().call_soon(self._write_next, self._thread)
        return commit

    @property
    def newest(self) -> Commit:
        """The commit to await before anyone is told what memory shows: then the store has it and is this queue's.

        Raises:
            Refusal: STORE_FAILED.
        """
        if self._last.has_ended and self.silent_s > MAX_SILENCE_S:
            return self.add(Decision(), {})
        return self._last

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
        if self._thread is None:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                raise self.fail(error) from error
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | None, error: BaseException | None) -> None:
            refusal = self.fail(error) if error is not None else None
            if answer.done():  # cancelled meanwhile
                return
            if refusal is not None:
                answer.set_exception(refusal)
            else:
                answer.set_result(cast(T, result))

        self._thread.submit(lambda: function(*args, **kwargs), done)
        return await answer

    def close(self, before: Callable[[], None] = lambda: None) -> None:
        """Close the store once its calls have ended, and `before` was called where they are made.

        A call that is under way gets a second, then it has to give up.
        """

        def end() -> None:
            before()
            self._store.close()

        if self._thread is None:
            end()
        else:
            self._thread.end(end, self._store.give_up)

    def fail(self, error: BaseException) -> Refusal:
        """Refuse everything from now on, since memory and store may differ. Returns what to raise."""
        if not isinstance(error, StoreError):
            error = StoreError(f"a change was not completed: {error!r}; start the queue again")
        if self.failure is None:
            self.failure = Refusal(reasons.STORE_FAILED, str(error))
            self._failed(error)
        return self.failure

    def _write_next(self, thread: _Thread) -> None:
        commit, self._next = self._next, Commit()

        def done(_: bool | None, error: BaseException | None) -> None:
            if error is not None:
                refusal = self.fail(error)
                commit.end(refusal)
                self._next.end(refusal)
                return
            commit.end()
            if self._next.decisions:
                self._write_next(thread)
            else:
                self._is_writing = False

        try:
            is_written = thread.is_idle and self._will_be_brief(commit) and self._write(commit, at_once=True)
        except BaseException as error:
            done(None, error)
            return
        if is_written:
            done(None, None)
        else:
            thread.submit(lambda: self._write(commit), done)

    def _will_be_brief(self, commit: Commit) -> bool:
        """Whether the newest commit of its kind was brief: with a change of the run, which goes to the disk, or not."""
        return self._seconds.get(_changes_run(commit), 0.0) < BRIEF_S

    def _write(self, commit: Commit, at_once: bool = False) -> bool:
        """Write a commit. Return whether the store has taken it, as it always has where not `at_once`."""
        began, owned_at = time.perf_counter(), time.monotonic()
        if (changes := commit.changes) is None:
            changes = commit.changes = Changes.of(commit.decisions, commit.payloads, self._pruned_below)
        if not at_once:
            self._store.commit(changes)
        elif not self._store.commit_at_once(changes):
            return False
        self._owned_at = owned_at
        if changes.prune_below is not None:
            self._pruned_below = changes.prune_below
        self._seconds[_changes_run(commit)] = seconds = time.perf_counter() - began
        self._committed(seconds, len(commit.decisions))
        return True


def _changes_run(commit: Commit) -> bool:
    return any(decision.run is not None for decision in commit.decisions)
