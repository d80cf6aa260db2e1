"""What is checked of the task before a run starts: its rows are alike, their prompts become tokens and leave room for
an answer, and the servers of its tools and rewards answer."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deploy import environment_check
from protocol.config import ConfigError, RunConfig
from rollout_worker.chat import build_chat_format
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.task.agent import check_settings
from rollout_worker.task.columns import check_rows
from rollout_worker.task.environment import open_environments
from rollout_worker.task.evaluation import count_eval_rows, named_eval
from rollout_worker.task.rewards.classifier import ClassifierReward
from rollout_worker.task.task import Task
from rollout_worker.task.tools import open_tools
from rollout_worker.user_code import UserCode

# Rows whose prompts are tried, spread over the data set; of a stream the first ones.
SAMPLE = 64
_STDERR_LINES = 12


def check(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` if rows differ in their columns, if the first prompt becomes no tokens or is text that
    `chat.system_prompt` does not reach, if all that are tried are too long, or if a server of tools or rewards does not
    do its work.

    If some are too long, or cannot be read, that is told. Prompts of a task with an agent are the agent's own to use.
    """
    rows = task.rows
    if config.eval.is_on:
        _check_eval_rows(config, task)
    found = check_rows(rows)
    if found.unusable:
        number, why = next(iter(found.unusable.items()))
        warn(
            f"{len(found.unusable)} of {found.looked_at} rows that were looked at cannot be used, and will be dropped; "
            f"row {number}: {why:.200}"
        )
    for name, firsts in found.mixed.items():
        each = ", ".join(f"{kind} in row {number}" for kind, number in firsts.items())
        warn(f"the column {name!r} is not of one kind: {each}; make it one, or a reward that compares it may fail")
    if rows.size is None and config.task.shuffle:
        warn("the data set is an iterable: its rows come in its own order, and task.shuffle does nothing")
    asyncio.run(_ask_reward_servers(config, task))
    if task.agent is not None:
        _check_agent(config)
        return
    formats = asyncio.run(_formats(config, task))
    for fault in formats.faults:
        warn(fault)
    (_, first), *others = [(number, row) for number, row in rows.sample(SAMPLE) if number not in found.unusable]
    _check_system_prompt(config, first)
    lengths = [_first(config, formats.of(first), first), *formats.lengths]
    refused: dict[int, str] = {}
    for number, row in others:
        try:
            lengths.append(_tokens(formats.of(row), row))
        except Exception as error:  # the data set is the user's
            refused[number] = (str(error).strip() or type(error).__name__).splitlines()[0]
    if refused:
        number, why = next(iter(refused.items()))
        warn(
            f"{len(refused)} of {1 + len(others)} prompts that were tried cannot be rendered, and will be dropped; row "
            f"{number}: {why:.200}; mend that row, or the template"
        )
    limit, turn = config.vllm.max_model_len, config.rollout.max_turn_tokens
    too_long = sum(length >= limit for length in lengths)
    cramped = sum(length + turn > limit for length in lengths)
    told = f"the longest has {max(lengths)} tokens, tools included"
    remedy = f"raise vllm.max_model_len = {limit}, or shorten the prompts"
    if too_long == len(lengths):
        raise ConfigError(f"task.path = {config.task.path}: no prompt fits into the context: {told}; {remedy}")
    if too_long:
        warn(f"{too_long} of {len(lengths)} prompts that were tried do not fit and will be dropped: {told}; {remedy}")
    elif cramped:
        warn(
            f"{cramped} of {len(lengths)} prompts that were tried leave less than rollout.max_turn_tokens = {turn} for "
            f"the first turn: {told}; {remedy}"
        )


def _check_eval_rows(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` if rows of the eval_dataset differ in their columns, and as `count_eval_rows` does. What
    cannot be used is told."""
    rows = task.eval_rows
    count_eval_rows(rows, config.eval.rows)
    try:
        found = check_rows(rows)
    except ConfigError as error:
        raise named_eval(error) from None
    if found.unusable:
        number, why = next(iter(found.unusable.items()))
        warn(
            f"{len(found.unusable)} of {found.looked_at} rows of the eval_dataset that were looked at cannot be used, "
            f"and will count as failed; row {number}: {why:.200}"
        )


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


@dataclass(frozen=True, slots=True)
class _Formats:
    """of: the chat format that a row's prompt is rendered by; lengths: of prompts that environments gave; faults: what
    went wrong with others."""

    of: Callable[[Any], ChatFormat]
    lengths: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


async def _formats(config: RunConfig, task: Task) -> _Formats:
    """With the task's tools and environments as a worker will have them. Raises `ConfigError`, with what an MCP server
    wrote to stderr where one gives no tools."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            async with (
                UserCode() as code,
                open_tools(config, task.tools, task.mcp_servers, code, errors) as tools,
                open_environments(config, task, tools, code, partial(build_chat_format, config)) as environments,
            ):
                if environments is not None:
                    found = await environment_check.look(config, task, environments)
                    return _Formats(lambda row: environments.stage_of(row).chat, *found)
                schemas: list[dict[str, Any]] = tools.schemas
        except ConfigError as error:
            errors.seek(0)
            said = " | ".join(line.strip() for line in errors.readlines()[-_STDERR_LINES:] if line.strip())
            raise ConfigError(f"{error} (stderr: {said:.600})" if said else str(error)) from None
    first = next((row for _, row in task.rows.sample(1)), None)
    if schemas and isinstance(first, Mapping) and isinstance(first["prompt"], str):
        raise ConfigError(
            f"task.mcp_servers = {config.task.mcp_servers}: the prompts are text, and tools need a conversation; make "
            f"each prompt a list of messages: [{{'role': 'user', 'content': ...}}]"
        )
    chat = build_chat_format(config, schemas)
    return _Formats(lambda row: chat)


def _check_system_prompt(config: RunConfig, row: Any) -> None:
    if config.chat.system_prompt is not None and isinstance(row["prompt"], str):
        raise ConfigError(
            f"chat.system_prompt = {config.chat.system_prompt[:80]!r}: the prompts of {config.task.path} are text, and "
            f"a system message stands in conversations alone; make each prompt a list of messages: "
            f"[{{'role': 'user', 'content': ...}}], or leave out chat.system_prompt"
        )


def _tokens(chat: ChatFormat, row: Any) -> int:
    """The length of a row's prompt. Raises `PromptError`, and for a row that cannot be read anything."""
    return len(asyncio.run(chat.prompt_ids(row["prompt"])))


def _first(config: RunConfig, chat: ChatFormat, row: Any) -> int:
    try:
        return _tokens(chat, row)
    except PromptError as error:
        remedy = "mend that row, or the template"
        if "chat_template" in str(error):
            remedy = (
                "its tokenizer has no chat template, and the prompts are messages: save one beside the tokenizer as "
                "chat_template.jinja, or give the prompts as text"
            )
        raise ConfigError(
            f"model.path = {config.model.path}: the first prompt of {config.task.path} becomes no tokens: {remedy} "
            f"({str(error).splitlines()[0]:.200})"
        ) from None


def warn(text: str) -> None:
    """On stderr, for who starts the run."""
    print(f"slipstream: warning: {text}", file=sys.stderr, flush=True)
