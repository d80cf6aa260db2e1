"""Checks the task before a run starts: rows, prompts, tools, environments, agent and reward servers.

`check_x` raises `ConfigError` for a task that cannot be trained on, and returns findings where it can; `find_x` only
returns findings.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.deploy.servers.model_shape import architecture_of
from slipstream.protocol.client import retry_pause_s
from slipstream.protocol.config import ConfigError, Finding, ModelSection, RunConfig
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.tokenizer import load_tokenizer
from slipstream.rollout_worker.data.columns import Findings, check_rows
from slipstream.rollout_worker.data.dataset import RowSample, count_eval_rows
from slipstream.rollout_worker.data.order import SHUFFLED, check_order
from slipstream.rollout_worker.data.rows import spread
from slipstream.rollout_worker.episodes.source import PromptFindings, SourceContext
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.reward_base import TRIED_ANSWER
from slipstream.rollout_worker.task.rewards import build_rewards
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.teacher import Teacher, difference, filled, heads
from slipstream.rollout_worker.user_code import UserCode
from slipstream.rollout_worker.vision.messages import seen_prompt
from slipstream.rollout_worker.vision.sources import ImageError

# Rows of each data set whose prompts are rendered, spread over it; of a stream the first ones.
MAX_RENDERED = 64

# The longest of a few prompts, times this, is taken for the longest of all.
LONGER_PROMPTS = 1.5

# Seconds within which a reward is tried.
TRIED_WITHIN_S = 30.0


@dataclass(frozen=True)
class TaskCheck:
    """A task that can be trained on.

    Attributes:
        findings: Rows that will be dropped and settings that do nothing, each as a warning.
        episode_tokens: Tokens of the longest episode; None where only the context bounds it, as results of tools and
            environments may have any length.
    """

    findings: list[Finding]
    episode_tokens: int | None


def check_task(config: RunConfig, task: Task) -> TaskCheck:
    """Check a task that has been imported: renders prompts, resets environments, starts MCP servers.

    The eval_dataset is checked like the data set if the run has evaluations. Prompts of a task with an agent are not
    rendered, since only the agent knows what it sends.

    Raises:
        ConfigError: No episode could be run or rewarded. Names the setting, the row or the server.
    """
    samples = [training_rows(config, task)]
    findings: list[Finding] = []
    if config.eval.is_on:
        samples.append(evaluation_rows(config, task))
        findings += check_eval_count(config, task)
    checked = []
    for sample in samples:
        with sample.naming():
            rows = check_rows(sample.rows)
        findings += find_row_warnings(sample, rows)
        checked.append(rows)
    check_order(task.rows, config.task, task.has_no_data)
    if task.rows.size is None and config.task.order == SHUFFLED:
        text = "the data set is an iterable: its rows come in its own order, which task.order does not change"
        findings.append(Finding("warning", text))
    findings += asyncio.run(check_rewards(config, task))
    tokenizer = load_tokenizer(config.model)
    prompts, failures = asyncio.run(_check_by_kind(config, task, samples, tokenizer))
    findings += failures
    if config.teacher.is_on:
        findings += asyncio.run(check_teacher(config, task, samples[0], prompts[0], tokenizer))
    longest = 0
    for sample, of_prompts, rows in zip(samples, prompts, checked, strict=True):
        found, lengths = check_prompts(config, sample, of_prompts, rows.unusable)
        findings += found
        longest = max(longest, *lengths, 0)
    limits = config.rollout
    sampled = min(limits.max_turn_tokens, limits.max_episode_tokens)
    is_bounded = longest and not (task.tools or task.mcp_servers or task.environment or task.agent)
    return TaskCheck(findings, int(LONGER_PROMPTS * longest) + sampled if is_bounded else None)


def training_rows(config: RunConfig, task: Task) -> RowSample:
    """Return the rows that the run trains on."""
    return RowSample(task.rows, task.rows.sample, f"task.path = {config.task.path}", "", "will be dropped")


def evaluation_rows(config: RunConfig, task: Task) -> RowSample:
    """Return the rows of the eval_dataset that evaluations take."""
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


def check_eval_count(config: RunConfig, task: Task) -> list[Finding]:
    """Find an `eval.rows` above the number of rows. Raises `ConfigError` as `count_eval_rows` does."""
    there, wanted = count_eval_rows(task.eval_rows, config.eval.rows), config.eval.rows
    if isinstance(wanted, str) or wanted <= there:
        return []
    text = f"eval.rows = {wanted}, and the eval_dataset has {there} rows: all of them are taken"
    return [Finding("warning", text, "set it lower")]


def find_row_warnings(sample: RowSample, rows: Findings) -> list[Finding]:
    """Find rows that cannot be used, and columns whose values are of several kinds."""
    findings = []
    if rows.unusable:
        number, why = next(iter(rows.unusable.items()))
        text = (
            f"{len(rows.unusable)} of {rows.looked_at} rows{sample.suffix} that were looked at cannot be used, and "
            f"{sample.lost}; row {number}: {why:.200}"
        )
        findings.append(Finding("warning", text))
    for name, firsts in rows.mixed.items():
        each = ", ".join(f"{kind} in row {number}" for kind, number in firsts.items())
        text = f"the column {name!r}{sample.suffix} is not of one kind: {each}"
        findings.append(Finding("warning", text, "make it one, or a reward that compares it may fail"))
    return findings


async def check_rewards(config: RunConfig, task: Task) -> list[Finding]:
    """Have each reward score two made-up answers to the first row. Functions are only called where an answer is all
    that an episode brings: not with an environment, nor with an agent.

    Returns: A warning for each function that fails for these answers.

    Raises:
        ConfigError: A classifier gives no score, or a function no list with a number for each answer.
    """
    first = next((row for _, row in task.rows.sample(1)), None)
    if not isinstance(first, Mapping) or "prompt" not in first:
        first = {"prompt": [{"role": "user", "content": "2 by 3?"}]}
    answers_are_all = task.environment is None and task.agent is None
    tried = [reward for reward in task.rewards if answers_are_all or isinstance(reward, str)]
    if not tried:
        return []
    async with UserCode() as code:
        found = await build_rewards(config, tried, None, code=code).check_scores(first, TRIED_WITHIN_S)
    return [
        Finding("warning", f"a group with the answer {TRIED_ANSWER!r} would get no reward: {text}") for text in found
    ]


async def check_teacher(
    config: RunConfig, task: Task, sample: RowSample, found: PromptFindings, tokenizer: Any
) -> list[Finding]:
    """Try the teacher, and show it the first row. Returns a warning for a context that is too short.

    Raises:
        ConfigError: The teacher does not answer, has another vocabulary, or `teacher.prompt` cannot be shown.
    """
    row = next((row for _, row in sample.sample(1) if isinstance(row, Mapping)), None)
    told = 0
    if config.teacher.prompt is not None and row is not None:
        try:
            if found.chat_of is None or task.agent is not None:
                raise PromptError("an agent writes its own prompts: leave it out")
            prompt = filled(config.teacher.prompt, row)
            shown, own = await heads(found.chat_of(row), row["prompt"], prompt)
            told = len(own) - len(shown)
        except PromptError as error:
            raise ConfigError(f"teacher.prompt = {config.teacher.prompt[:80]!r}: {error}") from None
    context = config.vllm.max_model_len + told
    if config.teacher.path is not None:
        warning = _check_served_teacher(config, config.teacher.path, tokenizer, context)
    else:
        assert config.teacher_url is not None
        teacher = Teacher(config.teacher_url, config.teacher, lambda text: None, retry_pause_s)
        warning = await teacher.check(tokenizer, context)
    return [] if warning is None else [Finding("warning", warning)]


def _check_served_teacher(config: RunConfig, path: str, tokenizer: Any, context: int) -> str | None:
    """Check a teacher that `up` will serve. Returns a warning, as `Teacher.check`."""
    model = ModelSection(path=path, trust_remote_code=config.model.trust_remote_code)
    facts = architecture_of(model)
    if facts is None and Path(path).is_absolute():
        raise ConfigError(f"teacher.path = {path}: no folder with a config.json; give a model's folder or a hub name")
    try:
        own = load_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "teacher.path", 1)) from None
    ids = list(range(len(tokenizer)))
    if differs := difference(str(tokenizer.decode(ids)), str(own.decode(ids))):
        raise ConfigError(f"teacher.path = {path}: it {differs}")
    facts = facts or {}
    positions = (facts.get("text_config") or facts).get("max_position_embeddings")
    if isinstance(positions, int) and positions <= context:
        return (
            f"teacher.path = {path}: its context is {positions} tokens, and an episode may have {context}, which it "
            f"needs and one more; take another teacher, or lower vllm.max_model_len"
        )
    return None


async def _check_by_kind(
    config: RunConfig, task: Task, samples: Sequence[RowSample], tokenizer: Any
) -> tuple[list[PromptFindings], list[Finding]]:
    """Have the task's source try it as a worker will.

    Returns:
        The source's findings for each sample; and failures of user code that end no episode, one of each kind, since
        all instances of an environment may have the same.

    Raises:
        ConfigError: The source could make no episode.
    """
    failures: dict[str, Finding] = {}

    def notify(key: str, text: str, where: str | None) -> None:
        failures.setdefault(key, Finding("warning", f"{text}{f' ({where})' if where else ''}"))

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        async with UserCode() as code:
            context = SourceContext(config, task, code, tokenizer, notify, errors)
            prompts = await source_of(task).check_samples(context, samples)
    return prompts, [*failures.values()]


def check_prompts(
    config: RunConfig, sample: RowSample, found: PromptFindings, unusable: Mapping[int, str]
) -> tuple[list[Finding], list[int]]:
    """Render up to `MAX_RENDERED` prompts of a data set and compare their lengths with the model's context.

    Args:
        unusable: Rows to leave out: the reason for each, by number.

    Returns:
        The source's own warnings, rows whose prompts cannot be rendered, and prompts that leave too little room; and
        the tokens of each prompt, where episodes begin with the rows' own.

    Raises:
        ConfigError: The first prompt cannot be rendered, `chat.system_prompt` does not apply to it, or no prompt fits.
    """
    findings = [Finding("warning", text) for text in found.warnings]
    chat_of = found.chat_of
    if chat_of is None:
        return findings, []
    rows = [(number, row) for number, row in sample.sample(MAX_RENDERED) if number not in unusable]
    rows = [(number, row) for number, row in rows if isinstance(row, Mapping)]
    if not rows:
        return findings, []
    (_, first), *others = rows
    _check_system_prompt(config, sample, first)
    if found.lengths is not None:
        # An episode's prompt is the row's with the observation of reset added, so it is at least as long.
        findings += _check_lengths(config, sample, found.lengths, "that environments gave")
        alone = [length for _, row in rows if (length := _length_alone(chat_of(row), row)) is not None]
        return findings + _check_lengths(config, sample, alone, "that were tried", alone=True), []
    lengths = [_first_length(config, sample, chat_of(first), first)]
    refused: dict[int, str] = {}
    for number, row in others:
        try:
            lengths.append(_tokens(chat_of(row), row))
        except Exception as error:  # the data set is the user's
            refused[number] = (str(error).strip() or type(error).__name__).splitlines()[0]
    if refused:
        number, why = next(iter(refused.items()))
        text = (
            f"{len(refused)} of {1 + len(others)} prompts{sample.suffix} that were tried cannot be rendered, and "
            f"{sample.lost}; row {number}: {why:.200}"
        )
        findings.append(Finding("warning", text, "fix that row, or the template"))
    return findings + _check_lengths(config, sample, lengths, "that were tried"), lengths


def _check_lengths(
    config: RunConfig, sample: RowSample, lengths: list[int], which: str, alone: bool = False
) -> list[Finding]:
    """Find prompts that do not fit, or leave no room for the first turn. Raises `ConfigError` if none fits.

    Args:
        lengths: Tokens of each prompt.
        which: Follows "prompts" in the messages.
        alone: Whether reset adds to each prompt, so that room for the answer is not counted.
    """
    if not lengths:
        return []
    limit, turn = config.vllm.max_model_len, config.rollout.max_turn_tokens
    too_long = sum(length >= limit for length in lengths)
    cramped = 0 if alone else sum(length + turn > limit for length in lengths)
    longest = f"the longest has {max(lengths)} tokens, tools included"
    remedy = f"raise vllm.max_model_len = {limit}, or shorten the prompts"
    of_all = f"of {len(lengths)} prompts{sample.suffix} {which}"
    if too_long == len(lengths):
        raise ConfigError(f"{sample.given}: no prompt fits into the context: {longest}; {remedy}")
    if too_long:
        return [Finding("warning", f"{too_long} {of_all} do not fit and {sample.lost}: {longest}", remedy)]
    if cramped:
        text = f"{cramped} {of_all} leave less than rollout.max_turn_tokens = {turn} for the first turn: {longest}"
        return [Finding("warning", text, remedy)]
    return []


def _check_system_prompt(config: RunConfig, sample: RowSample, row: Any) -> None:
    """Raise `ConfigError` for a `chat.system_prompt` next to prompts that are text."""
    if config.chat.system_prompt is not None and isinstance(row["prompt"], str):
        raise ConfigError(
            f"chat.system_prompt = {config.chat.system_prompt[:80]!r}: the prompts{sample.suffix} of "
            f"{config.task.path} are text, and a system message stands in conversations alone; make each prompt a list "
            f"of messages: [{{'role': 'user', 'content': ...}}], or leave out chat.system_prompt"
        )


def _tokens(chat: ChatFormat, row: Any) -> int:
    """Return the tokens of a row's prompt. Raises `PromptError`, or any error of a data set's own row."""
    try:
        prompt = seen_prompt(row["prompt"], row, chat.images)
    except ImageError as error:
        raise PromptError(str(error)) from None
    return len(asyncio.run(chat.prompt_ids(prompt)))


def _length_alone(chat: ChatFormat, row: Any) -> int | None:
    """Return the tokens of a row's prompt; None if it is no prompt before reset adds to it."""
    try:
        return _tokens(chat, row)
    except PromptError:
        return None


def _first_length(config: RunConfig, sample: RowSample, chat: ChatFormat, row: Any) -> int:
    """Return the tokens of the first row's prompt. Raises `ConfigError` if it cannot be rendered."""
    try:
        return _tokens(chat, row)
    except PromptError as error:
        cause = str(error).splitlines()[0]
        if "chat_template" in cause:
            raise ConfigError(
                f"model.path = {config.model.path}: its tokenizer has no chat template, and the prompts{sample.suffix} "
                f"of {config.task.path} are messages: save one next to the tokenizer as chat_template.jinja, or give "
                f"the prompts as text ({cause:.200})"
            ) from None
        raise ConfigError(
            f"task.path = {config.task.path}: the first prompt{sample.suffix} cannot be shown to the model: "
            f"{cause:.300}; mend that row, or the model's chat template"
        ) from None
