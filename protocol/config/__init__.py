"""The run file: one TOML file that `load` reads into a `RunConfig`.

`sections` has the settings, `schema` and the checks how they must fit together, `text` explains faults.
"""

from slipstream.protocol.config.checks import Finding
from slipstream.protocol.config.load import ConfigError, Need, load, missing_files, parse_overrides, resolve
from slipstream.protocol.config.schema import RunConfig
from slipstream.protocol.config.sections import (
    ChatSection,
    EvalSection,
    HubSection,
    ImagesSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    QueueSection,
    RolloutSection,
    TaskSection,
    TrackingSection,
    WeightSyncSection,
)
from slipstream.protocol.config.text import to_toml

__all__ = [
    "ChatSection",
    "ConfigError",
    "EvalSection",
    "Finding",
    "HubSection",
    "ImagesSection",
    "LearnerSection",
    "LoraSection",
    "ModelSection",
    "Need",
    "QueueSection",
    "RolloutSection",
    "RunConfig",
    "TaskSection",
    "TrackingSection",
    "WeightSyncSection",
    "load",
    "missing_files",
    "parse_overrides",
    "resolve",
    "to_toml",
]
