"""What makes a row's episodes: a conversation with tools, an environment, or an agent that owns its loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from protocol import reasons
from rollout_worker import user_code
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.chat.parsers.base import Message
from rollout_worker.data.rows import Row
from rollout_worker.episodes.capacity import Reservation
from rollout_worker.episodes.episode import Episode
from rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from rollout_worker.inference.router import Affinity, Siblings
from rollout_worker.inference.wire import AS_THE_RUN, OwnParams

logger = logging.getLogger(__name__)


class TicketFailed(Exception):
    """The ticket gave no group. `reason`: a code of `protocol.reasons`; `retryable` false: another try would fail
    alike."""

    def __init__(self, reason: str, detail: str, retryable: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group to be made: `count` episodes of `row`. reservation: slots for their first turns; a driver that has
    the episodes wait for anything before those gives them back first. born: the pool's tick when the ticket began.
    own: what this ticket's are sampled with of their own. after: closed when the group is rewarded, or given up: until
    then the episodes' environments are kept."""

    row: Row
    count: int
    born: int
    reservation: Reservation
    own: OwnParams = AS_THE_RUN
    after: ExitStack = field(default_factory=ExitStack)


class EpisodeSource(Protocol):
    """Makes the episodes of a plan, side by side, while it is open."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """What it needs for the worker's life is there inside. Raises `ConfigError`."""
        ...

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        """One outcome for each episode: what fails does not end its siblings. Raises `TicketFailed` where none can be
        had."""
        ...


async def outcome(episode: Awaitable[Episode]) -> Episode | EpisodeFailed:
    """What came of an episode: a failure is returned, not raised, so that it does not end the siblings."""
    try:
        return await episode
    except EpisodeFailed as failure:
        return failure
    except Exception as error:
        logger.exception("an episode failed unexpectedly")
        return EpisodeFailed(reasons.INTERNAL, str(user_code.failure_of(error, None)), retryable=True)


async def side_by_side(
    plan: GroupPlan, episode: Callable[[Affinity], Awaitable[Episode]]
) -> list[Episode | EpisodeFailed]:
    """The plan's episodes, each on its own way: `episode` has to wait for something before its first turn, so the slots
    for first turns go back."""
    plan.reservation.give_all()
    siblings = Siblings()  # their prompts have much in common
    async with asyncio.TaskGroup() as tasks:
        runs = [
            tasks.create_task(outcome(episode(Affinity(siblings=siblings, born=plan.born)))) for _ in range(plan.count)
        ]
    return [run.result() for run in runs]


async def prompt_ids(
    chat: ChatFormat, prompt: str | list[Message], row: Row, max_model_len: int, troubles: FailureNotices
) -> list[int]:
    """The ids of a prompt that leaves room for an answer. Raises `TicketFailed`, which names the row."""
    try:
        ids = await chat.prompt_ids(prompt)
    except PromptError as error:
        raise _prompt_failed(row, f"cannot be rendered: {error}", "render", troubles) from error
    if not 0 < len(ids) < max_model_len:
        why = f"has {len(ids)} tokens, vllm.max_model_len is {max_model_len}; raise it, or shorten the prompt"
        raise _prompt_failed(row, why, "length", troubles)
    return ids


def _prompt_failed(row: Row, why: str, key: str, troubles: FailureNotices) -> TicketFailed:
    detail = f"the prompt of row {row.number} {why}"
    troubles.add("prompt", key, detail)
    return TicketFailed(reasons.PROMPT, detail, retryable=False)
