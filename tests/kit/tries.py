"""Makes tries for the tests of attention, and computes attention along them in the simplest way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from slipstream.learner.feed import trie

Sequences = list[npt.NDArray[np.int32]]
Tensors = Sequence[torch.Tensor]


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    """Draw 1 to 6 sequences that share beginnings and part at random places.

    Some may be equal, or the beginning of another.
    """
    tokens = st.lists(st.integers(0, 2), max_size=12)
    stem = draw(tokens)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        found.append([*stem[: draw(st.integers(0, len(stem)))], *draw(tokens)] or [0])
    return [np.array(tokens, dtype=np.int32) for tokens in found]


def visible(built: trie.Trie, window: int | None = None) -> npt.NDArray[np.bool_]:
    """Compute from the nodes of a trie which tokens each token sees.

    Args:
        built: A trie of T tokens.
        window: Number of tokens that each sees at most, itself included; None for no limit.

    Returns:
        bool [T, T], with a row for each token that sees.
    """
    reach = np.repeat(built.reach, np.diff(built.starts))
    places = np.arange(built.tokens)
    seen: npt.NDArray[np.bool_] = (places[None] <= places[:, None]) & (places[:, None] < reach[None])
    return seen if window is None else seen & (built.depths[:, None] - built.depths[None] < window)


def inputs(
    tokens: int, heads: tuple[int, int], width: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a random query [tokens, heads[0], width], key and value [tokens, heads[1], width]."""
    query, key, value = (
        torch.randn(tokens, n, width, dtype=dtype, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    )
    return query, key, value


def dense(given: Tensors, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Compute attention in the inputs' own dtype.

    Args:
        given: Query, key and value, each [T, H, D].
        seen: bool [T, T]: True where a token (row) sees another (column).

    Returns:
        [T, H, D], with the heads of the query.
    """
    query, key, value = (tensor.transpose(0, 1) for tensor in given)
    key, value = (tensor.repeat_interleave(len(query) // len(key), 0) for tensor in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~torch.from_numpy(seen), -torch.inf)
    out: torch.Tensor = (scores.softmax(-1) @ value).transpose(0, 1)
    return out


def assert_same(one: torch.Tensor, other: torch.Tensor, one_given: Tensors, other_given: Tensors, atol: float) -> None:
    """Assert that two outputs agree, and the gradients of their inputs, in the dtype of the second.

    Args:
        one: First output.
        other: Second output.
        one_given: Inputs of the first output.
        other_given: Inputs of the second output.
        atol: Absolute and relative tolerance.
    """
    upstream = torch.randn_like(other)
    gradients = torch.autograd.grad(one, list(one_given), upstream.to(one.dtype))
    expected = torch.autograd.grad(other, list(other_given), upstream)
    for ours, theirs in zip((one, *gradients), (other, *expected), strict=True):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, atol=atol, rtol=atol)
