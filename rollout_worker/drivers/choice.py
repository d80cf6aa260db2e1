"""Which driver makes a task's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from protocol.config import RunConfig
from rollout_worker.agent.formats import Build, ChatFormats
from rollout_worker.agent.session import Stage
from rollout_worker.chat import build_chat_format
from rollout_worker.chat.base import ChatFormat
from rollout_worker.drivers.agent import Agents
from rollout_worker.drivers.base import Driver
from rollout_worker.drivers.conversation import Conversations
from rollout_worker.drivers.environment import InEnvironments
from rollout_worker.episode import EpisodeRunner
from rollout_worker.task.agent import Agent
from rollout_worker.task.environment import Environments
from rollout_worker.task.task import Task
from rollout_worker.task.tools import ToolBox


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
) -> Driver:
    """environments: those of the task, if it has any; failures: counted by reason; build_format: makes a chat format
    for tools that an agent names, None for as the run file says."""
    troubles = episodes.troubles
    if task.agent is not None:
        build = build_format or partial(build_chat_format, config, tokenizer=chat.tokenizer)
        return Agents(Agent(task.agent), Stage(ChatFormats(chat, build), episodes, config.rollout), config)
    if environments is not None:
        environments.pool.most = episodes.capacity.most_open
        environments.pool.trouble = partial(troubles.add, "code")
        return InEnvironments(environments, episodes, troubles, failures, config.worker, episodes.clock, sleep)
    return Conversations(chat, tools, episodes, troubles)
