from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from slipstream.learner.model.logprobs import LmHead, Mask, token_scores
from tests.kit.memory import LiveBytes

HIDDEN, VOCABULARY, TOKENS = 8, 50, 37
MIB = 2**20


class Case(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    upstream: torch.Tensor
    of_entropy: torch.Tensor

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def to(self, dtype: torch.dtype) -> Case:
        hidden, weight, bias = (
            None if leaf is None else leaf.detach().to(dtype).requires_grad_()
            for leaf in (self.hidden, self.weight, self.bias)
        )
        assert hidden is not None
        assert weight is not None
        return self._replace(hidden=hidden, weight=weight, bias=bias)


def case(with_bias: bool = False, tokens: int = TOKENS, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> Case:
    torch.manual_seed(0)
    return Case(
        torch.randn(tokens, hidden, requires_grad=True),
        torch.randn(vocabulary, hidden, requires_grad=True),
        torch.randn(vocabulary, requires_grad=True) if with_bias else None,
        torch.randint(vocabulary, (tokens,)),
        torch.randn(tokens),
        torch.randn(tokens),
    )


class Result(NamedTuple):
    """gradients: of the log-probs, of the entropy, and of both."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradients: list[torch.Tensor]


def gradients(of: Case, logprobs: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
    upstream, of_entropy = of.upstream.to(logprobs.dtype), of.of_entropy.to(logprobs.dtype)
    found: list[torch.Tensor] = []
    for values in ([logprobs], [entropy], [logprobs, entropy]):
        given = [upstream if value is logprobs else of_entropy for value in values]
        found += torch.autograd.grad(values, of.leaves, given, retain_graph=True)
    return found


def plain(of: Case, softcap: float | None = None, temperature: float = 1.0, mask: Mask | None = None) -> Result:
    """By autograd of the formula, in float64, from the same values."""
    of = of.to(torch.float64)
    logits = torch.nn.functional.linear(of.hidden, of.weight, of.bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        outside = torch.ones(logits.shape, dtype=torch.bool)
        outside[mask.tokens, mask.ids] = False
        outside[[token for token in range(len(logits)) if token not in mask.tokens]] = False
        logits = logits.masked_fill(outside, -1e15)
    full = (logits / temperature).log_softmax(-1)
    logprobs = full.gather(1, of.targets[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    return Result(logprobs, entropy, gradients(of, logprobs, entropy))


def ours(
    of: Case,
    logits_bytes: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    autocast: bool = False,
    mask: Mask | None = None,
) -> Result:
    """The backward runs outside autocast, as a training loop's does."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        head = LmHead(of.weight, of.bias, softcap, temperature, logits_bytes)
        scores = token_scores(head, of.hidden, of.targets, mask)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    return Result(scores.logprobs, scores.entropy, gradients(of, scores.logprobs, scores.entropy))


def off(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far, as a share of the wanted one's norm."""
    return float((actual.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


# Of 37 tokens and 50 words: one token and one word at a time; a few, with a rest; all.
@pytest.mark.parametrize("logits_bytes", [1, 8 * VOCABULARY * 10, MIB])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_log_softmax_of_the_full_logits(
    softcap: float | None, with_bias: bool, temperature: float, logits_bytes: int
) -> None:
    wanted = plain(case(with_bias), softcap, temperature)
    actual = ours(case(with_bias), logits_bytes, softcap, temperature)
    assert off(actual.logprobs, wanted.logprobs) < 1e-6
    assert off(actual.entropy, wanted.entropy) < 1e-6
    for gradient, expected in zip(actual.gradients, wanted.gradients, strict=True):
        assert off(gradient, expected) < 2e-6


@pytest.mark.parametrize("logits_bytes", [1, 8 * VOCABULARY * 10, MIB])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_sampling_mask_leaves_the_distribution_over_what_could_be_sampled(
    softcap: float | None, logits_bytes: int
) -> None:
    given, random = case(with_bias=True), torch.Generator().manual_seed(1)
    left = torch.rand(TOKENS, VOCABULARY, generator=random) < 0.1
    left[torch.arange(TOKENS), given.targets] = True
    left[5:9] = False  # these could be any
    left[11] = False
    left[11, given.targets[11]] = True
    mask = Mask(*left.nonzero().unbind(1))
    wanted = plain(given, softcap, 0.7, mask)
    actual = ours(given, logits_bytes, softcap, 0.7, mask=mask)
    assert actual.logprobs[11] == actual.entropy[11] == 0, "a token that was the only one"
    assert off(actual.logprobs, wanted.logprobs) < 1e-6
    assert off(actual.entropy, wanted.entropy) < 1e-6
    for gradient, expected in zip(actual.gradients, wanted.gradients, strict=True):
        assert off(gradient, expected) < 2e-6


# bfloat16 has 8 bits: each logit is off by up to 2^-9 of itself, and each gradient by as much.
@pytest.mark.parametrize("kind", ["autocast", "autocast of bfloat16 hidden states", "bfloat16 weights"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_is_as_near_as_its_rounding_allows(kind: str, softcap: float | None, with_bias: bool) -> None:
    given = case(with_bias, tokens=64, vocabulary=500, hidden=32).to(torch.bfloat16)
    wanted = plain(given, softcap, 0.9)
    if kind != "bfloat16 weights":
        masters = given.to(torch.float32)
        given = masters if kind == "autocast" else masters._replace(hidden=given.hidden)
    results = [ours(given, size, softcap, 0.9, autocast=kind != "bfloat16 weights") for size in (10_000, MIB)]
    for actual in results:
        assert off(actual.logprobs, wanted.logprobs) < 0.003
        # The entropy's depends on the logits of unlikely words too, the largest of which are off by 0.06.
        allowed = [share for share in (0.01, 0.04, 0.04) for _ in given.leaves]
        found = zip(actual.gradients, wanted.gradients, given.leaves * 3, allowed, strict=True)
        for gradient, expected, leaf, share in found:
            assert gradient.dtype == leaf.dtype
            assert off(gradient, expected) < share
    for one, other in zip(results[0].gradients, results[1].gradients, strict=True):
        assert off(one, other.double()) < 0.004  # two roundings


def test_a_weight_s_gradient_loses_nothing_in_bfloat16_however_small_its_chunks() -> None:
    """Added up in bfloat16, chunk after chunk of tokens, it would be 0.9 % off."""
    given = case(tokens=512, vocabulary=200).to(torch.bfloat16)
    wanted = plain(given).gradients[1]
    assert off(ours(given, 10 * 200 * 8).gradients[1], wanted) < 0.005


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_stays_within_its_bytes(autocast: bool, softcap: float | None) -> None:
    given = case(tokens=512, vocabulary=4000)
    with LiveBytes() as live:
        ours(given, MIB, softcap, autocast=autocast)
    beside = 4 * sum(leaf.nbytes for leaf in given.leaves) + 20 * 4 * 512  # gradients, casts, figures of tokens
    assert MIB / 2 < live.peak <= MIB + beside  # all logits are 8 MiB


@pytest.mark.parametrize("logits_bytes", [1, 8 * VOCABULARY * 10, MIB])
def test_other_ids_in_the_place_of_each_token_are_scored_with_it(logits_bytes: int) -> None:
    given, exact = case(with_bias=True), case(with_bias=True).to(torch.float64)
    random = torch.Generator().manual_seed(2)
    others = torch.randint(VOCABULARY, (TOKENS, 4), generator=random)
    others[:, 0] = given.targets  # the token may be among them
    share = torch.rand(TOKENS, 5, generator=random, dtype=torch.float64)
    full = (torch.nn.functional.linear(exact.hidden, exact.weight, exact.bias) / 0.7).log_softmax(-1)
    wanted = full.gather(1, torch.cat([given.targets[:, None], others], 1))
    expected = torch.autograd.grad((wanted * share).sum(), exact.leaves)
    scores = token_scores(
        LmHead(given.weight, given.bias, None, 0.7, logits_bytes), given.hidden, given.targets, others=others
    )
    assert scores.others is not None
    assert off(scores.others, wanted[:, 1:]) < 1e-6
    of_target = (scores.logprobs * share[:, 0]).sum()
    actual = torch.autograd.grad(of_target + (scores.others * share[:, 1:]).sum(), given.leaves)
    for gradient, right in zip(actual, expected, strict=True):
        assert off(gradient, right) < 2e-6
