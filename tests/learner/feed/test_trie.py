"""Tokens that samples share stand in a row once, and every sequence finds its own path."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.feed import trie
from tests.kit.tries import Sequences, sequences, visible


@settings(deadline=None)
@given(sequences(), st.booleans())
def test_every_sequence_finds_its_tokens_along_its_path(given_: Sequences, branches: bool) -> None:
    built = trie.build(given_, branches)
    assert sorted(built.order) == list(range(len(given_)))
    seen = visible(built)
    for index, places in zip(built.order, built.places, strict=True):
        np.testing.assert_array_equal(built.token_ids[places], given_[index])
        np.testing.assert_array_equal(built.depths[places], np.arange(len(places)))
        for depth, place in enumerate(places):
            np.testing.assert_array_equal(np.flatnonzero(seen[place]), places[: depth + 1])


@settings(deadline=None)
@given(sequences())
def test_every_distinct_prefix_stands_in_the_row_once(given_: Sequences) -> None:
    prefixes = {tuple(tokens[: size + 1]) for tokens in given_ for size in range(len(tokens))}
    assert trie.build(given_).tokens == len(prefixes)


@settings(deadline=None)
@given(sequences())
def test_without_branches_only_beginnings_are_shared(given_: Sequences) -> None:
    whole = {tuple(tokens) for tokens in given_}
    longest = [one for one in whole if not any(one != other and other[: len(one)] == one for other in whole)]
    built = trie.build(given_, branches=False)
    assert built.reach.tolist() == built.starts[1:].tolist()
    # A beginning of several stands in front of one of them.
    assert sum(map(len, longest)) <= built.tokens <= sum(map(len, whole))


def test_nodes_end_where_paths_part() -> None:
    built = trie.build([np.array(tokens, dtype=np.int32) for tokens in ([1, 2, 3], [1, 2, 4, 5], [1, 2], [6])])
    assert built.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert built.depths.tolist() == [0, 1, 2, 2, 3, 0]
    assert built.starts.tolist() == [0, 2, 3, 5, 6]
    assert built.reach.tolist() == [5, 3, 5, 6]
