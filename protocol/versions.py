"""Names of policy versions, and the staleness rule (I2).

A label `RUN:VERSION` names the weights on a server: two runs may use one number for different weights. A version that
is published as an adapter has a model name besides. The staleness of a token is the learner's version at the step that
trains on it, minus the version that sampled it.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

# Header of a control call: the run whose learner makes it.
RUN_HEADER = "slipstream-run"

# Pattern of a run's id, which stands in labels, in a header and in the names of adapters.
RUN_ID = r"[A-Za-z0-9_-]{1,40}"

_NAME_CHARACTERS = 24

# Maximum digits of a version. A longer number is not one of ours, and would not fit the store.
_LABEL = re.compile(rf"(?:({RUN_ID}):)?([0-9]{{1,18}})")


class Label(NamedTuple):
    """A label. `run`: "" if it names none."""

    run: str
    version: int

    def __str__(self) -> str:
        return label_of(self.run, self.version)


def new_run_id(name: str) -> str:
    """Return a new unique id for a run, which begins with its name so that people recognise it."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:_NAME_CHARACTERS]
    return f"{readable}-{secrets.token_hex(4)}"


def label_of(run: str, version: int) -> str:
    """Return the label, as servers report it with each sampled token; the bare version if `run` is empty."""
    return f"{run}:{version}" if run else str(version)


def parse(label: str) -> Label | None:
    """Parse a label; None if `label_of` did not make it, such as a server's "default" after a start."""
    match = _LABEL.fullmatch(label)
    return Label(match[1] or "", int(match[2])) if match else None


def describe_label(label: str, run: str) -> str:
    """Describe for people weights on a server that are not a version of `run`."""
    known = parse(label)
    if known is not None and known.run and known.run != run:
        return f"version {known.version} of run {known.run}"
    return f"weights labelled {label!r}"


# Name of the model that a server was started with.
SERVED_MODEL_NAME = "policy"

# Header: in an answer, the server's newest proven adapter; in a request, that the sender understands it.
HEADER = "slipstream-adapter"

# Hexadecimal digits of the digest in an adapter's name.
DIGITS = 16

_NAME = re.compile(rf"policy-(?:({RUN_ID})-)?v([0-9]{{1,18}})\.[0-9a-f]{{{DIGITS}}}")


def name_of(version: int, digest: str, run: str = "") -> str:
    """Return the name under which a server serves a version as an adapter.

    Args:
        digest: Hexadecimal, of the adapter's bytes. Two sessions may use one number for different weights, which must
            share neither a name nor a prefix cache.
        run: Id of the run.
    """
    return f"policy-{f'{run}-' if run else ''}v{version}.{digest[:DIGITS]}"


def label_in(name: str) -> Label | None:
    """Return the label of an adapter's name; None if `name_of` did not make it."""
    match = _NAME.fullmatch(name)
    return Label(match[1] or "", int(match[2])) if match else None


def version_of(name: str) -> int | None:
    """Return the version of an adapter's name; None if `name_of` did not make it."""
    label = label_in(name)
    return None if label is None else label.version


@overload
def within_staleness(version: int, oldest: int, max_staleness: int) -> bool: ...


@overload
def within_staleness(version: int, oldest: npt.NDArray[np.int64], max_staleness: int) -> npt.NDArray[np.bool_]: ...


def within_staleness(
    version: int, oldest: int | npt.NDArray[np.int64], max_staleness: int
) -> bool | npt.NDArray[np.bool_]:
    """Tell whether tokens sampled by version `oldest` may train in the step of `version`; of an array, each of them."""
    return version - oldest <= max_staleness
