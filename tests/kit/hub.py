"""Makes models and run files for tests that upload to a hub.

It does not import torch, so that a process that uploads starts in half a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.protocol.config import RunConfig
from tests.kit import LEARNER, config


def config_in(folder: Path, **hub: Any) -> RunConfig:
    return config(LEARNER, run={"dir": str(folder), "name": "sums"}, hub={"push_to_hub": True, **hub})


def model_of(folder: Path, step: int) -> Path:
    model = folder / f"step-{step}" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"of %d" % step)
    return model
