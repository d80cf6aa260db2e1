"""Tokens that samples share stand in a row once, and every sequence finds its own path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.feed import trie
from learner.model.trie_attention import layout, trie_attention

Sequences = list[npt.NDArray[np.int32]]


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    """Some that leave one another at random places, equal ones and beginnings of others among them."""
    tokens = st.lists(st.integers(0, 2), max_size=12)
    stem = draw(tokens)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        found.append([*stem[: draw(st.integers(0, len(stem)))], *draw(tokens)] or [0])
    return [np.array(tokens, dtype=np.int32) for tokens in found]


def visible(built: trie.Trie) -> npt.NDArray[np.bool_]:
    """bool [T, T], from the nodes: which tokens each token sees."""
    reach = np.repeat(built.reach, np.diff(built.starts))
    places = np.arange(built.tokens)
    return (places[None] <= places[:, None]) & (places[:, None] < reach[None])


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


@settings(deadline=None, max_examples=60)
@given(sequences(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.integers(0, 2**16))
def test_attention_and_its_gradients_are_those_of_the_dense_mask(
    given_: Sequences, heads: tuple[int, int], seed: int
) -> None:
    """In float64: merged by log-sum-exp, outputs and all three gradients agree to rounding."""
    torch.manual_seed(seed)
    built = trie.build(given_)
    inputs = [
        torch.randn(built.tokens, n, 8, dtype=torch.float64, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    ]
    merged = trie_attention(*inputs, layout(built.starts.tolist(), built.reach.tolist()), None)
    query, key, value = (tensor.transpose(0, 1) for tensor in inputs)
    key, value = (tensor.repeat_interleave(heads[0] // heads[1], 0) for tensor in (key, value))
    scores = (query @ key.mT / 8**0.5).masked_fill(~torch.from_numpy(visible(built)), -torch.inf)
    dense = (scores.softmax(-1) @ value).transpose(0, 1)
    upstream = torch.randn_like(dense)
    torch.testing.assert_close(merged, dense, atol=1e-12, rtol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(merged, inputs, upstream), torch.autograd.grad(dense, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
