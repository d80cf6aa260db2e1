"""The boundary around user code: whatever runs behind it, its caller's event loop continues (I9)."""

import asyncio
import contextlib
import copy
import functools
import inspect
import os
import re
import signal
import sys
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.protocol import reasons
from slipstream.rollout_worker.user_code import Call, Kind, NotCalled, UserCode, UserCodeError, async_code, threads
from slipstream.rollout_worker.user_code.async_code import MAX_PATIENCE, MAX_UNANSWERED
from tests.kit.worker import until

HERE = f"{__file__}:"


def as_it_is(value):
    return value


async def call(code, function, timeout_s=30.0, plain=as_it_is, **arguments):
    return await code.call(function, plain, timeout_s, **arguments)


async def hang(code, function, timeout_s=0.01, kind=Kind.TOOL):
    """Call a function that hangs until it is late; again if a busy machine had not begun the call by then."""
    while True:
        late = code.begin(function, as_it_is, timeout_s, kind, function)
        with pytest.raises(UserCodeError, match=f"no answer within {timeout_s} s") as failure:
            await late.result()
        await until(lambda late=late: late.began or late.finished.is_set())
        if late.began:
            return failure.value


def threads_now():
    return sum(thread.name == "user code" for thread in threading.enumerate())


class Alarms(list):
    """What a boundary's alarms say."""

    def __init__(self, code):
        code.alarm = lambda key, text, where: self.append((key, text, where))

    @property
    def keys(self):
        return [key for key, _, _ in self]


class Meter:
    """Entered by each call while it is at work. most: that were in it at one time."""

    def __init__(self):
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_):
        with self._lock:
            self._now -= 1


# Sync code: threads.


async def test_i9_threads_are_used_again_and_end_with_the_boundary():
    async with UserCode(threads=4) as code:
        (alone,) = {await call(code, threading.current_thread) for _ in range(50)}
        assert alone is not threading.current_thread()
        barrier = threading.Barrier(4, timeout=30)

        def meet():
            barrier.wait()
            return threading.current_thread()

        used = set(await asyncio.gather(*(call(code, meet) for _ in range(4))))
        assert len(used) == 4
        assert alone in used
        assert all(thread.daemon for thread in used), "none keeps the process from ending"
    await until(lambda: not any(thread.is_alive() for thread in used))


async def test_i9_no_more_sync_calls_run_than_there_are_threads():
    meter = Meter()

    def work():
        with meter:
            threading.Event().wait(0.001)

    async with UserCode(threads=3) as code:
        await asyncio.gather(*(call(code, work) for _ in range(60)))
    assert meter.most == 3


async def test_i9_hung_sync_calls_are_replaced_counted_told_and_bounded():
    """A leaked thread a call was what it cost."""
    release = threading.Event()
    before = threads_now()
    async with UserCode(threads=2) as code:
        alarms = Alarms(code)
        for hung in range(1, 9):
            assert (await hang(code, release.wait)).kind == reasons.TIMEOUT
            assert code.hung == hung
            if hung < 2 * threads.HUNG_PER_THREAD:
                assert await call(code, lambda: 1) == 1, "another thread takes the place"
        for _ in range(20):
            with pytest.raises(UserCodeError, match=r"not called: 8 calls have not come back.*tool_isolation"):
                await call(code, release.wait)
        assert threads_now() <= before + 9
        assert alarms.keys == ["hung tools 1", "hung tools 2", "hung tools 8"]
        assert [text.partition(" not come back")[0] for _, text, _ in alarms] == [
            "1 call of tools has",
            "2 calls of tools have",
            "8 calls of tools have",
        ]
        release.set()
        await until(lambda: code.hung == 0)
        assert await call(code, lambda: 2) == 2
    await until(lambda: threads_now() <= before)


async def test_i9_a_call_that_nobody_waits_for_is_hung_only_after_its_own_time_out(monkeypatch):
    """Episodes of a lost ticket are cancelled while their tools run."""
    release, began = threading.Event(), threading.Event()
    clock = Clock(monkeypatch)

    def work():
        began.set()
        release.wait()

    async with UserCode(threads=1) as code:
        gone = asyncio.create_task(call(code, work, timeout_s=1000.0))
        await until(began.is_set)
        gone.cancel()
        await asyncio.wait([gone])
        assert code.hung == 0
        clock.jump(1001.0)
        await until(lambda: code.hung == 1)
        release.set()
        await until(lambda: code.hung == 0)


async def hang_until_full(code, release):
    def hangs():
        return release.wait()

    for _ in range(threads.HUNG_PER_THREAD * code.threads):
        await hang(code, hangs)
    with pytest.raises(NotCalled, match=r"not called: 4 calls have not come back, 4 of them of .*hangs \(.*py:\d+\)"):
        await call(code, hangs)


async def test_i9_tools_that_hang_take_no_threads_from_rewards_and_the_data_set():
    """Rows failed as "not called", which blamed the data, until every ticket had used up its attempts."""
    release = threading.Event()
    async with UserCode(threads=1) as code:
        await hang_until_full(code, release)
        for kind in set(Kind) - {Kind.TOOL}:
            assert await code.call(lambda: 1, as_it_is, 30.0, kind) == 1
        release.set()


@pytest.mark.parametrize(
    ("kind", "may_isolate", "advised"),
    [(kind, isolate, isolate) for kind in (Kind.TOOL, Kind.ASYNC) for isolate in (True, False)]
    + [(kind, True, False) for kind in Kind if kind not in (Kind.TOOL, Kind.ASYNC)],
)
async def test_where_calls_hang_isolation_is_advised_for_tools_that_can_have_it_alone(
    kind, may_isolate, advised, monkeypatch
):
    """With an environment or an agent, the setting is refused."""
    release, clock, told = threading.Event(), Clock(monkeypatch), []
    async with UserCode(threads=1, agents=1, may_isolate=may_isolate) as code:
        code.shut_off = told.append
        alarms = Alarms(code)
        for _ in range(threads.HUNG_PER_THREAD):
            await hang(code, lambda: release.wait(), kind=kind)
        with pytest.raises(NotCalled, match=r"no more threads are given: .*a time-out of its own") as refused:
            await code.call(lambda: release.wait(), bool, 0.01, kind)
        await jump_until(clock, lambda: told)
        release.set()
    assert len(set(alarms.keys)) == 2
    for text in [str(refused.value), *told, *(text for _, text, _ in alarms)]:
        assert ("worker.tool_isolation" in text) == advised, text


async def test_i9_code_that_hangs_for_good_is_told_once_with_the_place_and_the_remedy(monkeypatch):
    release, clock = threading.Event(), Clock(monkeypatch)
    told = []
    async with UserCode(threads=1) as code:
        code.shut_off = told.append
        await hang_until_full(code, release)
        clock.jump(50.0)
        await asyncio.sleep(0.01)
        assert told == []
        clock.jump(11.0)
        await jump_until(clock, lambda: told)
        assert re.search(
            r"user code is shut off: 4 calls .* 4 of them of \S*hangs \(.*test_user_code.py:\d+\); none has come back "
            r'for 60 s.*worker.tool_isolation = "process".* a time-out of its own',
            told[0],
        )
        release.set()
    assert len(told) == 1


async def test_i9_slow_code_that_comes_back_is_not_shut_off(monkeypatch):
    """Each time that one came back, another hung: full at every look."""
    clock, told = Clock(monkeypatch), []
    async with UserCode(threads=1) as code:
        code.shut_off = told.append
        releases = [threading.Event() for _ in range(6)]
        for release in releases[:4]:
            await hang(code, release.wait)
        for back, late in zip(releases[:2], releases[4:], strict=True):
            back.set()
            await until(lambda: code.hung == 3)
            await hang(code, late.wait)
            assert code.hung == 4
            clock.jump(61.0)
            await asyncio.sleep(0.01)
        assert told == []
        for release in releases:
            release.set()
        await until(lambda: code.hung == 0)
        clock.jump(61.0)
        await asyncio.sleep(0.01)
    assert told == []


class Clock:
    """The event loop's, which can jump."""

    def __init__(self, monkeypatch):
        loop = asyncio.get_running_loop()
        self.ahead, original = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: original() + self.ahead)
        self.loop = loop

    def jump(self, seconds):
        self.ahead += seconds


async def jump_until(clock, condition):
    """Let a minute pass, again and again. A call that a busy machine never began counts as one that came back, after
    which the wait for the others begins again."""
    for _ in range(3000):  # a time-out would jump as well
        if condition():
            return
        clock.jump(61.0)
        await asyncio.sleep(0.01)
    raise AssertionError("it was never told")


async def test_i9_a_time_out_counts_from_when_a_call_has_a_thread(monkeypatch):
    first, second = threading.Event(), threading.Event()
    began = threading.Event()
    clock = Clock(monkeypatch)

    def work():
        began.set()
        return second.wait()

    async with UserCode(threads=1) as code:
        busy = asyncio.create_task(call(code, first.wait, timeout_s=100_000.0))
        waiting = asyncio.create_task(call(code, work, timeout_s=1000.0))
        await asyncio.sleep(0)
        clock.jump(900.0)
        first.set()
        await busy
        await until(began.is_set)
        clock.jump(900.0)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        second.set()
        assert await waiting is True


async def test_i9_a_call_that_finds_no_thread_says_so_and_waits(monkeypatch):
    """It failed as if it were late, where more episodes called tools at once than there are threads."""
    release = threading.Event()
    clock = Clock(monkeypatch)
    async with UserCode(threads=1) as code:
        alarms = Alarms(code)
        busy = asyncio.create_task(call(code, release.wait, timeout_s=100_000.0))
        waiting = asyncio.create_task(call(code, lambda: 1, timeout_s=1000.0))
        await asyncio.sleep(0)
        clock.jump(1001.0)
        await until(lambda: bool(alarms))
        assert alarms.keys == ["threads"]
        assert re.search(r"no thread was free within 1000 s: all 1 are at work.*user_threads", alarms[0][1])
        clock.jump(10_000.0)
        release.set()
        await busy
        assert await waiting == 1


async def test_i9_a_coroutine_that_sync_code_gives_has_its_whole_time_out_however_long_the_wait(monkeypatch):
    release, ahead, monotonic = threading.Event(), [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead[0])

    async def later():
        await asyncio.sleep(0)
        return 1

    async with UserCode(threads=1) as code:
        busy = asyncio.create_task(call(code, lambda: release.wait(30), timeout_s=100_000.0))
        waiting = asyncio.create_task(call(code, lambda: later(), timeout_s=1000.0))
        await asyncio.sleep(0)
        ahead[0] += 5000.0
        release.set()
        await busy
        assert await waiting == 1


async def test_i9_calls_that_wait_for_a_thread_get_none_where_too_many_hang():
    """Else each of them might hang in one more."""
    release = threading.Event()
    async with UserCode(threads=1) as code:
        calls = [asyncio.create_task(call(code, release.wait, timeout_s=0.05)) for _ in range(20)]
        await asyncio.wait(calls)
        errors = [task.exception() for task in calls]
        assert sum(isinstance(error, NotCalled) for error in errors) == 20 - threads.HUNG_PER_THREAD
        assert code.hung == threads.HUNG_PER_THREAD
        release.set()


async def test_i9_signal_handlers_are_explained():
    async with UserCode() as code:
        with pytest.raises(
            UserCodeError, match=r'ValueError: signal only works.*\[worker\].*tools alone.*tool_isolation = "proc'
        ):
            await call(code, signal.signal, signalnum=signal.SIGALRM, handler=as_it_is)


async def test_i9_a_call_that_is_late_before_its_thread_begins_is_never_begun(monkeypatch):
    go_on, called, run = threading.Event(), [], Call.run

    def held(late):
        go_on.wait()
        run(late)

    monkeypatch.setattr(Call, "run", held)
    async with UserCode() as code:
        late = code.begin(lambda: called.append(1), as_it_is, 0.01, Kind.TOOL, held)
        with pytest.raises(UserCodeError, match="no answer"):
            await late.result()
        assert code.hung == 1
        go_on.set()
        await until(late.finished.is_set)
        assert (called, late.began, code.hung) == ([], False, 0)


async def one():
    return 1


# An awaitable needs a loop, which has a thread besides that of the sync call.
@pytest.mark.parametrize(
    ("function", "refused"),
    [(lambda: 1, 1), (one, 1), (lambda: one(), 1), (lambda: one(), 2)],
    ids=["sync", "async", "sync in a thread", "sync on a loop"],
)
async def test_i9_a_machine_that_gives_no_more_threads_fails_the_call_alone(function, refused, monkeypatch):
    start, count = threading.Thread.start, iter(range(1, 100))

    def start_all_but_one(thread):
        if next(count) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
    async with UserCode(threads=1) as code:
        with pytest.raises(UserCodeError, match=r"not called: can't start new thread; lower worker.user_threads"):
            await call(code, function)
        assert await call(code, function) == 1
        assert code.hung == 0


# Async code: its own loop.


async def test_i9_async_code_shares_one_loop_which_is_not_the_callers():
    async def where():
        return id(asyncio.get_running_loop()), threading.get_ident()

    async with UserCode() as code:
        seen = {await call(code, where) for _ in range(5)} | set(
            await asyncio.gather(*(call(code, where) for _ in range(5)))
        )
        ((loop, thread),) = seen
        assert loop != id(asyncio.get_running_loop())
        assert thread != threading.get_ident()


async def test_i9_a_coroutine_that_comes_too_late_is_closed_and_not_dropped():
    """Python warns of one that nobody awaits, and an environment's counts as at work until it has ended."""
    release, given = threading.Event(), []

    async def later():
        raise AssertionError("it is never begun")

    def give():
        release.wait(30)
        given.append(later())
        return given[0]

    async with UserCode() as code:
        late = code.begin(give, as_it_is, 0.01, Kind.ENVIRONMENT, give)
        with pytest.raises(UserCodeError, match="no answer"):
            await late.result()
        assert not late.finished.is_set()
        release.set()
        async with asyncio.timeout(30.0):
            await late.finished.wait()
        assert code.hung == 0
        assert inspect.getcoroutinestate(given[0]) == inspect.CORO_CLOSED


async def test_i9_what_is_bound_to_a_loop_works_from_call_to_call():
    """As a client session does, or a lock that is made when the file is imported."""
    lock, made = asyncio.Lock(), {}

    async def first():
        made["queue"] = asyncio.Queue(1)
        await made["queue"].put(7)
        async with lock:
            await asyncio.sleep(0)

    async def second():
        async with lock:
            made["waiter"] = asyncio.get_running_loop().create_future()
            return await made["queue"].get()

    async with UserCode() as code:
        await asyncio.gather(*(call(code, first) for _ in range(1)))
        assert await asyncio.gather(call(code, second)) == [7]

        async def third():
            made["waiter"].set_result(1)
            return await made["waiter"]

        assert await call(code, third) == 1


async def test_i9_a_blocking_coroutine_stops_neither_the_caller_nor_others_and_is_named():
    """It stopped the worker's loop for 18 s."""
    release, blocking = threading.Event(), threading.Event()
    homes = []

    async def blocks():
        homes.append(asyncio.get_running_loop())
        blocking.set()
        release.wait()
        return "came back"

    async def lets_go():
        homes.append(asyncio.get_running_loop())
        release.set()

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        blocked = asyncio.create_task(call(code, blocks))
        await until(blocking.is_set)
        await until(lambda: bool(alarms))
        await call(code, lets_go)
        assert await blocked == "came back"
        assert homes[0] is not homes[1]
        ((key, text, where),) = alarms
        assert key.endswith("blocks")
        assert "blocks the event loop of async code: await in it, or write it as a plain def" in text
        line = blocks.__code__.co_firstlineno + 3
        assert where == f"{__file__}:{line}"

        async def is_home():
            return asyncio.get_running_loop() is homes[0]

        for _ in range(1000):
            if await call(code, is_home):
                break
            await asyncio.sleep(0.001)
        else:
            pytest.fail("the first loop is not used again")


class Blocking:
    """Blocks the event loop of user code while the caller's loop is `late` at so many pings, or is not."""

    def __init__(self, monkeypatch, late):
        self.release, self.pings = threading.Event(), []
        ping, clock = async_code.EventLoop.ping, Clock(monkeypatch)

        def counted(loop, counts):
            self.pings.append(counts)
            ping(loop, counts)
            if len(self.pings) <= late:
                clock.jump(0.1)  # the next ping comes as late as ten pings take

        monkeypatch.setattr(async_code.EventLoop, "ping", counted)

    async def block(self):
        self.release.wait()


async def test_i9_while_the_callers_own_loop_is_late_no_code_is_to_blame(monkeypatch):
    """A starved machine: 805 episodes done, 107 failed, as their client belonged to the loop before."""
    blocking = Blocking(monkeypatch, late=5 * MAX_UNANSWERED)
    homes = []

    async def where():
        homes.append(asyncio.get_running_loop())

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        before = len(blocking.pings)
        calls = [asyncio.create_task(call(code, function, timeout_s=1e6)) for function in (where, blocking.block)]
        await until(lambda: len(blocking.pings) - before >= 4 * MAX_UNANSWERED)
        assert alarms == []
        calls.append(asyncio.create_task(call(code, where, timeout_s=1e6)))
        await asyncio.sleep(0)
        blocking.release.set()
        await asyncio.gather(*calls)
    assert len(homes) == 2
    assert len(set(homes)) == 1


async def test_i9_pings_that_were_late_do_not_count_and_later_ones_do(monkeypatch):
    blocking = Blocking(monkeypatch, late=3)
    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        calling = asyncio.create_task(call(code, blocking.block, timeout_s=1e6))
        await until(lambda: bool(alarms))
        assert blocking.pings[1:4] == [False] * 3
        assert sum(blocking.pings[4:]) >= MAX_UNANSWERED
        blocking.release.set()
        await calling
    assert len(alarms) == 1


async def test_i9_a_callback_that_blocks_is_named():
    release = threading.Event()

    def hold_up():
        release.wait()

    async def leaves_it():
        asyncio.get_running_loop().call_soon(hold_up)
        await asyncio.sleep(0.01)

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        calling = asyncio.create_task(call(code, leaves_it))
        await until(lambda: bool(alarms))
        release.set()
        await calling
    ((key, _, where),) = alarms
    assert key.endswith("hold_up")
    assert where == f"{__file__}:{hold_up.__code__.co_firstlineno + 1}"


async def test_i9_what_blocks_in_a_task_that_a_call_began_is_named():
    release = threading.Event()

    async def part():
        release.wait()

    async def whole():
        await asyncio.gather(part(), part())

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        blocked = asyncio.create_task(call(code, whole))
        await until(lambda: bool(alarms))
        release.set()
        await blocked
    ((key, _, where),) = alarms
    assert key.endswith("part")
    assert where == f"{__file__}:{part.__code__.co_firstlineno + 1}"


async def test_i9_what_belongs_to_another_loop_fails_with_the_remedy():
    release, blocking = threading.Event(), threading.Event()
    lock = asyncio.Lock()

    async def holds():
        async with lock:
            await asyncio.gather(waits(), blocks())

    async def waits():
        async with lock:
            pass

    async def blocks():
        blocking.set()
        release.wait()

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        blocked = asyncio.create_task(call(code, holds, timeout_s=1000.0))
        await until(lambda: bool(alarms))
        with pytest.raises(
            UserCodeError, match=r"different event loop; new calls run on .* make what belongs to a loop"
        ):
            await call(code, waits)
        release.set()
        blocked.cancel()
        await asyncio.wait([blocked])


async def test_i9_a_call_with_much_time_waits_for_its_loop_before_it_goes_to_another():
    """Clients that agents share belong to the first loop: 4 of 8 episodes failed next to one that slept."""
    release = threading.Event()

    async def where():
        return asyncio.get_running_loop()

    async def blocks():
        release.wait()

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        first = await call(code, where)
        blocked = asyncio.create_task(call(code, blocks, timeout_s=1e6))
        await until(lambda: bool(alarms))
        agent = asyncio.create_task(call(code, where, timeout_s=200.0))
        assert await call(code, where) is not first
        await asyncio.sleep(0.05)
        assert not agent.done()
        await until(lambda: code._loops._loops[0].unanswered >= MAX_PATIENCE)
        assert await call(code, where, timeout_s=1e6) is not first
        release.set()
        assert await agent is first
        await blocked


async def test_i9_hung_threads_of_async_code_are_replaced_counted_told_and_bounded():
    """Six of them filled asyncio's own executor, for good: calls that were well timed out."""
    release, before = threading.Event(), threads_now()

    async def wait():
        await asyncio.to_thread(release.wait)

    async def well():
        return await asyncio.to_thread(threading.current_thread)

    async with UserCode(threads=2, ping_s=0.01) as code:
        alarms = Alarms(code)
        for hung in range(1, 9):
            with pytest.raises(UserCodeError, match=r"no answer within 0.1 s"):
                await call(code, wait, timeout_s=0.1)
            await until(lambda hung=hung: code.hung == hung)
            if hung < 8:
                assert (await call(code, well)).daemon, "none keeps the process from ending"
        with pytest.raises(UserCodeError, match="RuntimeError: not called: 8 calls have not come back, 8 of them of "):
            await call(code, well)
        await until(lambda: len(alarms) == 3)
        assert alarms.keys == ["hung async code 1", "hung async code 2", "hung async code 8"]
        release.set()
        await until(lambda: code.hung == 0)
        assert (await call(code, well)).daemon
    await until(lambda: threads_now() <= before)


async def test_i9_no_more_threads_of_async_code_are_at_work_than_allowed():
    meter = Meter()

    def work(number):
        with meter:
            threading.Event().wait(0.001)
        if number == 7:
            raise KeyError(number)
        return number

    async def all_at_once():
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(None, work, number) for number in range(30)]
        jobs[29].cancel()
        return [repr(done) for done in await asyncio.gather(*jobs, return_exceptions=True)]

    async with UserCode(threads=3) as code:
        found = await call(code, all_at_once)
    assert meter.most == 3
    assert found[:7] == [repr(number) for number in range(7)]
    assert (found[7], found[8], found[29]) == ("KeyError(7)", "8", "CancelledError('')")


async def test_i9_a_call_that_another_blocks_says_which(monkeypatch):
    clock = Clock(monkeypatch)
    release, blocking = threading.Event(), threading.Event()

    async def culprit():
        blocking.set()
        release.wait()

    async def innocent():
        await asyncio.sleep(3600)

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        late = asyncio.create_task(call(code, innocent, timeout_s=1000.0))
        await asyncio.sleep(0.01)
        blocked = asyncio.create_task(call(code, culprit, timeout_s=9000.0))
        await until(lambda: bool(alarms))
        clock.jump(1001.0)
        with pytest.raises(
            UserCodeError, match=r"no answer within 1000 s: .*culprit blocked its event loop at .*\.py:"
        ):
            await late
        release.set()
        await blocked


async def test_i9_where_every_loop_is_blocked_calls_fail_at_once_and_user_code_is_shut_off(monkeypatch):
    release, clock, told = threading.Event(), Clock(monkeypatch), []

    async def blocks():
        release.wait()

    async with UserCode(ping_s=0.01) as code:
        code.shut_off = told.append
        alarms = Alarms(code)
        calls = []
        for blocked in range(1, 5):
            calls.append(asyncio.create_task(call(code, blocks, timeout_s=100.0)))
            await until(lambda blocked=blocked: len(alarms) == blocked)
        with pytest.raises(NotCalled, match="not called: all 4 event loops are blocked"):
            await call(code, blocks)
        with pytest.raises(NotCalled, match="not called: all 4 event loops are blocked"):
            await call(code, lambda: blocks())
        assert await call(code, lambda: 1) == 1
        clock.jump(390.0)
        await asyncio.sleep(0.05)
        assert told == []
        clock.jump(11.0)
        await until(lambda: told)
        release.set()
        await asyncio.wait(calls)
        assert re.search(
            r"all 4 event loops of async code are blocked, by \S*blocks \(.*test_user_code.py:\d+\)", told[0]
        )
        while True:  # The loops answer as soon as they can.
            with contextlib.suppress(NotCalled):
                assert await call(code, blocks) is None
                break
            await asyncio.sleep(0.001)
    assert len(told) == 1


async def test_i9_a_coroutine_that_is_given_up_is_cancelled():
    ended = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async with UserCode(ping_s=0.01) as code:
        with pytest.raises(UserCodeError, match=r"no answer within 0.01 s"):
            await call(code, wait, timeout_s=0.01)
        await until(ended.is_set)
        ended.clear()
        unwanted = asyncio.create_task(call(code, wait))
        await asyncio.sleep(0.01)
        unwanted.cancel()
        await until(ended.is_set)
        assert code.hung == 0


async def test_i9_a_coroutine_that_swallows_its_cancellation_is_counted_until_it_ends():
    over = threading.Event()

    async def stubborn():
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async with UserCode(ping_s=0.01) as code:
        alarms = Alarms(code)
        with pytest.raises(UserCodeError, match=r"no answer within 0.01 s"):
            await call(code, stubborn, timeout_s=0.01)
        await until(lambda: code.hung == 1)
        assert alarms.keys == ["hung async code 1"]
        over.set()
        await until(lambda: code.hung == 0)


def interrupt():
    raise KeyboardInterrupt


async def interrupt_async():
    raise KeyboardInterrupt


async def interrupt_in_a_task():
    await asyncio.create_task(interrupt_async())


async def interrupt_in_a_callback():
    asyncio.get_running_loop().call_soon(interrupt)
    await asyncio.sleep(0.01)
    raise KeyError("continued")


async def stop_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    raise KeyError("continued")


async def close_the_loop():
    asyncio.get_running_loop().close()


def cancel():
    raise asyncio.CancelledError


async def cancel_async():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


class Group(BaseExceptionGroup):
    pass


def raise_a_group():
    raise Group("odd", [SystemExit(1)])


async def exit_generator():
    raise GeneratorExit


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (interrupt, "KeyboardInterrupt"),
        (interrupt_async, "KeyboardInterrupt"),
        (interrupt_in_a_task, "KeyboardInterrupt"),
        (cancel, "CancelledError"),
        (cancel_async, "CancelledError"),
        (interrupt_in_a_callback, "KeyError"),
        (stop_the_loop, "KeyError"),
        (close_the_loop, "RuntimeError"),
        (functools.partial(sys.exit, 3), "SystemExit"),
        (raise_a_group, "Group"),
        (exit_generator, "GeneratorExit"),
        (lambda: next(iter([])), "StopIteration"),
        (lambda: [].append(1, 2), "TypeError"),
        (lambda wrong: wrong, "TypeError"),
    ],
)
async def test_i9_whatever_is_raised_becomes_one_error_and_the_next_call_works(function, kind):
    async def well():
        return 1

    async with UserCode() as code:
        with pytest.raises(UserCodeError) as failure:
            await call(code, function)
        assert failure.value.kind == kind
        assert failure.value.__cause__ is failure.value.__context__ is None
        assert await call(code, well) == await call(code, lambda: 1) == 1


async def test_i9_an_error_as_long_as_a_page_is_told_in_short():
    def fail():
        raise ValueError("x" * 5_000_000)

    async with UserCode() as code:
        with pytest.raises(UserCodeError) as failure:
            await call(code, fail)
    assert len(str(failure.value)) < 3000
    assert failure.value.where == f"{HERE}{fail.__code__.co_firstlineno + 1}"


def fork(how):
    """The status of a copy that continues with the call; "lived on" of one that continues after it."""
    copy = os.fork()
    if copy:
        for _ in range(10_000):
            found, status = os.waitpid(copy, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            threading.Event().wait(0.001)
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        return "lived on"
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise KeyError("in the copy")
    return 7


async def fork_async(how):
    return fork(how)


async def fork_in_a_thread(how):
    return await asyncio.to_thread(fork, how)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("function", [fork, fork_async, fork_in_a_thread])
@pytest.mark.parametrize(("how", "status"), [("exit", 5), ("raise", 1), ("return", 0)])
async def test_i9_a_copy_of_the_worker_ends_with_its_call(function, how, status):
    """There were as many copies of the worker as groups."""
    async with UserCode() as code:
        assert await call(code, function, how=how) == status


class OddError(Exception):
    def __str__(self):
        raise OddError


def raise_odd():
    raise OddError


async def raise_odd_async():
    raise OddError


@pytest.mark.parametrize("function", [raise_odd, raise_odd_async])
async def test_i9_an_error_that_tells_nothing_of_itself_is_told_at_once(function):
    """It left its call to the time-out."""
    async with UserCode() as code:
        with pytest.raises(UserCodeError, match=r"^OddError, whose text fails with OddError$") as failure:
            await call(code, function)
    assert failure.value.kind == "OddError"


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800" * 5000])
async def test_i9_an_error_can_be_sent_whatever_its_text_is(text):
    def fail():
        raise type("Odd", (Exception,), {})(text)

    async with UserCode() as code:
        with pytest.raises(UserCodeError) as failure:
            await call(code, fail)
    assert f"{failure.value} {failure.value.kind} {failure.value.where}".encode()


class Callable:
    async def __call__(self, n):
        return [n, id(asyncio.get_running_loop())]

    async def method(self, n):
        return [n, id(asyncio.get_running_loop())]


async def add(n, m):
    return [n + m, id(asyncio.get_running_loop())]


async def items(n):
    yield n
    yield id(asyncio.get_running_loop())


class AsyncItems:
    async def __call__(self, n):
        yield n
        yield id(asyncio.get_running_loop())


@pytest.mark.parametrize(
    "function",
    [
        Callable(),
        Callable().method,
        functools.partial(add, m=0),
        functools.partial(functools.partial(Callable()), n=1),
        lambda n: add(n, 0),
        items,
        AsyncItems(),
        lambda n: items(n),
    ],
    ids=["object", "method", "partial", "partial of object", "lambda", "generator", "generator object", "lambda of it"],
)
async def test_i9_everything_that_is_async_runs_on_the_loop_of_user_code(function):
    async def loop():
        return id(asyncio.get_running_loop())

    async with UserCode() as code:
        assert await call(code, function, n=1, plain=list) == [1, await call(code, loop)]


@pytest.mark.parametrize(
    "function",
    [
        lambda: map(as_it_is, [threading.get_ident]),
        lambda: (ident for ident in [threading.get_ident]),
        functools.partial(map, lambda _: threading.get_ident, [1]),
    ],
    ids=["map", "generator", "partial of map"],
)
async def test_i9_a_lazy_result_is_worked_out_where_the_function_ran(function):
    async with UserCode() as code:
        (ident,) = await call(code, function, plain=lambda values: [value() for value in values])
    assert ident != threading.get_ident()


class Loud:
    """Its text, and its end, tell where they ran."""

    def __init__(self, places):
        self.places = places

    def __str__(self):
        self.places.append(threading.get_ident())
        return "loud"

    def __del__(self):
        self.places.append(threading.get_ident())


@pytest.mark.parametrize("is_async", [False, True])
async def test_i9_results_become_text_and_are_freed_behind_the_boundary(is_async):
    places = []

    async def loud_async():
        return Loud(places)

    async with UserCode() as code:
        assert await call(code, loud_async if is_async else lambda: Loud(places), plain=str) == "loud"
        await until(lambda: len(places) == 2)
    assert threading.get_ident() not in places


async def test_i9_a_result_without_end_is_given_up():
    async def endless():
        while True:
            yield 1

    async with UserCode() as code:
        with pytest.raises(UserCodeError, match="an async generator gave more than 100000 items"):
            await call(code, endless)


class Hostile:
    """Functions that do their worst, sync and async. Those that wait do so until `release` is set."""

    def __init__(self):
        self.release = threading.Event()

    def well(self):
        return "well"

    def raises(self):
        raise Group("odd", [KeyboardInterrupt()])

    def exits(self):
        sys.exit(3)

    def waits(self):
        self.release.wait()
        return "well"

    def gives_a_coroutine(self):
        return self.awaits()

    def gives_what_has_no_text(self):
        class Mute:
            def __str__(self):
                raise SystemExit(3)

        return Mute()

    async def awaits(self):
        await asyncio.sleep(0.001)
        return "well"

    async def blocks(self):
        return self.waits()

    async def waits_in_a_thread(self):
        return await asyncio.to_thread(self.waits)

    async def is_not_cancelled(self):
        while not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return "well"

    async def cancels_itself(self):
        await cancel_async()

    async def stops_the_loop(self):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        raise KeyError("continued")

    async def leaves_a_task_that_exits(self):
        asyncio.get_running_loop().create_task(interrupt_async()).add_done_callback(lambda task: task.exception())
        return "well"


# The name of each, and what it may end in besides being late.
HOSTILE = {
    "well": "well",
    "raises": "Group",
    "exits": "SystemExit",
    "waits": None,
    "gives_a_coroutine": "well",
    "gives_what_has_no_text": "SystemExit",
    "awaits": "well",
    "blocks": None,
    "waits_in_a_thread": None,
    "is_not_cancelled": None,
    "cancels_itself": "CancelledError",
    "stops_the_loop": "KeyError",
    "leaves_a_task_that_exits": "well",
}


@given(st.lists(st.sampled_from(sorted(HOSTILE)), min_size=1, max_size=8))
@example(sorted(HOSTILE))
def test_i9_whatever_runs_at_once_each_call_ends_and_the_next_ones_work(names):
    async def outcome(code, function, timeout_s=0.05):
        try:
            return await call(code, function, timeout_s=timeout_s, plain=str)
        except UserCodeError as error:
            return error.kind

    async def play():
        hostile = Hostile()
        async with UserCode(threads=4) as code:
            found = await asyncio.gather(*(outcome(code, getattr(hostile, name)) for name in names))
            for name, one in zip(names, found, strict=True):
                assert one in {HOSTILE[name], reasons.TIMEOUT}, name
            assert await outcome(code, hostile.well, 30.0) == "well"
            hostile.release.set()
            await until(lambda: code.hung == 0)
            for name in ("well", "awaits", "blocks", "waits_in_a_thread", "gives_a_coroutine"):
                assert await outcome(code, getattr(hostile, name), 30.0) == "well"

    asyncio.run(play())


async def cancels_all_tasks():
    for task in asyncio.all_tasks():
        task.cancel()


async def test_i9_a_call_that_cancels_all_tasks_leaves_no_other_without_an_end():
    """A call that was cancelled before its first step never ended, and whoever waited for that waited for ever."""

    async def works():
        return await asyncio.to_thread(lambda: 1)

    async with UserCode(threads=2) as code:
        begun = [
            code.begin(function, as_it_is, 30.0, Kind.TOOL, function) for function in [cancels_all_tasks, *[works] * 8]
        ]
        found = await asyncio.gather(*(one.result() for one in begun), return_exceptions=True)
        cancelled = [one for one in found if isinstance(one, UserCodeError)]
        assert all("cancelled it" in str(error) for error in cancelled)
        assert cancelled
        assert all(one.finished.is_set() for one in begun)
        assert [await call(code, works) for _ in range(4)] == [1] * 4
        assert code.hung == 0


async def test_i9_jobs_that_async_code_leaves_in_all_threads_are_told_of(monkeypatch):
    """Others that put work in threads were late, one and all, and nobody heard why."""
    monkeypatch.setattr(threads, "_JOB_WAITS_S", 0.01)
    release, tasks = threading.Event(), []

    def wait_for_ever():
        release.wait()

    async def leave_one():
        tasks.append(asyncio.create_task(asyncio.to_thread(wait_for_ever)))

    async with UserCode(threads=2) as code:
        alarms = Alarms(code)
        for _ in range(2):
            await call(code, leave_one)
        waiting = asyncio.create_task(call(code, functools.partial(asyncio.to_thread, time.monotonic)))
        await until(lambda: bool(alarms))
        assert "all 2 are at work, 2 of them on " in alarms[0][1]
        assert "wait_for_ever" in alarms[0][1]
        release.set()
        await waiting


# Nothing by reference.


async def test_i9_a_lack_of_files_is_an_error_of_the_call(monkeypatch):
    def no_file(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "SelectorEventLoop", no_file)
    async with UserCode() as code:
        with pytest.raises(UserCodeError, match=r"Too many open files; lower .* that of files"):
            await call(code, asyncio.sleep, delay=0)
        with pytest.raises(UserCodeError, match="Too many open files"):
            await call(code, lambda: asyncio.sleep(0))


class Odd:
    def __init__(self):
        self.seen = []


class Uncopyable(Odd):
    def __deepcopy__(self, memo):
        raise TypeError("no")


@pytest.mark.parametrize("is_async", [False, True])
async def test_i9_arguments_are_copies(is_async):
    message = {"role": "user", "content": "x", "parts": [("a", {"b": [1]})]}
    mine = {
        "prompts": [[message]] * 2,
        "ids": [1, 2],
        "kinds": {1, 2},
        "odd": [odd := Odd()] * 2,
        "fixed": [fixed := Uncopyable()],
        "log": (log := []).append,
    }
    before = copy.deepcopy(message)

    def meddle(prompts, ids, kinds, odd, fixed, log):
        assert prompts[0] is not prompts[1]
        assert odd[0] is odd[1]
        prompts.append(1)
        prompts[0].append(1)
        prompts[0][0]["parts"][0][1]["b"].append(2)
        prompts[1][0]["content"] = "y"
        ids.clear()
        kinds.add(3)
        odd[0].seen.append(1)
        fixed[0].seen.append(1)
        log("called")

    async def meddle_async(**arguments):
        meddle(**arguments)

    async with UserCode() as code:
        await call(code, meddle_async if is_async else meddle, **mine)
    assert message == before
    assert mine["prompts"] == [[message], [message]]
    assert (mine["ids"], mine["kinds"], odd.seen) == ([1, 2], {1, 2}, [])
    assert fixed.seen == [1], "what cannot be copied is handed out as it is"
    assert log == ["called"], "functions are not copied"


async def test_i9_an_argument_that_holds_itself_is_copied():
    ring = [1]
    ring.append(ring)

    def look(ring):
        ring[1].append(2)
        return ring[1] is ring

    async with UserCode() as code:
        assert await call(code, look, ring=ring)
    assert len(ring) == 2


async def test_i9_tools_are_not_isolated_unless_asked():
    async with UserCode() as code:
        with pytest.raises(ValueError, match="made without a task file"):
            await code.call_isolated("tool", {}, 1.0)


async def test_i9_a_call_that_is_late_is_told_its_time_out_as_it_was_set():
    """What a plain def gives to be awaited has a little less."""
    async with UserCode() as code:
        with pytest.raises(UserCodeError, match=r"^no answer within 0\.05 s$"):
            await call(code, lambda: asyncio.sleep(60), timeout_s=0.05)
