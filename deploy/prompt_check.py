"""What is checked of a data set's prompts before a run starts: they become tokens, and leave room for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.warn import warn
from protocol.config import ConfigError, RunConfig
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.data.rows import Rows, spread
from rollout_worker.task.task import Task

# Rows whose prompts are tried, spread over the data set; of a stream the first ones.
SAMPLE = 64


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of the task, as messages name it.

    sample: as that of `Rows`, of the rows that are taken; given: how the data set is given; whose: after "prompts" and
    "rows"; lost: what becomes of a row that cannot be used; evaluated: whether it is the eval_dataset.
    """

    rows: Rows
    sample: Callable[[int], Iterator[tuple[int, Any]]]
    given: str
    whose: str
    lost: str
    evaluated: bool = False

    @property
    def first(self) -> Any:
        return next((row for _, row in self.sample(1)), None)


def trained(config: RunConfig, task: Task) -> Source:
    """The data set that is trained on. Raises `ConfigError`."""
    return Source(task.rows, task.rows.sample, f"task.path = {config.task.path}", "", "will be dropped")


def evaluated(config: RunConfig, task: Task) -> Source:
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

    return Source(rows, first_ones, "Task(eval_dataset=...)", " of the eval_dataset", "will count as failed", True)


@dataclass(frozen=True, slots=True)
class Opened:
    """What the task's tools and environments came to. of: the chat format that a row's prompt is rendered by; lengths:
    in tokens, of prompts that environments gave; None where there is no environment, so that episodes begin with the
    rows' prompts as they are; faults: what went wrong with others."""

    of: Callable[[Any], ChatFormat]
    lengths: list[int] | None = None
    faults: list[str] = field(default_factory=list)


def check(config: RunConfig, source: Source, opened: Opened, unusable: Mapping[int, str]) -> None:
    """Raises `ConfigError` if the first prompt becomes no tokens or is text that `chat.system_prompt` does not reach,
    or if all that are tried are too long. If some are too long, or cannot be read, that is told. `unusable`: rows that
    are left out, by number."""
    for fault in opened.faults:
        warn(fault)
    rows = [(number, row) for number, row in source.sample(SAMPLE) if number not in unusable]
    rows = [(number, row) for number, row in rows if isinstance(row, Mapping)]
    if not rows:
        return
    (_, first), *others = rows
    _check_system_prompt(config, source, first)
    if opened.lengths is not None:
        # An episode's prompt is the row's with what reset says, so at least as long.
        _check_lengths(config, source, opened.lengths, "prompts{} that environments gave")
        alone = [length for _, row in rows if (length := _length_alone(opened.of(row), row)) is not None]
        _check_lengths(config, source, alone, "prompts{} that were tried", alone=True)
        return
    lengths = [_first(config, source, opened.of(first), first)]
    refused: dict[int, str] = {}
    for number, row in others:
        try:
            lengths.append(_tokens(opened.of(row), row))
        except Exception as error:  # the data set is the user's
            refused[number] = (str(error).strip() or type(error).__name__).splitlines()[0]
    if refused:
        number, why = next(iter(refused.items()))
        warn(
            f"{len(refused)} of {1 + len(others)} prompts{source.whose} that were tried cannot be rendered, and "
            f"{source.lost}; row {number}: {why:.200}; mend that row, or the template"
        )
    _check_lengths(config, source, lengths, "prompts{} that were tried")


def _check_lengths(config: RunConfig, source: Source, lengths: list[int], what: str, alone: bool = False) -> None:
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


def _check_system_prompt(config: RunConfig, source: Source, row: Any) -> None:
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


def _first(config: RunConfig, source: Source, chat: ChatFormat, row: Any) -> int:
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
