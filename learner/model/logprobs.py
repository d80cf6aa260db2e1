"""Log-probs of given tokens from hidden states, without ever holding the logits of all tokens.

Both passes take all tokens over a part of the vocabulary at a time. The forward pass adds up each softmax's sum as it
goes (arXiv:1805.02867). The backward pass is given its log (arXiv:2411.09009, section 4.3): the weight's gradient is
written once and never added up in a low precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from slipstream.learner.algorithm.loss_terms import Routing

# The logit of a token that could not be sampled. Finite, so that 0 times it is 0.
_NEVER = -1e30

# A CPU is fastest with a chunk that stays in its cache, if that is not too few rows for the matrix product.
CPU_LOGITS = 2**19
CPU_ROWS = 256


class TokenScores(NamedTuple):
    """Scores of N tokens. Log-probs and entropies are differentiable; a backward pass that does not use the entropy
    takes no time for it.

    Attributes:
        logprobs: float32 [N].
        entropy: float32 [N] in nats, of the same distributions.
        routing: How the row's tokens were routed to experts, where that was asked for.
        others: float32 [N, k], log-probs of k other ids in the place of each token, where that was asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    routing: Routing | None = None
    others: torch.Tensor | None = None


class Mask(NamedTuple):
    """What could be sampled in the place of each of N tokens. A token that has no entry could be any.

    Attributes:
        tokens: int64 [M], ascending.
        ids: int64 [M].
    """

    tokens: torch.Tensor
    ids: torch.Tensor

    def apply(self, logits: torch.Tensor, tokens: slice, words: slice) -> None:
        """Set logits, [n, v] of these tokens and words, to `_NEVER` where nothing could be sampled. Waits for no
        device: entries of other tokens and words are carried along."""
        count, width = logits.shape
        token, word = self.tokens - tokens.start, self.ids - words.start
        of_tokens = (token >= 0) & (token < count)
        inside = of_tokens & (word >= 0) & (word < width)
        place = torch.where(inside, token * width + word, 0)
        left = torch.where(inside, logits.view(-1)[place], _NEVER)
        masked = torch.zeros(count + 1, dtype=torch.bool, device=logits.device)
        masked[torch.where(of_tokens, token, count)] = True
        logits.masked_fill_(masked[:count, None], _NEVER)
        logits.view(-1).scatter_reduce_(0, place, left, "amax")


@dataclass(frozen=True)
class LmHead:
    """The output layer: logits = softcap(scale * (hidden @ weight.T + bias)) / temperature.

    Attributes:
        weight: [V, h].
        bias: [V] or None.
        softcap: `final_logit_softcapping`, c in c * tanh(x / c), or None.
        logits_bytes: Bytes that logits, and all that is made from them, may take at one time.
        scale: Factor of the product.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    temperature: float
    logits_bytes: int
    scale: float = 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [n, V], of hidden states [n, h]."""
        whole = _Chunks(self, _compute_type(self, hidden), len(hidden) * len(self.weight), spares=0)
        return whole.logits(hidden.to(whole.type), slice(0, len(self.weight)))


def token_scores(
    lm_head: LmHead,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    mask: Mask | None = None,
    others: torch.Tensor | None = None,
) -> TokenScores:
    """Score `targets`, int64 [N], and `others`, int64 [N, k], as predicted by `hidden`, [N, h], among the tokens that
    could be sampled."""
    ids = targets[:, None] if others is None else torch.cat([targets[:, None], others], dim=1)
    logprobs, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head.weight, lm_head.bias, ids, lm_head, mask
    )
    return TokenScores(logprobs[:, 0], entropy, others=None if others is None else logprobs[:, 1:])


class _TokenScores(torch.autograd.Function):
    """The forward pass keeps one float a token, the log of the softmax's sum. The backward pass computes the logits
    again, in the type of the forward pass, under autocast or not."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        lm_head: LmHead,
        mask: Mask | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute, vocabulary = _compute_type(lm_head, hidden), len(weight)
        inputs, rows = hidden.to(compute), slice(0, len(targets))
        size = _chunk(lm_head, compute, vocabulary, len(targets), spares=1)
        chunks = _Chunks(lm_head, compute, size * len(targets), spares=1)
        # Of the words so far: the highest logit, sum of exp(logit - highest), and of the same times (logit - highest).
        highest = torch.full((len(targets), 1), _NEVER, dtype=torch.float32, device=hidden.device)
        sums, moments = torch.zeros_like(highest), torch.zeros_like(highest)
        chosen = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        for words in _slices(vocabulary, size):
            logits = chunks.logits(inputs, words)
            if mask is not None:
                mask.apply(logits, rows, words)
            place = targets - words.start
            inside = (place >= 0) & (place < logits.shape[1])
            chosen += torch.where(inside, logits.gather(1, place.clamp(0, logits.shape[1] - 1)), 0.0)
            higher = torch.maximum(highest, logits.amax(-1, keepdim=True))
            shift = highest - higher
            scale = shift.exp()
            moments = scale * (moments + shift * sums)
            sums, highest = sums * scale, higher
            exponentials = torch.exp(logits.sub_(highest), out=chunks.spare(0, logits))
            sums += exponentials.sum(-1, keepdim=True)
            moments += exponentials.mul_(logits).sum(-1, keepdim=True)
        log_sum = sums.log()
        log_sums = (log_sum + highest)[:, 0]
        logprobs = chosen - log_sums[:, None]
        entropy = (log_sum - moments / sums)[:, 0]
        ctx.save_for_backward(hidden, targets, log_sums, entropy)
        ctx.lm_head, ctx.compute, ctx.mask = lm_head, compute, mask
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, log_sums, entropy = ctx.saved_tensors
        lm_head, compute, vocabulary = ctx.lm_head, ctx.compute, len(ctx.lm_head.weight)
        given, of_entropy = (None if each is None else each / lm_head.temperature for each in gradients)
        upstream = torch.zeros(targets.shape, device=hidden.device) if given is None else given
        whole = upstream.sum(1, keepdim=True)
        inputs = hidden.to(compute)
        to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        to_weight = torch.empty_like(lm_head.weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.empty_like(lm_head.bias) if ctx.needs_input_grad[2] else None
        spares = (lm_head.softcap is not None) + (of_entropy is not None)
        size = _chunk(lm_head, compute, vocabulary, len(targets), spares)
        chunks = _Chunks(lm_head, compute, size * len(targets), spares)
        for words in _slices(vocabulary, size):
            logits = chunks.logits(inputs, words)
            slope = chunks.softcap_slope(logits)
            if ctx.mask is not None:
                ctx.mask.apply(logits, slice(0, len(targets)), words)
            logits.sub_(log_sums[:, None])
            # p, the softmax: d logprob / d logits = onehot(target) - p, d entropy / d logits = -p (log p + entropy)
            factor = -whole
            if of_entropy is not None:
                factor = torch.add(logits, entropy[:, None], out=chunks.spare(spares - 1, logits))
                factor.mul_(-of_entropy[:, None]).sub_(whole)
            gradient = logits.exp_().mul_(factor)
            place = targets - words.start
            own = torch.where((place >= 0) & (place < gradient.shape[1]), upstream, 0.0)
            gradient.scatter_add_(1, place.clamp_(0, gradient.shape[1] - 1), own)
            if slope is not None:
                gradient.mul_(slope)
            if lm_head.scale != 1.0:
                gradient.mul_(lm_head.scale)
            gradient = chunks.computed(gradient)
            _add_product(to_hidden, gradient, chunks.weight[words])
            if to_weight is not None:
                _set_product(to_weight[words], gradient.T, inputs)
            if to_bias is not None:
                to_bias[words] = gradient.sum(0, dtype=torch.float32)
        return to_hidden.to(hidden.dtype), to_weight, to_bias, None, None, None


class _Chunks:
    """The head in the type that computes, and buffers of `elements` logits each that one chunk after another uses.

    The product is in that type, as at the servers; the rest is in float32.
    """

    def __init__(self, lm_head: LmHead, compute: torch.dtype, elements: int, spares: int) -> None:
        self.type = compute
        self.weight = lm_head.weight.to(compute)
        self._bias = None if lm_head.bias is None else lm_head.bias.to(compute)
        self._lm_head = lm_head
        self._logits = self.weight.new_empty(elements, dtype=torch.float32)
        self._product = self._logits if compute is torch.float32 else self.weight.new_empty(elements)
        self._spares = [torch.empty_like(self._logits) for _ in range(spares)]

    def logits(self, hidden: torch.Tensor, words: slice) -> torch.Tensor:
        """Return float32 [n, v] for v words, from `hidden`, [n, h], in the type that computes."""
        weight, head = self.weight[words], self._lm_head
        shape = len(hidden), len(weight)
        product, logits = _shaped(self._product, shape), _shaped(self._logits, shape)
        if self._bias is None:
            torch.mm(hidden, weight.T, out=product)
        else:
            torch.addmm(self._bias[words], hidden, weight.T, out=product)
        if self._product is not self._logits:
            logits.copy_(product)
        if head.scale != 1.0:
            logits.mul_(head.scale)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        return logits if head.temperature == 1.0 else logits.div_(head.temperature)

    def spare(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return a float32 buffer of the shape of `like`."""
        return _shaped(self._spares[number], tuple(like.shape))

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        """Convert float32 values to the type that computes."""
        return values if self.type is torch.float32 else _shaped(self._product, tuple(values.shape)).copy_(values)

    def softcap_slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of c * tanh(x / c) from its value: 1 - tanh(x / c)^2."""
        head = self._lm_head
        if head.softcap is None:
            return None
        slope = torch.mul(logits, head.temperature / head.softcap, out=self.spare(0, logits))
        return slope.square_().neg_().add_(1)


def _compute_type(lm_head: LmHead, hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return lm_head.weight.dtype


def _chunk(lm_head: LmHead, compute: torch.dtype, count: int, width: int, spares: int) -> int:
    """Return how many of `count` rows of `width` logits, one at least, fit `logits_bytes` with all buffers of
    `_Chunks`."""
    bytes_each = 4 + 4 * spares + (0 if compute is torch.float32 else compute.itemsize)
    width = max(1, width)
    fitting = min(count, lm_head.logits_bytes // (bytes_each * width))
    if lm_head.weight.device.type == "cpu":
        fitting = min(fitting, max(CPU_ROWS, CPU_LOGITS // width))
    return max(1, fitting)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _shaped(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _set_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype is into.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(left @ right)
