from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from learner.model.logprobs import LmHead, token_scores

HIDDEN, VOCABULARY, TOKENS = 8, 50, 37


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 10, 1024])
def test_equals_log_softmax_of_the_full_logits(
    softcap: float | None, with_bias: bool, temperature: float, chunk_tokens: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    bias = torch.randn(VOCABULARY, requires_grad=True) if with_bias else None
    targets = torch.randint(VOCABULARY, (TOKENS,))
    upstream = torch.randn(TOKENS)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]

    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = (logits / temperature).log_softmax(-1)
    expected = full.gather(1, targets[:, None])[:, 0]
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)

    scores = token_scores(LmHead(weight, bias, softcap, temperature, chunk_tokens), hidden, targets)
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-5)
    for actual, wanted in zip(torch.autograd.grad(scores.logprobs, leaves, upstream), expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("of_logprobs", [1.0, 0.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [10, 1024])
def test_the_entropy_has_the_gradient_of_the_plain_formula(
    of_logprobs: float, softcap: float | None, temperature: float, chunk_tokens: int
) -> None:
    """With that of the log-probs beside it, and alone."""
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), VOCABULARY)]
    targets = torch.randint(VOCABULARY, (TOKENS,))
    upstream = [of_logprobs * torch.randn(TOKENS), torch.randn(TOKENS)]

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = torch.nn.functional.linear(*doubles)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = (logits / temperature).log_softmax(-1)
    plain = [full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)]
    expected = torch.autograd.grad(plain, doubles, [gradient.double() for gradient in upstream])

    scores = token_scores(LmHead(leaves[1], leaves[2], softcap, temperature, chunk_tokens), leaves[0], targets)
    asked = [(score, gradient) for score, gradient in zip(scores, upstream, strict=True) if gradient.any()]
    actual = torch.autograd.grad([score for score, _ in asked], leaves, [gradient for _, gradient in asked])
    for ours, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=3e-6, rtol=1e-5)


def test_bfloat16_weights_give_float32_scores() -> None:
    hidden = torch.randn(5, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    scores = token_scores(LmHead(weight, None, None, 1.0, 2), hidden, torch.randint(VOCABULARY, (5,)))
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    scores.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor made by any operation had, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_never_holds_the_logits_of_all_tokens() -> None:
    tokens, vocabulary, chunk = 512, 2000, 32
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    with _LargestTensor() as largest:
        scores = token_scores(LmHead(weight, None, None, 0.9, chunk), hidden, torch.randint(vocabulary, (tokens,)))
        scores.logprobs.sum().backward()
    assert largest.elements == chunk * vocabulary  # far from tokens * vocabulary = 16 times as many
