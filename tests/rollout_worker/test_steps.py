"""Which step of an event loop is to blame: one that waits or computes, and not one that has no CPU."""

import asyncio
import threading

import pytest

from rollout_worker.user_code.async_code import (
    LOOKS,
    MAX_LOOKS,
    Sighting,
    blocks,
    code_in,
    cpu_clock,
    holds_up,
    sample_stack,
)
from tests.kit.worker import until

LOOK_S = 0.25


def seen(*steps, cpu_s=0.0, moves=False):
    """Sightings of a thread that uses `cpu_s` from look to look, and is at another place at each if it `moves`."""
    return [Sighting(step, look if moves else step, look * cpu_s) for look, step in enumerate(steps)]


WAITS = seen(*"a" * LOOKS)
COMPUTES = seen(*"a" * LOOKS, cpu_s=LOOK_S * 0.9, moves=True)
STARVED = seen(*"a" * LOOKS, cpu_s=LOOK_S * 0.06, moves=True)
IN_ONE_C_CALL = seen(*"a" * LOOKS, cpu_s=LOOK_S * 0.06)
COMPUTES_STARVED = seen(*"a" * (LOOKS * 10), cpu_s=LOOK_S * 0.06, moves=True)
POLLS = seen(*"a" * MAX_LOOKS, cpu_s=LOOK_S * 0.001, moves=True)
MANY_WAIT = seen(*"aaabbbcccdddeee")
MANY_SLOW = seen(*"aaabbbcccdddeee", cpu_s=LOOK_S * 0.06)
MANY_SHORT = seen(*"abcdefghijklmnopqrstuvwxyz" * 4)
AT_REST = seen(*[None] * (LOOKS * 2))


@pytest.mark.parametrize(
    ("sightings", "blocked", "told"),
    [
        (WAITS, True, True),
        (WAITS[1:], False, False),
        (COMPUTES, True, True),
        (STARVED, False, False),
        (IN_ONE_C_CALL, False, False),
        (COMPUTES_STARVED, True, True),
        (POLLS, True, True),
        (POLLS[1:], False, False),
        (MANY_WAIT, False, True),
        (MANY_SLOW, False, False),
        (MANY_SHORT, False, False),
        (AT_REST, False, False),
        ([], False, False),
    ],
    ids=[
        "waits",
        "not yet",
        "computes",
        "starved",
        "starved in one C call",
        "computes, starved",
        "polls",
        "polls, not yet",
        "many wait",
        "many slow",
        "many short",
        "at rest",
        "nothing",
    ],
)
def test_i9_who_is_to_blame(sightings, blocked, told):
    assert (blocks(sightings, LOOK_S), holds_up(sightings, LOOK_S)) == (blocked, told)


async def test_a_step_is_known_again_and_the_next_is_another():
    release, at_work = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    async def steps():
        for go_on, begun in zip(release, at_work, strict=True):
            begun.set()
            go_on.wait()
            await asyncio.sleep(0)

    clocks = []

    def serve():
        clocks.append(cpu_clock(threading.get_ident()))
        asyncio.run(steps())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    await until(at_work[0].is_set)
    one, again = (sample_stack(thread.ident, clocks[0]) for _ in range(2))
    name, where = code_in(thread.ident, {__file__})
    release[0].set()
    await until(at_work[1].is_set)
    other = sample_stack(thread.ident, clocks[0])
    release[1].set()
    await until(lambda: not thread.is_alive())
    assert one.step is again.step is not None
    assert other.step is not one.step
    assert 0.0 < one.cpu_s <= other.cpu_s
    assert name.endswith("steps")
    assert where == f"{__file__}:{steps.__code__.co_firstlineno + 3}"
    over = sample_stack(thread.ident, clocks[0])
    assert (over.step, over.cpu_s, code_in(thread.ident, {__file__})) == (None, 0.0, None)
