"""The registry of task kinds. A new kind is a class that implements `EpisodeSource`, and an entry here."""

from __future__ import annotations

from slipstream.rollout_worker.agent.source import AgentSource
from slipstream.rollout_worker.episodes.conversation import ConversationSource
from slipstream.rollout_worker.episodes.environment import EnvironmentSource
from slipstream.rollout_worker.episodes.source import EpisodeSource
from slipstream.rollout_worker.task.task import Task

SOURCES: tuple[type[EpisodeSource], ...] = (ConversationSource, EnvironmentSource, AgentSource)


def source_of(task: Task) -> type[EpisodeSource]:
    """Return the source that makes this task's episodes."""
    return next(source for source in SOURCES if source.accepts(task))
