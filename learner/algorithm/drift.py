"""Measures how far the learner's policy is from the one that sampled: sums over a step's rows, and their metrics.

All sums have a fixed size, whatever the rows hold, so those of rows, and of ranks, add up. They stay on the device
until the step is over, and are then copied together. Percentiles are read off a histogram, since sorted values do not
add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.algorithm.objectives import MAX_LOG_RATIO

# Bins are even in asinh(x / FINEST), which is linear near 0 and logarithmic beyond: most log-ratios are around 1e-3,
# and a few are above 1. A percentile of x is off by at most the width of its bin: BIN * |x| + BIN * FINEST.
FINEST, BIN = 1e-4, 0.01

_EDGE = float(np.arcsinh(MAX_LOG_RATIO / FINEST))

BINS = int(np.ceil(2 * _EDGE / BIN))

# Tokens of this staleness or more share one bin.
MAX_STALENESS = 16

PERCENTILES = (1, 50, 99)

DISTANCE, DISTANCE_TOKENS = "sampler/distance/", "sampler/distance_tokens/"

# Only this many servers have metrics by name, so that the sums keep their size.
MAX_SERVERS = 64


def drift_sums(log_ratios: torch.Tensor, staleness: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum over a row's N tokens that train. On a GPU nothing waits for it.

    Args:
        log_ratios: float32 [N], log-probs of the policy minus the sampler's.
        staleness: int32 [N], in versions.

    Returns:
        One-dimensional tensors by name; `drift` and `stale` count tokens, in int64.
    """
    # A log-ratio that is not a number ends the step elsewhere; here it must not reach beyond the bins.
    places = torch.asinh(log_ratios.nan_to_num(nan=MAX_LOG_RATIO) / FINEST).add(_EDGE).div(BIN).long()
    ages = staleness.long().clamp(0, MAX_STALENESS)
    one = torch.ones_like(places)
    return {
        "drift": _added(BINS, places.clamp(0, BINS - 1), one),
        "stale": _added(MAX_STALENESS + 1, ages, one),
        "stale_kl": _added(MAX_STALENESS + 1, ages, -log_ratios),
    }


def server_drift_sums(log_ratios: torch.Tensor, fresh: torch.Tensor, server: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum over a row's N tokens that train, by the server that sampled them.

    Args:
        log_ratios: float32 [N], as in `drift_sums`.
        fresh: bool [N], whether the version that trains sampled the token.
        server: int32 [N], see `PackedRow`.

    Returns:
        One-dimensional tensors by name.
    """
    places = server.long().clamp(0, MAX_SERVERS)
    return {
        "server_tokens": _added(MAX_SERVERS + 1, places, fresh.long()),
        "server_distance": _added(MAX_SERVERS + 1, places, torch.where(fresh, log_ratios.abs(), 0.0)),
    }


def zero_sums(device: torch.device) -> dict[str, torch.Tensor]:
    """Return sums of zero, the start of a step."""
    none, whole = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    return {**drift_sums(none, whole), **server_drift_sums(none, whole.bool(), whole)}


def drift_metrics(sums: Mapping[str, torch.Tensor], servers: Sequence[str] = ()) -> dict[str, float]:
    """Make metrics from a step's sums, by their names in `metrics.jsonl`. A metric over no tokens is left out.

    `sampler/ratio_p<n>`: percentiles of the ratio policy / sampler over all tokens that train.
    `sampler/kl_staleness_<s>` for s >= 1: KL(sampler, learner) in nats, the mean of -log r over the tokens of that
    staleness (joschu.net/blog/kl-approx.html, k1; `slipstream.learner.training.trainer` says why not k3).
    `sampler/distance/<server>`: the mean of |log r| in nats over the fresh tokens that this server sampled,
    `sampler/distance_tokens/<server>` of them. Unlike a KL it is not the square of the difference.

    Args:
        servers: Names of the servers, by the numbers that rows have for them.
    """
    together = torch.cat([value.double() for value in sums.values()]).cpu().numpy()
    parts = np.split(together, np.cumsum([len(value) for value in sums.values()])[:-1])
    found = dict(zip(sums, parts, strict=True))
    shown = {f"sampler/ratio_p{percent}": value for percent, value in _percentiles(found["drift"]).items()}
    for age in range(1, MAX_STALENESS + 1):
        if tokens := found["stale"][age]:
            shown[f"sampler/kl_staleness_{age}"] = float(found["stale_kl"][age] / tokens)
    for place, name in enumerate(servers[:MAX_SERVERS]):
        tokens, distance = found["server_tokens"][place], found["server_distance"][place]
        if tokens:
            shown[f"{DISTANCE}{name}"] = float(distance / tokens)
            shown[f"{DISTANCE_TOKENS}{name}"] = int(tokens)
    return shown


def _added(size: int, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, places, values)


def _percentiles(counts: npt.NDArray[np.float64]) -> dict[int, float]:
    """Return percentiles of the ratio, by percent, from the histogram of its logarithm. In a bin, values are taken to
    be spread evenly."""
    ends = np.cumsum(counts)
    if not len(ends) or not ends[-1]:
        return {}
    found = {}
    for percent in PERCENTILES:
        wanted = ends[-1] * percent / 100
        place = int(np.searchsorted(ends, wanted))
        share = (wanted - (ends[place] - counts[place])) / counts[place]
        found[percent] = float(np.exp(FINEST * np.sinh((place + share) * BIN - _EDGE)))
    return found
