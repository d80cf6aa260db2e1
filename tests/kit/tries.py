"""Tries for the tests of attention, and what attention along them is, computed plainly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from learner.feed import trie

Sequences = list[npt.NDArray[np.int32]]
Tensors = Sequence[torch.Tensor]


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    """Some that leave one another at random places, equal ones and beginnings of others among them."""
    tokens = st.lists(st.integers(0, 2), max_size=12)
    stem = draw(tokens)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        found.append([*stem[: draw(st.integers(0, len(stem)))], *draw(tokens)] or [0])
    return [np.array(tokens, dtype=np.int32) for tokens in found]


def visible(built: trie.Trie, window: int | None = None) -> npt.NDArray[np.bool_]:
    """bool [T, T], from the nodes: which tokens each token sees."""
    reach = np.repeat(built.reach, np.diff(built.starts))
    places = np.arange(built.tokens)
    seen: npt.NDArray[np.bool_] = (places[None] <= places[:, None]) & (places[:, None] < reach[None])
    return seen if window is None else seen & (built.depths[:, None] - built.depths[None] < window)


def inputs(
    tokens: int, heads: tuple[int, int], width: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query [tokens, heads[0], width], key and value [tokens, heads[1], width]."""
    query, key, value = (
        torch.randn(tokens, n, width, dtype=dtype, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    )
    return query, key, value


def dense(given: Tensors, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Attention of query, key and value, each [T, H, D], under the mask `seen`, in their own type."""
    query, key, value = (tensor.transpose(0, 1) for tensor in given)
    key, value = (tensor.repeat_interleave(len(query) // len(key), 0) for tensor in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~torch.from_numpy(seen), -torch.inf)
    out: torch.Tensor = (scores.softmax(-1) @ value).transpose(0, 1)
    return out


def assert_same(one: torch.Tensor, other: torch.Tensor, one_given: Tensors, other_given: Tensors, atol: float) -> None:
    """Two outputs, and the gradients of what each was computed from, agree; in the second's type."""
    upstream = torch.randn_like(other)
    gradients = torch.autograd.grad(one, list(one_given), upstream.to(one.dtype))
    expected = torch.autograd.grad(other, list(other_given), upstream)
    for ours, theirs in zip((one, *gradients), (other, *expected), strict=True):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, atol=atol, rtol=atol)
