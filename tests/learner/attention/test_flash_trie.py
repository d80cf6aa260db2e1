"""Trie attention on a GPU, without one: its layout, its merge, and the way that it calls torch's kernels.

The kernels are replaced by what they document, computed plainly: the signatures are those of the operators, and meta
tensors run through the operators themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.attention import flash
from slipstream.learner.attention.packed import RowLayout, varlen_sdpa
from slipstream.learner.feed import trie
from tests.kit.tries import Sequences, assert_same, dense, inputs, sequences, visible
from tests.learner.attention.test_attention import row_of

CPU = torch.device("cpu")
Calls = list[tuple[int, bool]]


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward: sequences end to end, out [t, H, D], log-sums [H, t], and three more."""
    check(cum_seq_q, cum_seq_k, query, key, max_q, max_k)
    assert (dropout_p, return_debug_mask) == (0.0, False)
    scores = between(query, key, cum_seq_q, cum_seq_k, is_causal, scale)
    out = (scores.softmax(-1) @ shared(value, query)).transpose(0, 1)
    return out.to(query.dtype), scores.logsumexp(-1), torch.empty(2), torch.empty(0), torch.empty(0)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_backward, arXiv:2205.14135, algorithm 4: from out and log-sums as they are given."""
    check(cum_seq_q, cum_seq_k, query, key, max_q, max_k)
    assert logsumexp.shape == (query.shape[1], len(query))
    assert grad_out.is_contiguous()
    weights = (between(query, key, cum_seq_q, cum_seq_k, is_causal, scale) - logsumexp[..., None]).exp()
    g, q, o = (tensor.transpose(0, 1).to(weights.dtype) for tensor in (grad_out, query, out))
    k, v = shared(key, query), shared(value, query)
    to_scores = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
    heads = key.shape[1]
    found = to_scores @ k, *((part).unflatten(0, (heads, -1)).sum(1) for part in (to_scores.mT @ q, weights.mT @ g))
    return tuple(part.transpose(0, 1).to(query.dtype) for part in found)


def check(
    cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor, query: torch.Tensor, key: torch.Tensor, max_q: int, max_k: int
) -> None:
    for bounds, tensor, longest in ((cum_seq_q, query, max_q), (cum_seq_k, key, max_k)):
        assert bounds.dtype == torch.int32
        assert (bounds[0], bounds[-1]) == (0, len(tensor))
        assert bounds.diff().min() > 0, "what the kernel gives for an empty sequence is not a softmax"
        assert bounds.diff().max() <= longest
    assert len(cum_seq_q) == len(cum_seq_k)
    assert max_q > 1, "the kernel swaps heads and queries"


def between(
    query: torch.Tensor,
    key: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Scores [H, t, s], -inf between sequences."""
    of_query, of_key = (torch.repeat_interleave(bounds.diff().long()) for bounds in (cum_seq_q, cum_seq_k))
    seen = of_query[:, None] == of_key[None]
    if is_causal:
        assert torch.equal(cum_seq_q, cum_seq_k)
        seen = seen.tril()
    exact = query.transpose(0, 1).to(torch.promote_types(query.dtype, torch.float32))
    return (exact @ shared(key, query).mT * scale).masked_fill(~seen, -torch.inf)


def shared(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[H, s, D], at least float32: query heads in order share the heads of keys."""
    exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return exact.transpose(0, 1).repeat_interleave(query.shape[1] // keys.shape[1], 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Tokens and causality of each forward call of the stand-in."""
    seen: Calls = []

    def forward(*arguments: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        seen.append((len(arguments[0]), arguments[8]))
        return flash_forward(*arguments, **more)

    monkeypatch.setattr(flash, "_forward", forward)
    monkeypatch.setattr(flash, "_backward", flash_backward)
    return seen


def layout(built: trie.Trie) -> flash.FlashLayout:
    return flash.flash_layout(built.starts.tolist(), built.reach.tolist(), CPU)


@settings(deadline=None, max_examples=60)
@given(sequences(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.integers(0, 2**16))
def test_outputs_and_gradients_are_those_of_the_dense_mask(
    given_: Sequences, heads: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    built = trie.build(given_)
    tensors = inputs(built.tokens, heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_forward", flash_forward)
        patch.setattr(flash, "_backward", flash_backward)
        merged = flash.flash_trie(*tensors, layout(built), None)
        assert_same(merged, dense(tensors, visible(built)), tensors, tensors, 5e-14)


def test_one_causal_call_and_one_for_each_level(calls: Calls) -> None:
    built = trie.build(
        [np.array(ids, dtype=np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7], [7, 8], [9, 9])]
    )
    flash.flash_trie(*inputs(built.tokens, (2, 2)), layout(built), None)
    assert built.tokens == 10
    # Below 1, 2 stand five tokens less the two themselves; 7 continues to 8 in its own node; below 4 stand 5 and 6.
    assert calls == [(10, True), (4, False), (2, False)]


def test_a_row_in_which_nothing_is_shared_is_one_call(calls: Calls) -> None:
    built = trie.build([np.array([1, 2, 3], dtype=np.int32), np.array([2, 3], dtype=np.int32)])
    flash.flash_trie(*inputs(built.tokens, (2, 2)), layout(built), None)
    assert calls == [(5, True)]


def test_in_16_bits_parts_are_merged_in_float32(calls: Calls) -> None:
    torch.manual_seed(0)
    built = trie.build([np.array([*([1] * turn), 2], dtype=np.int32) for turn in range(1, 31)])
    tensors = inputs(built.tokens, (4, 2), 16, torch.bfloat16)
    merged = flash.flash_trie(*tensors, layout(built), None)
    assert merged.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    assert_same(merged, dense(exact, visible(built)), tensors, exact, 5e-2)
    assert len(calls) > 20


def test_the_operators_take_these_arguments() -> None:
    """Run through torch's own shape functions: names, order and number of arguments, and the results' shapes."""
    built = trie.build([np.array(ids, dtype=np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7])])
    meta = torch.device("meta")
    tensors = [torch.empty(built.tokens, n, 16, dtype=torch.bfloat16, device=meta) for n in (4, 2, 2)]
    for tensor in tensors:
        tensor.requires_grad_()
    row_layout = flash.flash_layout(built.starts.tolist(), built.reach.tolist(), meta)
    out = flash.flash_trie(*tensors, row_layout, None)
    assert (out.shape, out.dtype) == (tensors[0].shape, torch.bfloat16)
    gradients = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]


def test_without_it_a_row_takes_its_paths() -> None:
    """On another device than a CPU, where FlashAttention is not to be had."""
    row = row_of([1, 2, 3, 4], [1, 2, 5])
    tensor = torch.empty(1, 2, row.tokens, 8, device="meta")
    assert not flash.flash_supports(tensor)
    row_layout = RowLayout(row.to(torch.device("meta")))
    out, _ = varlen_sdpa(torch.nn.Module(), tensor, tensor, tensor, None, row_layout=row_layout)
    assert out.shape == (1, row.tokens, 2, 8)
    assert "paths" in vars(row_layout)


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "taken"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 64, (8, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 65, (9, 0), False),
        (torch.bfloat16, 256, (9, 0), True),
        (torch.bfloat16, 224, (8, 6), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
    ],
)
def test_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, capability: tuple[int, int], taken: bool
) -> None:
    class OnCuda:
        device = torch.device("cuda", 0)
        shape = (5, 2, width)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    query = OnCuda()
    query.dtype = dtype  # type: ignore[attr-defined]
    assert flash.flash_supports(query) is taken  # type: ignore[arg-type]
