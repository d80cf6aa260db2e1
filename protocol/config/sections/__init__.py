"""The settings of a run, section by section: typed, bounded, each with its meaning and the reason for its default."""

from slipstream.protocol.config.sections.base import LOOPBACK, Section
from slipstream.protocol.config.sections.cluster import ClusterSection
from slipstream.protocol.config.sections.learner import LearnerSection, LoraSection
from slipstream.protocol.config.sections.processes import QueueSection, WorkerSection
from slipstream.protocol.config.sections.rollout import AgentSection, EvalSection, ImagesSection, RolloutSection
from slipstream.protocol.config.sections.run import (
    ChatSection,
    HubSection,
    ModelSection,
    RunSection,
    TaskSection,
    TeacherSection,
    TrackingSection,
)
from slipstream.protocol.config.sections.servers import DeploySection, VllmSection, WeightSyncSection

__all__ = [
    "LOOPBACK",
    "AgentSection",
    "ChatSection",
    "ClusterSection",
    "DeploySection",
    "EvalSection",
    "HubSection",
    "ImagesSection",
    "LearnerSection",
    "LoraSection",
    "ModelSection",
    "QueueSection",
    "RolloutSection",
    "RunSection",
    "Section",
    "TaskSection",
    "TeacherSection",
    "TrackingSection",
    "VllmSection",
    "WeightSyncSection",
    "WorkerSection",
]
