"""What is checked of the task before a run starts: its rows are alike, their prompts become tokens and leave room for
an answer, and the servers of its tools and rewards answer.

A warning before the start.

What is checked of a data set's prompts before a run starts: they become tokens, and leave room for an answer.

What is checked of a task's environments before a run starts: every row names one, and a few resets work.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protocol.config import ConfigError, RunConfig
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.chat.build import build_chat_format
from rollout_worker.data.columns import Findings, check_rows
from rollout_worker.data.dataset import count_eval_rows, named_eval
from rollout_worker.data.rows import Rows, spread
from rollout_worker.task.agent import check_settings
from rollout_worker.task.environment_instance import folded, observed
from rollout_worker.task.environment_pool import Trouble
from rollout_worker.task.environments import EnvironmentKind, Environments, check_row, open_environments
from rollout_worker.task.reward_classifier import ClassifierReward
from rollout_worker.task.task import Task
from rollout_worker.tools.toolbox import open_tools
from rollout_worker.user_code import UserCode, UserCodeError


def warn(text: str) -> None:
    """On stderr, for who starts the run."""
    print(f"slipstream: warning: {text}", file=sys.stderr, flush=True)


# Rows whose prompts are tried, spread over the data set; of a stream the first ones.
SAMPLE = 64


@dataclass(frozen=True, slots=True)
class RowSample:
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


@dataclass(frozen=True, slots=True)
class Opened:
    """What the task's tools and environments came to. of: the chat format that a row's prompt is rendered by; lengths:
    in tokens, of prompts that environments gave; None where there is no environment, so that episodes begin with the
    rows' prompts as they are; faults: what went wrong with others."""

    of: Callable[[Any], ChatFormat]
    lengths: list[int] | None = None
    faults: list[str] = field(default_factory=list)


def check_prompts(config: RunConfig, source: RowSample, opened: Opened, unusable: Mapping[int, str]) -> None:
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


# Rows whose choice of environment is looked at, and resets of each environment that are tried.
_ROWS = 1000

_RESETS = 3


async def check_environment(config: RunConfig, task: Task, source: RowSample, environments: Environments) -> Opened:
    """What a few resets with rows of `source` gave. Raises `ConfigError` for a row that no environment can be found
    for, and where all resets of one fail."""
    assert task.environment is not None
    rows = [(number, columns) for number, columns in source.sample(_ROWS) if isinstance(columns, Mapping)]
    tried: dict[str | None, list[tuple[int, Mapping[str, Any]]]] = {name: [] for name in environments.stages}
    for number, columns in rows:
        if fault := check_row(task.environment, columns):
            raise ConfigError(f"Task(environment={{...}}): row {number} cannot be played: {fault}")
        tried[environments.stage_of(columns).name].append((number, columns))
    lengths: list[int] = []
    faults: list[str] = []
    for name, stage in environments.stages.items():
        few = tried[name][:_RESETS]
        if not few and not source.evaluated:
            faults.append(f"no row that was looked at names the environment {name!r}: it is not used")
        outcomes = await asyncio.gather(*(_reset(config, source, environments, stage, *row) for row in few))
        failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if few and len(failed) == len(few):
            remedy = "mend it there, or raise worker.environment_timeout_s"
            raise ConfigError(f"Task(environment=...): {failed[0]}; {remedy}")
        faults += failed
        lengths += [outcome for outcome in outcomes if isinstance(outcome, int)]
    return Opened(lambda row: environments.stage_of(row).chat, lengths, faults)


async def _reset(
    config: RunConfig,
    source: RowSample,
    environments: Environments,
    stage: EnvironmentKind,
    number: int,
    columns: Mapping[str, Any],
) -> int | str:
    """The tokens of the prompt that it gives, or what went wrong."""
    arguments = environments.reset_columns(stage, columns)
    try:
        instance = await environments.pool.take(stage.name)
    except UserCodeError as error:
        return f"no instance of {stage.face.cls} can be made: {error}{_at(error)}"
    try:
        said = await instance.call("reset", observed, config.worker.environment_timeout_s, arguments)
        return len(await stage.chat.prompt_ids(folded(columns["prompt"], said)))
    except UserCodeError as error:
        instance.lost = True
        return f"{stage.face.cls}.reset fails on row {number}{source.whose}: {error}{_at(error)}"
    except PromptError as error:
        return f"what {stage.face.cls}.reset gives on row {number}{source.whose} cannot be rendered: {error}"
    finally:
        environments.pool.give_back(instance)


def _at(error: UserCodeError) -> str:
    return f" ({error.where})" if error.where else ""


_STDERR_LINES = 12


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
    if task.agent is not None:
        _check_agent(config)
        return
    opened = asyncio.run(_open(config, task, sources))
    for source, each, findings in zip(sources, opened, found, strict=True):
        check_prompts(config, source, each, findings.unusable)


def _check_eval_count(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` as `count_eval_rows` does. Fewer rows than are wanted are told."""
    there, wanted = count_eval_rows(task.eval_rows, config.eval.rows), config.eval.rows
    if not isinstance(wanted, str) and wanted > there:
        warn(f"eval.rows = {wanted}, and the eval_dataset has {there} rows: all of them are taken; set it lower")


def _check_rows(source: RowSample) -> Findings:
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
def _naming(source: RowSample) -> Iterator[None]:
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


async def _open(config: RunConfig, task: Task, sources: Sequence[RowSample]) -> list[Opened]:
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
                            opened.append(await check_environment(config, task, source, environments))
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
