"""Builds the one run file of the tests, which is small in every way. Presets adapt it to the tests of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.protocol.config import RunConfig

Sections = Mapping[str, Mapping[str, Any]]

_BASE: Sections = {
    # A folder without model files: nothing of a model is looked for on the hub.
    "model": {"path": str(Path(__file__).parent)},
    "task": {"path": "task.py:task"},
    "rollout": {"group_size": 2},
    "queue": {"max_staleness": 4},
    "learner": {"groups_per_step": 2},
}

# For episodes against the fake vLLM. Their requests must not hang for long.
WORKER: Sections = {
    "rollout": {"max_turn_tokens": 64, "max_episode_tokens": 256},
    "worker": {"request_timeout_s": 5.0},
    "vllm": {"max_model_len": 1024},
}

# For the tiny model: rows have at most 64 tokens.
LEARNER: Sections = {
    "rollout": {"max_turn_tokens": 16},
    "learner": {"token_budget": 64},
    "vllm": {"max_model_len": 64},
}


def config(*presets: Sections, **sections: Mapping[str, Any]) -> RunConfig:
    """Build a run file with B = 2 groups a step, K = 4 as maximum staleness, and groups of 2.

    Args:
        *presets: Sections that override single settings, in order.
        **sections: Sections that override single settings after the presets.
    """
    values: dict[str, dict[str, Any]] = {}
    for layer in (_BASE, *presets, sections):
        for name, section in layer.items():
            values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)
