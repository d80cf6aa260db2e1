"""The settings of a run, section by section: typed, bounded, each with its meaning and the reason for its default."""

from protocol.config.sections.base import LOOPBACK, Section
from protocol.config.sections.cluster import ClusterSection
from protocol.config.sections.learner import LearnerSection, LoraSection
from protocol.config.sections.processes import QueueSection, WorkerSection
from protocol.config.sections.rollout import AgentSection, EvalSection, ImagesSection, RolloutSection
from protocol.config.sections.run import ChatSection, HubSection, ModelSection, RunSection, TaskSection, TrackingSection
from protocol.config.sections.servers import DeploySection, VllmSection, WeightSyncSection

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
    "TrackingSection",
    "VllmSection",
    "WeightSyncSection",
    "WorkerSection",
]
