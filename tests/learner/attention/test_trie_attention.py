"""Attention along a trie's paths is that of the dense mask, whatever the parts that it is computed in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.attention import cpu_layout
from slipstream.learner.attention.cpu import trie_attention
from slipstream.learner.feed import trie
from tests.kit.tries import Sequences, assert_same, dense, inputs, sequences, visible

# Settings that choose each kind of part even for tries of a few tokens: what is measured chooses for longer ones.
KINDS: dict[str, dict[str, float]] = {
    "as measured": {},
    "nodes and batches": {"MAX_MASKED_TOKENS": 0, "MAX_COPIED_TOKENS": 0},
    "nodes and slices": {"MAX_MASKED_TOKENS": 0, "MAX_COPIED_TOKENS": 0, "LARGE_SPAN": 1},
    "small masked blocks": {"MAX_MASKED_TOKENS": 6, "MAX_COPIED_TOKENS": 0, "LARGE_SPAN": 4, "ALIGNED_FROM": 1},
    "masks wherever they may be": {"SPAN_COST": 1e9, "MAX_COPIED_TOKENS": 0},
    "copies wherever they may be": {"SPAN_COST": 1e9, "MAX_MASKED_TOKENS": 0},
    "some copies, behind others": {"SPAN_COST": 1e9, "MAX_MASKED_TOKENS": 6, "MAX_COPIED_TOKENS": 5},
}


def choose(patch: pytest.MonkeyPatch, **values: float) -> None:
    for name, value in values.items():
        patch.setattr(cpu_layout, name, value)


def layout(built: trie.Trie) -> cpu_layout.TrieLayout:
    return cpu_layout.trie_layout(built.starts.tolist(), built.reach.tolist())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(given_=sequences(), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), seed=st.integers(0, 2**16))
def test_outputs_and_gradients_are_those_of_the_dense_mask(
    kind: str, given_: Sequences, heads: tuple[int, int], seed: int
) -> None:
    """In float64 they agree to rounding."""
    torch.manual_seed(seed)
    built = trie.build(given_)
    given_inputs = inputs(built.tokens, heads)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, **KINDS[kind])
        merged = trie_attention(*given_inputs, layout(built), None)
    assert_same(merged, dense(given_inputs, visible(built)), given_inputs, given_inputs, 5e-14)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(given_=sequences())
def test_the_parts_hold_every_pair_of_tokens_once(kind: str, given_: Sequences) -> None:
    built = trie.build(given_)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, **KINDS[kind])
        np.testing.assert_array_equal(pairs(layout(built), built.tokens), visible(built))


def pairs(parts: cpu_layout.TrieLayout, tokens: int) -> np.ndarray:
    """int64 [T, T]: how often each key is seen by each query; a slot that stands for no token is place T."""
    count = np.zeros((tokens + 1, tokens + 1), dtype=np.int64)
    first = 0
    for block in parts.blocks:
        inside = slice(first, first + block.count * block.length)
        queries, keys = (of[inside].view(block.count, -1).numpy() for of in (parts.places, parts.tokens))
        causal = torch.ones(block.length, block.length).tril().bool()
        seen = causal.expand(block.count, -1, -1) if block.mask is None else block.mask[:, 0] == 0
        for own, tokens_of, mask in zip(queries, keys, seen.numpy(), strict=True):
            np.add.at(count, np.ix_(own, tokens_of), mask)
        first = inside.stop
    for batch in parts.batches:
        keys = batch.keys.view(batch.count, -1).numpy()
        seen = np.ones(keys.shape, dtype=bool) if batch.mask is None else (batch.mask[:, 0, 0] == 0).numpy()
        for queries, own, mask in zip(batch.queries.view(batch.count, -1).numpy(), keys, seen, strict=True):
            np.add.at(count, np.ix_(queries, own[mask]), 1)
    for span in parts.spans:
        count[span.end : span.reach, span.start : span.end] += 1
    return count[:tokens, :tokens]


def test_many_short_branches_are_a_few_calls() -> None:
    random = np.random.default_rng(0)
    prompt = [7] * 100
    built = trie.build([np.array([*prompt, *random.integers(0, 4, 15)], dtype=np.int32) for _ in range(500)])
    parts = layout(built)
    assert (np.diff(built.starts) > 0).sum() > 700
    assert len(parts.blocks) + len(parts.batches) + len(parts.spans) < 50


def test_blocks_of_a_batch_are_of_like_length() -> None:
    random = np.random.default_rng(0)
    starts = [0, *np.cumsum(random.integers(1, 400, 300)).tolist()]
    parts = cpu_layout.trie_layout(starts, starts[1:])
    first = 0
    for batch in parts.blocks:
        inside = slice(first, first + batch.count * batch.length)
        lengths = (parts.places[inside].view(batch.count, -1) < starts[-1]).sum(1)
        assert lengths.min() >= 0.8 * batch.length
        first = inside.stop


def test_spans_within_one_another_are_in_batches_of_their_own() -> None:
    """A chain: what each turn leaves behind branches off, and the next continues."""
    turns = [np.array([*([1] * 4 * turn), 2, turn], dtype=np.int32) for turn in range(1, 20)]
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, MAX_MASKED_TOKENS=0, MAX_COPIED_TOKENS=0)
        parts = layout(trie.build(turns))
    for batch in parts.batches:
        queries = batch.queries[batch.queries < parts.slots.numel()]
        assert len(queries.unique()) == len(queries)


@pytest.mark.parametrize("width", [1, 7, 20, 33, 64, 80, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 5e-14), (torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)],
)
def test_any_head_width_and_type(width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Against the dense mask in float64. The kernels pad odd widths themselves."""
    torch.manual_seed(width)
    random = np.random.default_rng(width)
    stem = random.integers(0, 9, 30)
    given_ = [np.append(stem[: 3 * n], random.integers(0, 9, 6)).astype(np.int32) for n in range(11)]
    built = trie.build(given_)
    ours = inputs(built.tokens, (4, 2), width, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, MAX_MASKED_TOKENS=20, MAX_COPIED_TOKENS=4, LARGE_SPAN=60)
        parts = layout(built)
    assert parts.spans
    assert parts.batches
    assert any(block.mask is not None for block in parts.blocks)
    merged = trie_attention(*ours, parts, None)
    assert merged.dtype == dtype
    assert_same(merged, dense(exact, visible(built)), ours, exact, tolerance)


def test_merging_rounds_once_in_16_bits() -> None:
    """A chain of 30 turns: out is accumulated in float32, so its error is that of one rounding, not of thirty."""
    torch.manual_seed(0)
    turns = [np.array([*([1] * turn), 2], dtype=np.int32) for turn in range(1, 31)]
    built = trie.build(turns)
    given_ = [tensor.detach() for tensor in inputs(built.tokens, (2, 2), 16, torch.bfloat16)]
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, MAX_MASKED_TOKENS=0, MAX_COPIED_TOKENS=0)
        merged = trie_attention(*given_, layout(built), None)
    error = (merged.double() - dense([tensor.double() for tensor in given_], visible(built))).abs().max()
    assert error < 2 * math.ldexp(1.0, -8) * float(given_[2].abs().max())


def test_the_cheapest_parts_are_chosen() -> None:
    """Two branches of 12 below a token are one block; two of 200 below 200 tokens share it by a span, and below a
    single one each has a copy of it."""
    whole = cpu_layout.cut_row([0, 1, 13, 25], [25, 13, 25])
    assert whole == cpu_layout.RowParts([cpu_layout.RowBlock(0, 25, masked=True)])
    apart = cpu_layout.cut_row([0, 200, 400, 600], [600, 400, 600])
    assert apart.blocks == [cpu_layout.RowBlock(start, start + 200) for start in (0, 200, 400)]
    assert apart.spans == [cpu_layout.RowSpan(0, 200, 600)]
    copied = cpu_layout.cut_row([0, 1, 201, 401], [401, 201, 401])
    assert copied.spans == []
    assert copied.blocks == [
        cpu_layout.RowBlock(0, 1),
        cpu_layout.RowBlock(1, 201, above=((0, 1),)),
        cpu_layout.RowBlock(201, 401, above=((0, 1),)),
    ]


def test_a_long_chain_is_cut_without_a_search_of_all_its_ends() -> None:
    """Two thousand inner nodes within one another."""
    nodes = 4000
    starts = list(range(nodes + 1))
    reach = [nodes if node % 2 == 0 else node + 1 for node in range(nodes)]
    parts = cpu_layout.cut_row(starts, reach)
    assert sum(block.end - block.start for block in parts.blocks) == nodes
