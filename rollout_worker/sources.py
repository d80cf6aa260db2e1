"""Which driver makes a task's episodes.

Who drives the episodes of a group: the policy's own turns, one module a way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from protocol.config import RunConfig
from rollout_worker.agent.formats import Build, ChatFormats
from rollout_worker.agent.session import AgentContext
from rollout_worker.agent.source import AgentSource
from rollout_worker.chat.base import ChatFormat
from rollout_worker.chat.build import build_chat_format
from rollout_worker.episodes.conversation import ConversationSource
from rollout_worker.episodes.environment import EnvironmentSource
from rollout_worker.episodes.runner import EpisodeRunner
from rollout_worker.episodes.source import EpisodeSource, GroupPlan, TicketFailed
from rollout_worker.task.agent import Agent
from rollout_worker.task.environments import Environments
from rollout_worker.task.task import Task
from rollout_worker.tools.toolbox import ToolBox


def driver_of(
    task: Task,
    config: RunConfig,
    episodes: EpisodeRunner,
    chat: ChatFormat,
    tools: ToolBox,
    environments: Environments | None,
    failures: Counter[str],
    sleep: Callable[[float], Awaitable[None]],
    build_format: Build | None = None,
) -> EpisodeSource:
    """environments: those of the task, if it has any; failures: counted by reason; build_format: makes a chat format
    for tools that an agent names, None for as the run file says."""
    troubles = episodes.troubles
    if task.agent is not None:
        build = build_format or partial(build_chat_format, config, tokenizer=chat.tokenizer)
        return AgentSource(Agent(task.agent), AgentContext(ChatFormats(chat, build), episodes, config.rollout), config)
    if environments is not None:
        environments.pool.most = episodes.capacity.max_open
        environments.pool.trouble = partial(troubles.add, "code")
        return EnvironmentSource(environments, episodes, troubles, failures, config.worker, episodes.clock, sleep)
    return ConversationSource(chat, tools, episodes, troubles)


__all__ = [
    "AgentSource",
    "ConversationSource",
    "EnvironmentSource",
    "EpisodeSource",
    "GroupPlan",
    "TicketFailed",
    "driver_of",
]
