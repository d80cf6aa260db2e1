"""Who drives the episodes of a group: the policy's own turns, one module a way."""

from rollout_worker.agent.source import AgentSource
from rollout_worker.episodes.conversation import ConversationSource
from rollout_worker.episodes.environment import EnvironmentSource
from rollout_worker.episodes.source import EpisodeSource, GroupPlan, TicketFailed
from rollout_worker.sources import driver_of

__all__ = [
    "AgentSource",
    "ConversationSource",
    "EnvironmentSource",
    "EpisodeSource",
    "GroupPlan",
    "TicketFailed",
    "driver_of",
]
