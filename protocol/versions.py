"""What names the weights of a version on a server: `RUN:VERSION`. Two runs may use one number for different weights.

How the model, and versions that are published as adapters, are called by the learner, servers and workers.

The staleness rule (I2), for queue and learner alike.

The staleness of a token is the learner's version at the step that trains on it, minus the version that sampled it.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

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


# What a server calls the model that it was started with.
SERVED_MODEL_NAME = "policy"

# Of an answer: the newest proven adapter of the server. Of a request: that its sender knows of adapters.
HEADER = "slipstream-adapter"

# Hexadecimal digits of the digest in a name.
DIGITS = 16

_NAME = re.compile(rf"policy-(?:({RUN_ID})-)?v([0-9]{{1,18}})\.[0-9a-f]{{{DIGITS}}}")


def name_of(version: int, digest: str, run: str = "") -> str:
    """The name under which a server serves `version` of `run`, by its id. digest: hexadecimal, of the adapter's bytes:
    two sessions of a learner may use one number for different weights, which must not share a name, nor a prefix
    cache."""
    return f"policy-{f'{run}-' if run else ''}v{version}.{digest[:DIGITS]}"


def label_in(name: str) -> Label | None:
    """Whose version it is; None: not a name of `name_of`."""
    match = _NAME.fullmatch(name)
    return Label(match[1] or "", int(match[2])) if match else None


def version_of(name: str) -> int | None:
    """None: not a name of `name_of`."""
    label = label_in(name)
    return None if label is None else label.version


@overload
def within_staleness(version: int, oldest: int, max_staleness: int) -> bool: ...


@overload
def within_staleness(version: int, oldest: npt.NDArray[np.int64], max_staleness: int) -> npt.NDArray[np.bool_]: ...


def within_staleness(
    version: int, oldest: int | npt.NDArray[np.int64], max_staleness: int
) -> bool | npt.NDArray[np.bool_]:
    """Whether tokens that version `oldest` sampled may train in the step of `version`; for arrays, of each."""
    return version - oldest <= max_staleness
