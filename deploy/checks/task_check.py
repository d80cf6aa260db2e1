"""Checks the task before a run starts.

Its rows are alike, their prompts become tokens and leave room for an answer, and its tools, environments, agent and
reward servers work.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protocol.config import ConfigError, RunConfig
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.data.columns import Findings, check_rows
from rollout_worker.data.dataset import RowSample, count_eval_rows
from rollout_worker.data.rows import spread
from rollout_worker.episodes.source import PromptFindings, SourceContext
from rollout_worker.sources import source_of
from rollout_worker.task.environment_pool import Notify
from rollout_worker.task.reward_classifier import ClassifierReward
from rollout_worker.task.task import Task
from rollout_worker.user_code import UserCode


def warn(text: str) -> None:
    """On stderr, for who starts the run."""
    print(f"slipstream: warning: {text}", file=sys.stderr, flush=True)


# Rows whose prompts are tried, spread over the data set; of a stream the first ones.
SAMPLE = 64


def training_rows(config: RunConfig, task: Task) -> RowSample:
    """The data set that is trained on. Raises `ConfigError`."""
    return RowSample(task.rows, task.rows.sample, f"task.path = {config.task.path}", "", "will be dropped")


def evaluation_rows(config: RunConfig, task: Task) -> RowSample:
    """The eval_dataset, as far as evaluations take its rows. Raises `ConfigError`."""
    rows, most = task.eval_rows, config.eval.rows

    def first_ones(wanted: int) -> Iterator[tuple[int, Any]]:
        if rows.size is None or isinstance(most, str) or most >= rows.size:
            yield from rows.sample(wanted if isinstance(most, str) else min(wanted, most))
            return
        for number in spread(most, wanted):
            try:
                row: Any = rows.row_for(number, 0, False).columns
            except Exception as error:  # the data set is the user's
                row = error
            yield number, row

    return RowSample(rows, first_ones, "Task(eval_dataset=...)", " of the eval_dataset", "will count as failed", True)


def check_prompts(config: RunConfig, source: RowSample, found: PromptFindings, unusable: Mapping[int, str]) -> None:
    """Raises `ConfigError` if the first prompt becomes no tokens or is text that `chat.system_prompt` does not reach,
    or if all that are tried are too long. If some are too long, or cannot be read, that is told. `unusable`: rows that
    are left out, by number."""
    for warning in found.warnings:
        warn(warning)
    chat_of = found.chat_of
    if chat_of is None:
        return
    rows = [(number, row) for number, row in source.sample(SAMPLE) if number not in unusable]
    rows = [(number, row) for number, row in rows if isinstance(row, Mapping)]
    if not rows:
        return
    (_, first), *others = rows
    _check_system_prompt(config, source, first)
    if found.lengths is not None:
        # An episode's prompt is the row's with what reset says, so at least as long.
        _check_lengths(config, source, found.lengths, "prompts{} that environments gave")
        alone = [length for _, row in rows if (length := _length_alone(chat_of(row), row)) is not None]
        _check_lengths(config, source, alone, "prompts{} that were tried", alone=True)
        return
    lengths = [_first(config, source, chat_of(first), first)]
    refused: dict[int, str] = {}
    for number, row in others:
        try:
            lengths.append(_tokens(chat_of(row), row))
        except Exception as error:  # the data set is the user's
            refused[number] = (str(error).strip() or type(error).__name__).splitlines()[0]
    if refused:
        number, why = next(iter(refused.items()))
        warn(
            f"{len(refused)} of {1 + len(others)} prompts{source.whose} that were tried cannot be rendered, and "
            f"{source.lost}; row {number}: {why:.200}; mend that row, or the template"
        )
    _check_lengths(config, source, lengths, "prompts{} that were tried")


def _check_lengths(config: RunConfig, source: RowSample, lengths: list[int], what: str, alone: bool = False) -> None:
    """`what` they are the lengths of; alone: something follows each prompt, so room for the answer is not counted."""
    if not lengths:
        return
    limit, turn = config.vllm.max_model_len, config.rollout.max_turn_tokens
    too_long = sum(length >= limit for length in lengths)
    cramped = 0 if alone else sum(length + turn > limit for length in lengths)
    told = f"the longest has {max(lengths)} tokens, tools included"
    remedy = f"raise vllm.max_model_len = {limit}, or shorten the prompts"
    named = what.format(source.whose)
    if too_long == len(lengths):
        raise ConfigError(f"{source.given}: no prompt fits into the context: {told}; {remedy}")
    if too_long:
        warn(f"{too_long} of {len(lengths)} {named} do not fit and {source.lost}: {told}; {remedy}")
    elif cramped:
        warn(
            f"{cramped} of {len(lengths)} {named} leave less than rollout.max_turn_tokens = {turn} for the first turn: "
            f"{told}; {remedy}"
        )


def _check_system_prompt(config: RunConfig, source: RowSample, row: Any) -> None:
    if config.chat.system_prompt is not None and isinstance(row["prompt"], str):
        raise ConfigError(
            f"chat.system_prompt = {config.chat.system_prompt[:80]!r}: the prompts{source.whose} of "
            f"{config.task.path} are text, and a system message stands in conversations alone; make each prompt a list "
            f"of messages: [{{'role': 'user', 'content': ...}}], or leave out chat.system_prompt"
        )


def _tokens(chat: ChatFormat, row: Any) -> int:
    """The length of a row's prompt. Raises `PromptError`, and for a row that cannot be read anything."""
    return len(asyncio.run(chat.prompt_ids(row["prompt"])))


def _length_alone(chat: ChatFormat, row: Any) -> int | None:
    """The same, None where it is no prompt before reset adds to it."""
    try:
        return _tokens(chat, row)
    except PromptError:
        return None


def _first(config: RunConfig, source: RowSample, chat: ChatFormat, row: Any) -> int:
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
            f"model.path = {config.model.path}: the first prompt{source.whose} of {config.task.path} becomes no "
            f"tokens: {remedy} ({str(error).splitlines()[0]:.200})"
        ) from None


def check_task(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` if rows differ in their columns, if the first prompt becomes no tokens or is text that
    `chat.system_prompt` does not reach, if all that are tried are too long, or if a server of tools or rewards does not
    do its work. The rows that are evaluated on are checked as those that are trained on, where there are evaluations.

    If some are too long, or cannot be read, that is told. Prompts of a task with an agent are the agent's own to use.
    """
    sources = [training_rows(config, task)]
    if config.eval.is_on:
        sources.append(evaluation_rows(config, task))
        _check_eval_count(config, task)
    found = [_check_rows(source) for source in sources]
    if task.rows.size is None and config.task.shuffle:
        warn("the data set is an iterable: its rows come in its own order, and task.shuffle does nothing")
    asyncio.run(_ask_reward_servers(config, task))
    for source, each, findings in zip(sources, asyncio.run(_check_by_kind(config, task, sources)), found, strict=True):
        check_prompts(config, source, each, findings.unusable)


def _check_eval_count(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` as `count_eval_rows` does. Fewer rows than are wanted are told."""
    there, wanted = count_eval_rows(task.eval_rows, config.eval.rows), config.eval.rows
    if not isinstance(wanted, str) and wanted > there:
        warn(f"eval.rows = {wanted}, and the eval_dataset has {there} rows: all of them are taken; set it lower")


def _check_rows(source: RowSample) -> Findings:
    """Raises `ConfigError` if they differ in their columns. What cannot be used, and a column of several kinds, is
    told."""
    with source.naming():
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


async def _ask_reward_servers(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` for a classifier that its server does not score with."""
    first = next((row for _, row in task.rows.sample(1)), None)
    messages = not (isinstance(first, Mapping) and isinstance(first["prompt"], str))
    for name in task.rewards:
        if isinstance(name, str):
            await ClassifierReward(name, config.task.reward_servers).ask(messages)


async def _check_by_kind(config: RunConfig, task: Task, samples: Sequence[RowSample]) -> list[PromptFindings]:
    """Have the task's source try it as a worker will. Raises `ConfigError`."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        async with UserCode() as code:
            context = SourceContext(config, task, code, _warn_once(), errors=errors)
            return await source_of(task).check(context, samples)


def _warn_once() -> Notify:
    """Warn of each kind of failure once: all instances of an environment may have the same."""
    told: set[str] = set()

    def notify(key: str, text: str, where: str | None) -> None:
        if key not in told:
            told.add(key)
            warn(f"{text}{f' ({where})' if where else ''}")

    return notify
