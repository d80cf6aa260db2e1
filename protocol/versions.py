"""What names the weights of a version on a server: `RUN:VERSION`. Two runs may use one number for different weights."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

# Of a control call: the run whose learner makes it.
RUN_HEADER = "slipstream-run"

# A run's id: it stands in labels, in a header and in the names of adapters.
RUN_ID = r"[A-Za-z0-9_-]{1,40}"

_NAME_CHARACTERS = 24

# More digits are none of ours, and would not fit where versions are kept.
_LABEL = re.compile(rf"(?:({RUN_ID}):)?([0-9]{{1,18}})")


class Label(NamedTuple):
    """run: "" where the label names none."""

    run: str
    version: int

    def __str__(self) -> str:
        return label_of(self.run, self.version)


def new_run_id(name: str) -> str:
    """An id that no other run has, of the same `name` (`run.name`) or not; people know the run by it."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:_NAME_CHARACTERS]
    return f"{readable}-{secrets.token_hex(4)}"


def label_of(run: str, version: int) -> str:
    """As vLLM reports it with each sampled token. Without a run, as in a test of one part alone: the bare version."""
    return f"{run}:{version}" if run else str(version)


def parse(label: str) -> Label | None:
    """None: not a label of `label_of`, such as vLLM's own "default" after a start."""
    match = _LABEL.fullmatch(label)
    return Label(match[1] or "", int(match[2])) if match else None


def describe_label(label: str, run: str) -> str:
    """For people: whose weights a server holds that are not a version of `run`."""
    known = parse(label)
    if known is not None and known.run and known.run != run:
        return f"version {known.version} of run {known.run}"
    return f"weights labelled {label!r}"
