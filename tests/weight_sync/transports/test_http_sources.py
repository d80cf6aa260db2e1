"""Whom a pull asks and how long it waits: the rules alone, and a whole pull over bad sources in any order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.weight_sync.transports.http import pull as pull_module
from slipstream.weight_sync.transports.http import pull_sources as rules
from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.transports.http.pull import Pull, World
from slipstream.weight_sync.transports.http.pull_sources import Attempt, GoneError, PullSource, Sources, Wire

CHUNK = 200_000
SIZE = 5 * CHUNK + 1234
FLAT = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WHOLE = FLAT.numpy().tobytes()
CHUNKS = ChunkList.of(FLAT, CHUNK)
LOOK_S = 0.25


def fails(sources: Sources, now: float, error: Exception | None = None, brought: int = 0) -> tuple[PullSource, float]:
    """One attempt that ends at once. Whom it asked, and the pause behind it."""
    attempt = sources.begin(now)
    if brought:
        sources.note(attempt, brought, now)
    return attempt.source, sources.failed(attempt, error or OSError("x"), now)


def silent(sources: Sources, now: float) -> tuple[PullSource, float]:
    """An attempt that brings nothing until it is ended. Whom it asked, and after how many seconds."""
    attempt = sources.begin(now)
    seconds = 0.0
    while not sources.too_slow(attempt, now + seconds, 0):
        seconds += LOOK_S
    sources.failed(attempt, OSError("ended"), now + seconds)
    return attempt.source, seconds


def test_a_source_that_fails_steps_back_behind_the_others() -> None:
    sources = Sources(["peer", "learner"])
    assert [fails(sources, now)[0].url for now in range(4)] == ["peer", "learner", "peer", "learner"]


def test_pauses_grow_only_while_nobody_brings_anything() -> None:
    sources = Sources(["learner"])
    pauses = [fails(sources, now)[1] for now in range(0, 60, 10)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert fails(sources, 70, brought=rules.WORTH_BYTES)[1] == 0
    assert fails(sources, 80)[1] == 0.2
    assert Sources(["peer", "learner"]).failed(Sources(["x"]).begin(0), OSError("x"), 0) == 0


def test_what_fails_on_several_connections_at_once_is_one_fault() -> None:
    sources = Sources(["learner"])
    attempts = [sources.begin(0.0) for _ in range(4)]
    assert [sources.failed(attempt, OSError("x"), 1.0) for attempt in attempts] == [0.2] * 4


def test_a_silent_source_is_passed_over_in_seconds() -> None:
    sources = Sources(["peer", "learner"])
    source, seconds = silent(sources, 0)
    assert (source.url, seconds) == ("peer", rules.SILENCE_S)
    assert sources.begin(10).source.url == "learner"


def test_all_silent_is_a_slow_network_and_is_waited_for_longer_and_longer() -> None:
    sources = Sources(["peer", "learner"])
    assert [silent(sources, 100.0 * n)[1] for n in range(6)] == [2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("urls", "bytes_per_s", "least", "slow"),
    [
        (["peer", "learner"], 0.5e6, 0, True),
        (["peer", "learner"], 2e6, 0, False),
        (["peer", "learner"], 2e6, 3e6, True),  # the pull would not be done in its time
        (["learner"], 100, 3e6, False),  # there is no other
    ],
)
def test_a_pace_is_asked_for_where_there_is_another_source(
    urls: list[str], bytes_per_s: float, least: float, slow: bool
) -> None:
    sources = Sources(urls)
    attempt = sources.begin(0)
    ended = False
    for tick in range(1, 41):
        sources.note(attempt, int(bytes_per_s * LOOK_S), tick * LOOK_S)
        ended = ended or sources.too_slow(attempt, tick * LOOK_S, least)
    assert ended == slow


def test_where_all_are_below_the_pace_less_is_asked_of_all() -> None:
    sources = Sources(["peer", "learner"])

    def ends(began: float) -> bool:
        attempt = sources.begin(began)
        for tick in range(1, 100):
            sources.note(attempt, 100_000, began + tick)
            if sources.too_slow(attempt, began + tick, 0):
                sources.failed(attempt, OSError("ended"), began + tick)
                return True
        return False

    assert [ends(1000.0 * n) for n in range(6)] == [True, True, True, True, False, False]


def test_who_lied_is_asked_no_more_but_the_learner_is_asked_last() -> None:
    sources = Sources(["peer", "learner"])
    sources.distrust(sources.all[1])
    assert sources.begin(0).source.url == "peer"
    sources.distrust(sources.all[0])
    assert sources.begin(0).source.url == "learner"


def test_a_closed_port_counts_from_its_first_refusal_and_not_while_others_bring_bytes() -> None:
    sources = Sources(["learner"])
    fails(sources, 5, ConnectionRefusedError())
    fails(sources, 15, ConnectionRefusedError())
    assert sources.gone_s(25) == 20
    sources.done(Attempt(PullSource("peer"), 0, 0, 0), 20)
    assert sources.gone_s(25) == 5
    fails(sources, 26, OSError("reset"))
    assert sources.gone_s(60) == 0


@dataclass
class Bad:
    """How a source of the fake world behaves at one request. bytes_per_s: while it sends. cut_after: bytes until it
    breaks off, or says nothing more (`mute`). wrong: its bytes."""

    bytes_per_s: float = 50e6
    cut_after: float = math.inf
    mute: bool = False
    wrong: bool = False
    error: Exception | None = None


GOOD = Bad()
bads = st.one_of(
    st.builds(Bad, bytes_per_s=st.sampled_from([0.5, 1e3, 1e5]), wrong=st.booleans()),  # trickles
    st.builds(Bad, cut_after=st.integers(0, SIZE), mute=st.booleans(), wrong=st.booleans()),
    st.just(Bad(wrong=True)),
    st.sampled_from(
        [OSError("x"), ConnectionRefusedError("x"), ValueError("x"), GoneError("x"), TimeoutError("x")]
    ).map(lambda error: Bad(error=error)),
)


@dataclass
class FakeWorld:
    """Sources by URL, each with what it does at one request after the other (the last over and over), and a clock that
    moves while they send or are silent."""

    behaviours: dict[str, list[Bad]]
    now: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)

    def next(self, url: str) -> Bad:
        number = self.requests[url] = self.requests.get(url, 0) + 1
        return self.behaviours[url][min(number, len(self.behaviours[url])) - 1]


class FakeWire(Wire):
    """A connection to the fake world."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__({})
        self._world = world
        self._cut = threading.Event()

    def end(self) -> None:
        self._cut.set()

    def read_range(self, url: str, start: int, into: memoryview, arrived: Callable[[int], bool]) -> None:
        self._cut.clear()
        bad, sent, owed = self._world.next(url), 0, 0.0
        if bad.error is not None:
            raise bad.error
        while sent < len(into):
            if sent >= bad.cut_after and not bad.mute:
                raise ConnectionResetError("cut")
            if self._cut.is_set():
                raise OSError("ended")
            owed += 0 if sent >= bad.cut_after else bad.bytes_per_s * LOOK_S
            count = int(min(owed, len(into) - sent, bad.cut_after - sent))
            # A fast one is done within the tick.
            self._world.now += min(LOOK_S, count / bad.bytes_per_s) if count else LOOK_S
            if count:
                owed -= count
                piece = WHOLE[start + sent : start + sent + count]
                into[sent : sent + count] = bytes(255 - byte for byte in piece) if bad.wrong else piece
                sent += count
                if not arrived(count):
                    return
            if sent < len(into):
                time.sleep(0.002)  # for who looks after it


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(bads, min_size=1, max_size=4), max_size=3),
    st.integers(0, 3),
)
def test_with_one_good_source_the_right_bytes_come_in_bounded_time(others: list[list[Bad]], place: int) -> None:
    """The good one may be any: the learner, or a peer next to a learner that is slow."""
    place = min(place, len(others))
    behaviours = [*others[:place], [GOOD], *others[place:]]
    if place < len(others):  # what the learner says is final: it may be slow, or break off
        behaviours[-1] = [Bad(b.bytes_per_s, b.cut_after, b.mute) for b in behaviours[-1]]
    world = FakeWorld({f"source-{number}": list(bad) for number, bad in enumerate(behaviours)})
    into = memoryview(bytearray(SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pull_module, "LOOK_EVERY_S", 0.0005)
        patch.setattr(rules, "RETRY_PAUSE_S", 0.0)
        outside = World(lambda: world.now, lambda headers: FakeWire(world))
        Pull(CHUNKS, "s", [*world.behaviours], into, 600, lanes=1, world=outside).run()
    assert bytes(into) == WHOLE
    # Each of the others may cost its silence or its pace a few times, as its behaviour changes.
    assert world.now < 120
