"""Log-probs of given tokens from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from learner.algorithm.router_loss import Routing


class TokenScores(NamedTuple):
    """logprobs: float32 [N]; entropy: float32 [N] in nats, of the same distributions. Both are differentiable; a
    backward pass that does not come through the entropy takes no time for it. routing: how the row's tokens were routed
    to experts, where it was asked for."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    routing: Routing | None = None


@dataclass(frozen=True)
class LmHead:
    """The output layer: logits = softcap(hidden @ weight.T + bias) / temperature.

    weight: [V, h]; bias: [V] or None; softcap: `final_logit_softcapping`, c * tanh(x / c), or None;
    chunk_tokens: tokens whose logits exist at one time.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    temperature: float
    chunk_tokens: int

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]. The product is in the model's type, as in vLLM; the rest is in float32."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)


def token_scores(lm_head: LmHead, hidden: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Scores of `targets` (int64 [N]), predicted by `hidden` ([N, h])."""
    logprobs, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head.weight, lm_head.bias, targets, lm_head
    )
    return TokenScores(logprobs, entropy)


class _TokenScores(torch.autograd.Function):
    """Forward keeps one float a token, the log of the softmax's sum; backward computes each chunk's logits again.

    On a CPU, a quarter faster than `torch.utils.checkpoint` around log_softmax, with half the buffers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        lm_head: LmHead,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for chunk in _chunks(len(targets), lm_head.chunk_tokens):
            logits = lm_head.logits(hidden[chunk])
            highest = logits.amax(-1, keepdim=True)
            logits -= highest
            chosen = logits.gather(1, targets[chunk, None])[:, 0]
            exponentials = logits.exp()
            sums = exponentials.sum(-1)
            log_sum = sums.log()
            logprobs[chunk] = chosen - log_sum
            entropy[chunk] = log_sum - torch.linalg.vecdot(exponentials, logits) / sums
            log_sums[chunk] = log_sum + highest[:, 0]
        ctx.save_for_backward(hidden, targets, log_sums, entropy)
        ctx.lm_head = lm_head
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, log_sums, entropy = ctx.saved_tensors
        lm_head, (given, of_entropy) = ctx.lm_head, gradients
        upstream = torch.zeros_like(log_sums) if given is None else given
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(lm_head.weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(lm_head.bias) if ctx.needs_input_grad[2] else None
        for chunk in _chunks(len(targets), lm_head.chunk_tokens):
            logits = lm_head.logits(hidden[chunk])
            slope = _softcap_slope(lm_head, logits)
            logits.sub_(log_sums[chunk, None])
            # p, the softmax: d logprob / d logits = onehot(target) - p, d entropy / d logits = -p (log p + entropy)
            factor = -upstream[chunk, None]
            if of_entropy is not None:
                factor = (logits + entropy[chunk, None]).mul_(-of_entropy[chunk, None]).add_(factor)
            gradient = logits.exp_().mul_(factor)
            gradient.scatter_add_(1, targets[chunk, None], upstream[chunk, None])
            gradient = (gradient if slope is None else gradient.mul_(slope)).div_(lm_head.temperature)
            gradient = gradient.to(lm_head.weight.dtype)
            torch.mm(gradient, lm_head.weight, out=to_hidden[chunk])
            if to_weight is not None:
                to_weight.addmm_(gradient.T, hidden[chunk])
            if to_bias is not None:
                to_bias += gradient.sum(0)
        return to_hidden, to_weight, to_bias, None, None


def _softcap_slope(lm_head: LmHead, logits: torch.Tensor) -> torch.Tensor | None:
    """Derivative of c * tanh(x / c), from its value: 1 - tanh(x / c)^2."""
    if lm_head.softcap is None:
        return None
    return 1 - (logits * (lm_head.temperature / lm_head.softcap)).square_()


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
