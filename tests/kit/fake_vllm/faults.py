"""Faults that a fake server can be told to have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "hang",  # never answers
    "stop",  # answers once the fault is taken away, as a process that was stopped and continues
    "status",  # answers with `status` and vLLM's error body
    "slow",  # answers after `seconds`
    "drop",  # closes the connection without an answer
    "die",  # closes it in the middle of the answer, after `after` choices
    "stream_error",  # an error event with code `status` under status 200, after `after` choices
    "no_logprobs",
    "nan_logprobs",  # as vLLM reports NaN: -9999.0
    "null_logprobs",
    "no_versions",
    "version_label",  # every token labelled `label`
    "version_change",  # tokens from `after` on labelled `label`
    "abort",  # finish_reason "abort" after `after` tokens
]


@dataclass
class Fault:
    """Strikes the next `times` requests to `route` (None: for good), then is over."""

    kind: Kind
    times: int | None = 1
    route: str = "/inference/v1/generate"
    status: int = 500
    seconds: float = 0.0
    label: str = "default"
    after: int = 0


class Faults(list[Fault]):
    """Faults in the order in which they strike."""

    def take(self, route: str) -> Fault | None:
        """The fault that strikes this request, if any."""
        for fault in self:
            if fault.route != route:
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self.remove(fault)
            return fault
        return None
