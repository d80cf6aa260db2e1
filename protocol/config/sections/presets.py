"""Presets of [learner]: the settings of each named algorithm, from presets.toml next to this file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset as presets.toml has it."""

    sets: Mapping[str, Any]
    source: str
    choose: str


ABOUT = msgspec.toml.decode(Path(__file__).with_name("presets.toml").read_bytes(), type=dict[str, Preset])

PRESETS: Mapping[str, Mapping[str, Any]] = {name: preset.sets for name, preset in ABOUT.items()}

# Settings that follow `algorithm` if a run file leaves them out.
SET_BY_PRESETS = frozenset(name for preset in PRESETS.values() for name in preset)
# Settings that a preset sets for one part only: if a run file chooses another part, they are not set.
TIED_TO: Mapping[str, tuple[str, ...]] = {
    "clip_low": ("objective",),
    "clip_high": ("objective",),
    "proximal": ("correction",),
    "kl_in_reward": ("advantage",),
}
