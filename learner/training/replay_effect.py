"""Measures what it changes that routers choose the recorded experts (`learner.router_replay`), over rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from slipstream.learner.feed.packing import PackedRow

_RECORDED, _FORWARDED = "replay_recorded", "replay_forwarded"
_WITH, _WITHOUT, _TOKENS = "replay_with", "replay_without", "replay_tokens"


def nothing(device: torch.device) -> dict[str, torch.Tensor]:
    """Return sums of zero. A step has the same sums as every other, whether it measures or not."""
    return {name: torch.zeros((), device=device) for name in (_RECORDED, _FORWARDED, _WITH, _WITHOUT, _TOKENS)}


def recorded(row: PackedRow) -> dict[str, torch.Tensor]:
    """Count a row's tokens, and those whose experts are known."""
    known = 0 * row.copies.sum() if row.experts is None else (row.experts[:, 0, 0] >= 0).sum()
    return {_RECORDED: known, _FORWARDED: known.new_tensor(row.tokens)}


@torch.no_grad()
def without(policy: torch.nn.Module, row: PackedRow) -> dict[str, torch.Tensor]:
    """Score a row with the routers' own choice; sum the distance of its tokens' log-probs from the sampler's."""
    apart = (policy(replace(row, experts=None)).logprobs - row.behaviour).abs().sum()
    return {_WITHOUT: 0 * apart if row.is_padding else apart}


def with_replay(distance: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum the same with the recorded experts. `distance`: float32 [N], log-probs minus the sampler's."""
    return {_WITH: distance.abs().sum(), _TOKENS: distance.new_tensor(len(distance))}


def metrics(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Make metrics from a step's sums, by their names in `metrics.jsonl`; what was not measured is left out."""
    found = {}
    if float(sums.get(_FORWARDED, 0)):
        found["router_replay/recorded"] = float(sums[_RECORDED]) / float(sums[_FORWARDED])
    if tokens := float(sums.get(_TOKENS, 0)):
        found["router_replay/logprob_diff"] = float(sums[_WITH]) / tokens
        found["router_replay/logprob_diff_without"] = float(sums[_WITHOUT]) / tokens
    return found
