"""The settings of a run, section by section: typed, bounded, each with its meaning and the reason for its default."""

from protocol.config.sections.base import LOOPBACK, Section
from protocol.config.sections.evaluation import EvalSection
from protocol.config.sections.learner import LearnerSection
from protocol.config.sections.lora import LoraSection
from protocol.config.sections.processes import QueueSection
from protocol.config.sections.rollout import RolloutSection
from protocol.config.sections.run import ChatSection, ModelSection, RunSection, TaskSection
from protocol.config.sections.servers import DeploySection, VllmSection, WeightSyncSection
from protocol.config.sections.tracking import HubSection, TrackingSection
from protocol.config.sections.worker import WorkerSection

__all__ = [
    "LOOPBACK",
    "ChatSection",
    "DeploySection",
    "EvalSection",
    "HubSection",
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
