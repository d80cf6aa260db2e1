"""Checks the sampler's log-probs: against the learner's at staleness 0, and each server against its own past. No I/O.

At staleness 0 sampler and learner are one policy, so the KL between them is the difference of their arithmetic.
Anything more is in the ratio of every token of every step, where nobody would see it. Turns during which an update
landed are left out: servers continue them with the keys and values of the older weights.

The proof looks at a server once a publication; `ServerWatch` looks at every token that the newest version sampled and
that trains. A server's mean of |log r| stays about the same. If it leaves its range, the server's weights, caches or
arithmetic have changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from slipstream.learner.algorithm.drift import DISTANCE, DISTANCE_TOKENS
from slipstream.learner.training.base import StepMetrics

# With fewer tokens, one or two strange ones decide the mean.
MIN_TOKENS = 64

# A server's usual distance is the median of its last REMEMBERED steps; with fewer than LEARNT it is unknown.
REMEMBERED, LEARNT = 64, 8

# An alarm: UNUSUAL times the usual distance, in IN_A_ROW steps of the server in a row.
UNUSUAL, IN_A_ROW = 4.0, 3

# Nats. Below this a multiple says nothing: float32 differs by about 1e-6.
LEAST = 1e-5

# Nats a token. In float32 the quickstart's is 4e-7, and with top_p = 0.9 it is 0.02.
SUSPICIOUS_KL = 0.01

CAUSES = (
    "Likely causes: log-probs of another kind (a server without --logprobs-mode processed_logprobs), or arithmetic "
    "that differs (model.dtype, a quantised server, vllm.args, the routing of a mixture of experts)"
)


@dataclass
class _Seen:
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    in_a_row: int = 0
    back: bool = False


class ServerWatch:
    """Watches the servers of one session."""

    def __init__(self) -> None:
        self._servers: dict[str, _Seen] = {}

    def step(self, metrics: Mapping[str, float]) -> list[str]:
        """Judge a step.

        Args:
            metrics: The step's metrics by their names (`slipstream.learner.algorithm.drift`).

        Returns:
            An alarm for each server that left its range, once until it is back in it.
        """
        distances = {
            name.removeprefix(DISTANCE): distance
            for name, distance in metrics.items()
            if name.startswith(DISTANCE) and metrics.get(DISTANCE_TOKENS + name.removeprefix(DISTANCE), 0) >= MIN_TOKENS
        }
        return [text for name, distance in distances.items() if (text := self._judge(name, distance, distances))]

    def back(self) -> list[str]:
        """Return the names of the servers that were named in an alarm and are back in their range, each once."""
        found = [name for name, seen in self._servers.items() if seen.back]
        for name in found:
            self._servers[name].back = False
        return found

    def _judge(self, name: str, distance: float, distances: Mapping[str, float]) -> str | None:
        seen = self._servers.setdefault(name, _Seen())
        others = [of for other, of in distances.items() if other != name]
        usual = max(LEAST, median(seen.usual)) if len(seen.usual) >= LEARNT else None
        # If the others are as far, the policy or the learner has changed, and no server.
        with_others = bool(others) and distance <= UNUSUAL * median(others)
        if usual is None or distance <= UNUSUAL * usual or with_others:
            seen.usual.append(distance)
            seen.back = seen.back or seen.in_a_row >= IN_A_ROW
            seen.in_a_row = 0
            return None
        seen.in_a_row += 1
        if seen.in_a_row != IN_A_ROW:
            return None
        return (
            f"{name} samples farther from the learner's policy than it did: {DISTANCE}{name} is {distance:.2g} nats a "
            f"token, {distance / usual:.0f} times what is usual for it, for {IN_A_ROW} steps of its in a row. Its "
            f"weights or its arithmetic are not what they were: look at its log, and start it again unless this is "
            f"said to be over"
        )


def suspicious(metrics: StepMetrics) -> bool:
    """Say whether learner and sampler differ by more than arithmetic does."""
    kl = metrics.sampler_kl_staleness_0
    return kl is not None and metrics.sampler_tokens_staleness_0 >= MIN_TOKENS and abs(kl) > SUSPICIOUS_KL


def no_experts_warning(metrics: StepMetrics) -> str | None:
    """Return a warning for a step none of whose tokens has recorded experts, with `learner.router_replay`."""
    if metrics.beside.get("router_replay/recorded") != 0:
        return None
    return (
        "learner.router_replay = true, and servers have recorded the experts of none of this step's tokens: its tokens "
        "are computed with the learner's own choice. Start the servers of vllm.servers with "
        "--enable-return-routed-experts, and servers and workers from this run's model and run file"
    )


def sampler_kl_warning(metrics: StepMetrics) -> str | None:
    """Return a warning for settings with which there should be no difference; None if there is none."""
    if not suspicious(metrics):
        return None
    return (
        f"sampler/kl_staleness_0 is {metrics.sampler_kl_staleness_0:.3g} nats a token over "
        f"{metrics.sampler_tokens_staleness_0} tokens, and more than {SUSPICIOUS_KL} is not rounding: the learner "
        f"gives tokens another probability than the servers that sampled them from the same weights. {CAUSES}"
    )
