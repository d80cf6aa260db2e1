"""The run file: one TOML file that `load` reads into a `RunConfig`.

`sections` has the settings, `schema` and the checks how they must fit together, `text` explains faults.
"""

from slipstream.protocol.config.checks import Finding
from slipstream.protocol.config.load import ConfigError, Need, load, missing_files, parse_overrides, resolve
from slipstream.protocol.config.schema import RunConfig
from slipstream.protocol.config.sections import (
    LOOPBACK,
    ChatSection,
    ClusterSection,
    DeploySection,
    EvalSection,
    HubSection,
    ImagesSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    QueueSection,
    RolloutSection,
    RunSection,
    TaskSection,
    TrackingSection,
    VllmSection,
    WeightSyncSection,
    WorkerSection,
)
from slipstream.protocol.config.text import to_toml

__all__ = [
    "LOOPBACK",
    "ChatSection",
    "ClusterSection",
    "ConfigError",
    "DeploySection",
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
    "RunSection",
    "TaskSection",
    "TrackingSection",
    "VllmSection",
    "WeightSyncSection",
    "WorkerSection",
    "load",
    "missing_files",
    "parse_overrides",
    "resolve",
    "to_toml",
]
