"""How the model, and versions that are published as adapters, are called by the learner, servers and workers."""

from __future__ import annotations

import re

from protocol.versions import RUN_ID, Label

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
