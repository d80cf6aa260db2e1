"""What is checked of the task before a run starts: its rows are alike, their prompts become tokens and leave room for
an answer, and the servers of its tools and rewards answer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from deploy import environment_check, prompt_check
from deploy.prompt_check import Opened, Source
from deploy.warn import warn
from protocol.config import ConfigError, RunConfig
from rollout_worker.chat.base import PromptError
from rollout_worker.chat.build import build_chat_format
from rollout_worker.data.columns import Findings, check_rows
from rollout_worker.data.dataset import count_eval_rows, named_eval
from rollout_worker.task.agent import check_settings
from rollout_worker.task.environment_pool import Trouble
from rollout_worker.task.environments import open_environments
from rollout_worker.task.reward_classifier import ClassifierReward
from rollout_worker.task.task import Task
from rollout_worker.tools.toolbox import open_tools
from rollout_worker.user_code import UserCode

_STDERR_LINES = 12


def check_task(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` if rows differ in their columns, if the first prompt becomes no tokens or is text that
    `chat.system_prompt` does not reach, if all that are tried are too long, or if a server of tools or rewards does not
    do its work. The rows that are evaluated on are checked as those that are trained on, where there are evaluations.

    If some are too long, or cannot be read, that is told. Prompts of a task with an agent are the agent's own to use.
    """
    sources = [prompt_check.trained(config, task)]
    if config.eval.is_on:
        sources.append(prompt_check.evaluated(config, task))
        _check_eval_count(config, task)
    found = [_check_rows(source) for source in sources]
    if task.rows.size is None and config.task.shuffle:
        warn("the data set is an iterable: its rows come in its own order, and task.shuffle does nothing")
    asyncio.run(_ask_reward_servers(config, task))
    if task.agent is not None:
        _check_agent(config)
        return
    opened = asyncio.run(_open(config, task, sources))
    for source, each, findings in zip(sources, opened, found, strict=True):
        prompt_check.check(config, source, each, findings.unusable)


def _check_eval_count(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` as `count_eval_rows` does. Fewer rows than are wanted are told."""
    there, wanted = count_eval_rows(task.eval_rows, config.eval.rows), config.eval.rows
    if not isinstance(wanted, str) and wanted > there:
        warn(f"eval.rows = {wanted}, and the eval_dataset has {there} rows: all of them are taken; set it lower")


def _check_rows(source: Source) -> Findings:
    """Raises `ConfigError` if they differ in their columns. What cannot be used, and a column of several kinds, is
    told."""
    with _naming(source):
        found = check_rows(source.rows)
    whose = source.whose
    if found.unusable:
        number, why = next(iter(found.unusable.items()))
        warn(
            f"{len(found.unusable)} of {found.looked_at} rows{whose} that were looked at cannot be used, and "
            f"{source.lost}; row {number}: {why:.200}"
        )
    for name, firsts in found.mixed.items():
        each = ", ".join(f"{kind} in row {number}" for kind, number in firsts.items())
        warn(
            f"the column {name!r}{whose} is not of one kind: {each}; make it one, or a reward that compares it may fail"
        )
    return found


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Faults of rows are said of the data set that has them."""
    try:
        yield
    except ConfigError as error:
        raise (named_eval(error) if source.evaluated else error) from None


def _check_agent(config: RunConfig) -> None:
    """What an agent will ask, it says itself: here only whether the model takes conversations."""
    check_settings(config)
    chat = build_chat_format(config, [])
    try:
        asyncio.run(chat.prompt_ids([{"role": "user", "content": "Hello."}]))
    except PromptError as error:
        raise ConfigError(
            f"model.path = {config.model.path}: agents send messages, and a message becomes no tokens "
            f"({str(error).splitlines()[0]:.200}); name a template with chat.template = file.jinja, or a model that is "
            f"made for chat"
        ) from None


async def _ask_reward_servers(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` for a classifier that its server does not score with."""
    first = next((row for _, row in task.rows.sample(1)), None)
    messages = not (isinstance(first, Mapping) and isinstance(first["prompt"], str))
    for name in task.rewards:
        if isinstance(name, str):
            await ClassifierReward(name, config.task.reward_servers).ask(messages)


async def _open(config: RunConfig, task: Task, sources: Sequence[Source]) -> list[Opened]:
    """For each source, with the task's tools and environments as a worker will have them. Raises `ConfigError`, with
    what an MCP server wrote to stderr where one gives no tools."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            async with (
                UserCode() as code,
                open_tools(config, task.tools, task.mcp_servers, code, errors) as tools,
                open_environments(config, task, tools, code, partial(build_chat_format, config)) as environments,
            ):
                if environments is not None:
                    environments.pool.trouble = _told_once()
                    opened = []
                    for source in sources:
                        with _naming(source):
                            opened.append(await environment_check.look(config, task, source, environments))
                    return opened
                schemas: list[dict[str, Any]] = tools.schemas
        except ConfigError as error:
            errors.seek(0)
            said = " | ".join(line.strip() for line in errors.readlines()[-_STDERR_LINES:] if line.strip())
            raise ConfigError(f"{error} (stderr: {said:.600})" if said else str(error)) from None
    for source in sources:
        if schemas and isinstance(source.first, Mapping) and isinstance(source.first["prompt"], str):
            raise ConfigError(
                f"task.mcp_servers = {config.task.mcp_servers}: the prompts{source.whose} are text, and tools need a "
                f"conversation; make each prompt a list of messages: [{{'role': 'user', 'content': ...}}]"
            )
    chat = build_chat_format(config, schemas)
    return [Opened(lambda row: chat) for _ in sources]


def _told_once() -> Trouble:
    """Warns of each kind of trouble with environments once: all instances may have the same."""
    told: set[str] = set()

    def trouble(key: str, text: str, where: str | None) -> None:
        if key not in told:
            told.add(key)
            warn(f"{text}{f' ({where})' if where else ''}")

    return trouble
