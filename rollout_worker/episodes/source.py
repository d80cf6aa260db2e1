"""Defines the interface of all task kinds: a source makes the episodes of a group.

Nothing outside the sources asks which kind a task is. `slipstream.rollout_worker.sources` lists them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TextIO

from slipstream.protocol import reasons, tracing
from slipstream.protocol.config import RunConfig
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.data.dataset import RowSample
from slipstream.rollout_worker.data.rows import Row
from slipstream.rollout_worker.episodes.capacity import Reservation
from slipstream.rollout_worker.episodes.episode import Episode
from slipstream.rollout_worker.episodes.limits import size_fault
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.episodes.tool_results import markup_of
from slipstream.rollout_worker.inference.engine import AS_THE_RUN, OwnParams
from slipstream.rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from slipstream.rollout_worker.inference.router import Affinity, Siblings
from slipstream.rollout_worker.task.environment_pool import Notify, log_notice
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.user_code import UserCode

logger = logging.getLogger(__name__)


class TicketFailed(Exception):
    """A ticket gave no group.

    Attributes:
        reason: A code of `slipstream.protocol.reasons`.
        retryable: Whether another attempt may succeed.
    """

    def __init__(self, reason: str, detail: str, retryable: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class SourceContext:
    """Arguments that a source is opened with.

    Attributes:
        code: Runs the task's functions.
        tokenizer: The run's tokenizer, which all chat formats of the task share.
        notify: Takes key, text and place of a failure of user code that ends no episode.
        errors: Where MCP servers write their stderr; None for this process's.
        known_with_tools: Whether chat formats with tools have passed the check: without answers, and with them.
    """

    config: RunConfig
    task: Task
    code: UserCode
    tokenizer: Any
    notify: Notify = log_notice
    errors: TextIO | None = None
    known_with_tools: set[bool] = field(default_factory=set)

    def build_chat(self, tools: Sequence[dict[str, Any]], answers: bool = False) -> ChatFormat:
        """Build a chat format for tools, as `build_chat_format` does, with the texts of special tokens in their schemas
        broken. Of a format that has passed with other tools, only what shows these is checked. Raises `ConfigError`."""
        tools = [markup_of(self.tokenizer).broken_everywhere(tool) for tool in tools]
        is_known = bool(tools) and answers in self.known_with_tools
        chat = build_chat_format(self.config, tools, answers, self.tokenizer, is_known)
        if tools:
            self.known_with_tools.add(answers)
        return chat


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group to be made.

    Attributes:
        row: The row that all its episodes begin with.
        count: Number of episodes.
        born: The pool's tick when the ticket began.
        reservation: Slots for the first turns. A source whose episodes wait for anything before them gives the slots
            back first.
        episodes: Runs single episodes, and holds what they share.
        own: Sampling parameters of this ticket.
        after: Closed once the group has its rewards or has failed. Environments are kept until then.
    """

    row: Row
    count: int
    born: int
    reservation: Reservation
    episodes: EpisodeRunner
    own: OwnParams = AS_THE_RUN
    after: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True)
class PromptFindings:
    """Results of a source's check of a data set's prompts before a run.

    Attributes:
        chat_of: Gives the chat format that renders a row's prompt; None where the policy may never see the prompt.
        lengths: Tokens of each prompt that an environment's reset gave; None where episodes begin with the rows' own
            prompts.
        warnings: Texts for the person who starts the run.
    """

    chat_of: Callable[[Mapping[str, Any]], ChatFormat] | None
    lengths: list[int] | None = None
    warnings: list[str] = field(default_factory=list)


class EpisodeSource(Protocol):
    """Makes the episodes of one kind of task."""

    @classmethod
    def accepts(cls, task: Task) -> bool:
        """Whether the task is of this kind. Exactly one source accepts a task."""
        ...

    @classmethod
    def open(cls, context: SourceContext) -> AbstractAsyncContextManager[Self]:
        """Open the resources that the source holds for a worker's life. Raises `ConfigError`."""
        ...

    @classmethod
    async def check_samples(cls, context: SourceContext, samples: Sequence[RowSample]) -> list[PromptFindings]:
        """Try the task before a run, with rows of each data set.

        A class method, because it must not open everything: an agent's listener, for one, belongs on the worker's host.

        Returns: Findings for each sample, in their order.

        Raises:
            ConfigError: The run could not work.
        """
        ...

    @property
    def chat(self) -> ChatFormat:
        """A chat format of the task; it knows the tokenizer, the stop tokens and the system prompt of all."""
        ...

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of tools and environments as the policy is shown them; part of the worker's fingerprint."""
        ...

    @property
    def own_rewards(self) -> Sequence[str]:
        """Names of the rewards that episodes bring with them."""
        ...

    @property
    def max_open(self) -> int:
        """Maximum number of episodes that a worker has open."""
        ...

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        """Run a group's episodes, side by side.

        Returns: One outcome for each episode. An episode that fails does not end the others.

        Raises:
            TicketFailed: No episode can be run.
        """
        ...


async def outcome(episode: Awaitable[Episode]) -> Episode | EpisodeFailed:
    """Return an episode or its failure, so that one that fails does not end the group's others."""
    with tracing.span("episode") as span:
        try:
            done = await episode
            span.set(turns=done.rollout.turns, tokens=done.sampled_tokens, finish_reason=done.rollout.finish_reason)
            return done
        except EpisodeFailed as error:
            failure = error
        except Exception as error:
            logger.exception("an episode failed unexpectedly")
            failure = EpisodeFailed(reasons.INTERNAL, str(user_code.failure_of(error, None)), retryable=True)
        span.fail(failure.reason)
        return failure


async def side_by_side(
    plan: GroupPlan, episode: Callable[[Affinity], Awaitable[Episode]]
) -> list[Episode | EpisodeFailed]:
    """Run a plan's episodes independently of each other. `episode` waits for something before its first turn, so the
    slots for first turns are given back."""
    plan.reservation.give_all()
    siblings = Siblings()  # their prompts have much in common
    async with asyncio.TaskGroup() as tasks:
        runs = [
            tasks.create_task(outcome(episode(Affinity(siblings=siblings, born=plan.born)))) for _ in range(plan.count)
        ]
    return [run.result() for run in runs]


async def prompt_ids(
    chat: ChatFormat, prompt: str | list[Message], row: Row, max_model_len: int, notices: FailureNotices
) -> list[int]:
    """Render a prompt that leaves room for an answer.

    Raises:
        TicketFailed: It cannot be rendered or is too long; the text names the row.
    """
    if fault := size_fault(prompt, max_model_len):
        raise _prompt_failed(row, f"{fault}; raise it, or shorten the prompt", "length", notices)
    try:
        ids = await chat.prompt_ids(prompt)
    except PromptError as error:
        raise _prompt_failed(row, f"cannot be rendered: {error}", "render", notices) from error
    if not 0 < len(ids) < max_model_len:
        why = f"has {len(ids)} tokens, vllm.max_model_len is {max_model_len}; raise it, or shorten the prompt"
        raise _prompt_failed(row, why, "length", notices)
    return ids


def _prompt_failed(row: Row, why: str, key: str, notices: FailureNotices) -> TicketFailed:
    detail = f"the prompt of row {row.number} {why}"
    notices.add("prompt", key, detail)
    return TicketFailed(reasons.PROMPT, detail, retryable=False)
