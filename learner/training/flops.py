"""Model FLOPs utilisation: the arithmetic that the model needs, divided by what the device could do in the time.

As in PaLM (arXiv:2204.02311, appendix B), the model needs one forward and one backward pass of the policy: 6 FLOPs for
each weight that a token is multiplied with, and 12 for each pair of tokens in attention, layer and channel. Arithmetic
done twice (`learner.gradient_checkpointing`) or next to it (a reference, a survey, a tower of images) does not count,
so these lower the utilisation. Attention is causal here, tokens that samples share count once, and the output layer
sees scored tokens only. Of layers with a state (linear attention, convolutions) the weights count, not the recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.model.policy import Policy

# FLOPs a second in 16 bits, without sparsity, by the device's own name; the longest name that matches counts. From the
# makers' data sheets, which give twice as much where they count sparsity.
PEAKS = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H800": 989e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
}

# FLOPs of a multiplication and an addition, once forward and twice backward.
_EACH = 6

# Numbers of a layer's experts, and of those that a token goes to, in the configurations of transformers.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")


@dataclass(frozen=True)
class Work:
    """FLOPs that the policy needs.

    Attributes:
        per_token: For a token of a row, without attention.
        per_scored: For a scored token, in the output layer.
        per_attended: For each token that a token attends to, in one layer.
        full_layers: Number of layers that attend to all tokens.
        window_layers: Number of layers that attend to the newest `window` tokens.
        window: Tokens.
    """

    per_token: float
    per_scored: float
    per_attended: float
    full_layers: int
    window_layers: int = 0
    window: int = 0

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Derive them from the policy's config and weights."""
        config = policy.text.config
        heads = int(getattr(config, "num_attention_heads", 0))  # none in a model without attention
        channels = heads * int(getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
        full, sliding = attending_layers(config)
        window = int(getattr(config, "sliding_window", None) or 0)
        output = policy.model.get_output_embeddings().weight
        return cls(
            _EACH * _matrices(policy, config), _EACH * output.numel(), 2 * _EACH * channels, full, sliding, window
        )

    def of_rows(self, rows: Sequence[PackedRow]) -> float:
        """Return the FLOPs of a step over `rows`, which must be on the host, or this would wait for the GPU."""
        total = 0.0
        for row in rows:
            attended = row.position_ids + 1
            pairs = self.full_layers * int(attended.sum())
            if self.window_layers:
                pairs += self.window_layers * int(attended.clamp(max=self.window).sum())
            total += row.tokens * self.per_token + len(row.positions) * self.per_scored + pairs * self.per_attended
        return total


class Meter:
    """Measures the utilisation of the policy's device; without a known peak there is none."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._peak = peak(device, policy.precision.compute)
        self._work = Work.of(policy) if self._peak else None

    def flops(self, rows: Sequence[PackedRow]) -> float:
        """Return the FLOPs of a step over `rows`, which are on the host; 0 without a known peak."""
        return self._work.of_rows(rows) if self._work else 0.0

    def metrics(self, flops: float, seconds: float) -> dict[str, float]:
        """Return `mfu`, a share from 0 to 1, of a step that took `seconds`."""
        return {"mfu": flops / seconds / self._peak} if self._peak else {}


def _matrices(policy: Policy, config: Any) -> float:
    """Count the weights of the layers that a token is multiplied with: no embedding, no vector, and of the experts
    only those that it goes to."""
    share = share_of_experts(config)
    table = policy.model.get_input_embeddings().weight
    total = 0.0
    for name, weight in policy.text.named_parameters():
        if weight.ndim >= 2 and weight is not table:
            total += weight.numel() * (share if ".experts." in name else 1.0)
    return total


def attending_layers(config: Any) -> tuple[int, int]:
    """Count the layers that attend to all tokens, and those that attend to the newest `config.sliding_window`."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    attends = [kind for kind in kinds if kind == "hybrid" or ("attention" in kind and "linear" not in kind)]
    sliding = sum("sliding" in kind for kind in attends) if getattr(config, "sliding_window", None) else 0
    return len(attends) - sliding, sliding


def share_of_experts(config: Any) -> float:
    """Return the share of a layer's experts that a token goes to; 1 for a model without experts."""
    experts, chosen = (
        next((int(count) for name in names if (count := getattr(config, name, None))), 1)
        for names in (_EXPERTS, _CHOSEN)
    )
    return min(1.0, chosen / experts)


def peak(device: torch.device, compute: torch.dtype) -> float | None:
    """Return the FLOPs a second of the device in `compute`; None where unknown, as on a CPU and in float32."""
    if device.type != "cuda" or compute not in (torch.bfloat16, torch.float16):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Look a device up by its own name, such as NVIDIA H100 80GB HBM3 or NVIDIA A100-SXM4-80GB."""
    words = f" {name.replace('-', ' ')} "
    fitting = [known for known in PEAKS if all(f" {word} " in words for word in known.split())]
    return PEAKS[max(fitting, key=len)] if fitting else None
