from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils

from learner.feed.packing import pack_row
from learner.model.attention import layout, varlen_sdpa
from learner.model.policy import Policy
from tests.kit.learner import sample

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_buckets_cover_the_row_and_bound_the_padding(lengths: list[int]) -> None:
    buckets = layout(lengths, CPU).buckets
    assert [bucket.start for bucket in buckets] == [0, *[bucket.end for bucket in buckets[:-1]]]
    assert buckets[-1].end == sum(lengths)
    assert sum(bucket.count for bucket in buckets) == len(lengths)
    assert all(bucket.end - bucket.start >= 0.8 * bucket.count * bucket.length for bucket in buckets)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[9], [5, 5, 5], [12, 11, 10, 4, 1], [1, 8, 2]])
def test_each_sequence_attends_to_itself_only(heads: tuple[int, int], lengths: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, sum(lengths), 8) for n in (heads[0], heads[1], heads[1]))
    actual, _ = varlen_sdpa(torch.nn.Module(), query, key, value, None, varlen_layout=layout(lengths, CPU))
    start = 0
    for length in lengths:
        q, k, v = (tensor[0, :, start : start + length] for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(heads[0] // heads[1], 0) for tensor in (k, v))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        torch.testing.assert_close(actual[0, start : start + length], expected, atol=1e-5, rtol=1e-5)
        start += length


def test_model_output_equals_eager_attention(make_policy: Callable[..., Policy]) -> None:
    samples = [sample(length, 1, seed) for seed, length in enumerate([17, 16, 9, 2])]
    packed = make_policy()(pack_row(samples)).logprobs
    eager = make_policy("eager")
    apart = torch.cat([eager(pack_row([item])).logprobs for item in samples])
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
    call = {"varlen_layout": layout([9], CPU)}
    with pytest.raises(ValueError, match=r"sequence of 9 tokens .* window of 8"):
        varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, sliding_window=8, **call)
    varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, sliding_window=9, **call)


def test_attention_that_it_would_compute_wrongly_is_refused() -> None:
    tensor = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match="does not support softcap"):
        varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, varlen_layout=layout([9], CPU), softcap=30.0)
