from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils

from learner.feed.packing import PackedRow, Sample, pack_row
from learner.model import trie_attention
from learner.model.attention import Layout, along_paths, layout, paths, varlen_sdpa
from learner.model.policy import Policy
from tests.kit.learner import sample

CPU = torch.device("cpu")


def row_of(*sequences: list[int]) -> PackedRow:
    """A row in which each sequence trains its last token."""
    samples = []
    for tokens in sequences:
        ids = np.array([*tokens, 0], dtype=np.int32)
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[-1] = 1.0
        samples.append(Sample(ids, weights, weights, np.zeros_like(ids), 0))
    return pack_row(samples)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_buckets_cover_the_row_and_bound_the_padding(lengths: list[int]) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    buckets = trie_attention.layout(starts, starts[1:]).buckets
    assert sorted(torch.cat([bucket.tokens for bucket in buckets]).tolist()) == list(range(sum(lengths)))
    assert sum(bucket.count for bucket in buckets) == len(lengths)
    assert all(len(bucket.slots) >= 0.8 * bucket.count * bucket.length for bucket in buckets)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5))
def test_attention_along_gathered_paths_is_that_of_the_trie(sequences: list[list[int]]) -> None:
    """What runs where there is no trie attention, such as on a GPU: outputs and gradients, here on a CPU."""
    row = row_of(*sequences)
    inputs = [torch.randn(row.tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    gathered = along_paths(*inputs, paths(row, CPU), None)
    merged = trie_attention.trie_attention(*inputs, trie_attention.layout(row.starts, row.reach), None)
    torch.testing.assert_close(gathered, merged, atol=1e-12, rtol=1e-10)
    upstream = torch.randn_like(merged)
    for one, other in zip(
        torch.autograd.grad(gathered, inputs, upstream), torch.autograd.grad(merged, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_a_cpu_takes_the_trie_and_other_devices_its_paths() -> None:
    row = row_of([1, 2, 3], [1, 2, 4])
    assert layout(row, CPU).paths is None
    elsewhere = layout(row, torch.device("meta"))
    assert elsewhere.trie is None
    assert elsewhere.longest == 3


def test_model_output_equals_eager_attention(make_policy: Callable[..., Policy]) -> None:
    samples = [sample(length, 1, seed, rollout=seed) for seed, length in enumerate([17, 16, 9, 2])]
    row = pack_row(samples)
    packed = make_policy()(row).logprobs
    eager = make_policy("eager")
    apart = torch.cat([eager(pack_row([samples[i]])).logprobs for i in row.rollout.unique_consecutive()])
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_transformers_builds_no_mask_for_it(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()

    def no_mask(*_: object, **__: object) -> None:
        raise AssertionError("a mask was built")

    for name in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, no_mask)
    policy(pack_row([sample(6, 2, 0), sample(5, 2, 1)]))


def test_a_window_that_would_cut_a_sequence_is_refused() -> None:
    tensor = torch.randn(1, 2, 9, 4)
    row_layout = Layout(9, trie=trie_attention.layout([0, 9], [9]))
    with pytest.raises(ValueError, match=r"sequence of 9 tokens .* window of 8"):
        varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, sliding_window=8, row_layout=row_layout)
    varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, sliding_window=9, row_layout=row_layout)


def test_attention_that_it_would_compute_wrongly_is_refused() -> None:
    tensor = torch.randn(1, 2, 9, 4)
    row_layout = Layout(9, trie=trie_attention.layout([0, 9], [9]))
    with pytest.raises(ValueError, match="does not support softcap"):
        varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, row_layout=row_layout, softcap=30.0)
