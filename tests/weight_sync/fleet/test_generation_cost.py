"""What publications take from generation is read off tokens/s during them and between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.fleet.generation_cost import LEAST, NEWEST, GenerationCost, TokenCount


class Clock:
    """A server that samples at given rates."""

    def __init__(self) -> None:
        self.boot, self.at, self.tokens = "boot", 100.0, 0.0

    def passes(self, seconds: float, rate: float) -> TokenCount:
        self.at += seconds
        self.tokens += seconds * rate
        return TokenCount(self.boot, self.at, round(self.tokens))


def publish(cost: GenerationCost, server: Clock, times: int, between: float = 300.0, during: float = 150.0) -> None:
    """Publish each 3 s, for 1 s."""
    for _ in range(times):
        cost.published(server.passes(2.0, between), server.passes(1.0, during))


@given(
    between_s=st.floats(2.0, 100.0),
    during_s=st.floats(0.1, 100.0),
    between=st.floats(50.0, 1e6),
    left=st.floats(0.0, 1.2),
)
def test_the_share_is_what_the_server_would_have_sampled_more(
    between_s: float, during_s: float, between: float, left: float
) -> None:
    cost, server = GenerationCost(), Clock()
    for _ in range(LEAST + 1):
        cost.published(server.passes(between_s, between), server.passes(during_s, between * left))
    taken = during_s * (1 - left) / (between_s + during_s)
    assert cost.share == pytest.approx(max(0.0, taken), abs=0.03)


def test_nothing_is_said_before_enough_was_seen() -> None:
    cost, server = GenerationCost(), Clock()
    publish(cost, server, LEAST)  # nothing is known of the time before the first
    assert cost.share is None
    publish(cost, server, 1)
    assert cost.share == pytest.approx(1 / 6, abs=0.01)


@pytest.mark.parametrize("between", [0.0, 300.0])
def test_without_time_or_tokens_between_nothing_is_known(between: float) -> None:
    cost, server = GenerationCost(), Clock()
    for _ in range(2 * NEWEST):
        cost.published(server.passes(0.1 if between else 10.0, between), server.passes(5.0, 100.0))
    assert cost.share is None


def test_old_publications_are_forgotten() -> None:
    cost, server = GenerationCost(), Clock()
    publish(cost, server, 20, during=0.0)
    publish(cost, server, NEWEST, during=300.0)
    assert cost.share == pytest.approx(0.0, abs=0.01)


def test_a_restart_or_a_failed_publication_counts_as_no_time_between() -> None:
    cost, server = GenerationCost(), Clock()
    publish(cost, server, LEAST + 1)
    known = cost.share
    cost.publication_failed()
    server.passes(1000.0, 0.0)
    publish(cost, server, 1)
    server.boot, server.tokens = "again", 0.0
    publish(cost, server, 1)
    assert cost.share == known
    publish(cost, server, 3, during=300.0)
    assert cost.share is not None
    assert known is not None
    assert cost.share < known
