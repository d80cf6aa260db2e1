"""Builds the chat format that `chat.format` chooses, with `chat.system_prompt`.

It returns a format only if the model can use it. With tools or answers, the format check must pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_worker.chat import renderer_settings
from slipstream.rollout_worker.chat.base import OPENING, ChatFormat
from slipstream.rollout_worker.chat.format_check import (
    check_answer_format,
    check_tool_format,
    end_that_does_not_stop,
    find_hidden_tools,
)
from slipstream.rollout_worker.chat.parsers.base import Message, ParsedTurn
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.vision.processor import ImageProcessor

logger = logging.getLogger(__name__)


class WithSystemPrompt:
    """Puts a system message before conversations that have none. It leaves a text prompt as it is."""

    def __init__(self, chat: ChatFormat, text: str) -> None:
        self._chat = chat
        self._message = {"role": "system", "content": text}

    @property
    def tokenizer(self) -> Any:
        return self._chat.tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        return self._chat.stop_token_ids

    @property
    def images(self) -> ImageProcessor | None:
        return self._chat.images

    @property
    def parses_by_user_code(self) -> bool:
        return self._chat.parses_by_user_code

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        return await self._chat.prompt_ids(self.shown(prompt))

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        return self._chat.shown(prompt if isinstance(prompt, str) else self._whole(prompt))

    def changes(self) -> list[str]:
        return self._chat.changes()

    def shows_system(self) -> bool:
        return self._chat.shows_system()

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        return await self._chat.render_ids(self._whole(messages), generation_prompt)

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        return await self._chat.suffix_ids(prompt_ids, turn_ids, messages)

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        return self._chat.parse(prompt_ids, turn_ids)

    def _whole(self, messages: Sequence[Message]) -> Sequence[Message]:
        first = messages[0] if messages else None
        has_one = isinstance(first, Mapping) and first.get("role") in OPENING
        return messages if has_one else [self._message, *messages]


_Proof = TypeVar("_Proof")


def _chosen(config: RunConfig, tools: Sequence[dict[str, Any]], tokenizer: Any) -> ChatFormat:
    name = None if config.images.enabled else renderer_settings.renderer_name(config)
    if name is None:
        return TemplateFormat.load(config, tools, tokenizer)
    return renderer_settings.load_renderer(config, name, tools, tokenizer)


def build_chat_format(
    config: RunConfig,
    tools: Sequence[dict[str, Any]],
    answers: bool = False,
    tokenizer: Any = None,
    is_known: bool = False,
) -> ChatFormat:
    """Build the format that `chat.format` names.

    Args:
        config: The run's config.
        tools: JSON schemas of the tools.
        answers: Whether users' messages follow turns.
        tokenizer: The tokenizer of another format of the run. If given, it is not loaded again.
        is_known: Whether the run's format has passed the check with other tools, so that only what shows these is
            checked.

    Returns:
        The format, with the system prompt if the config has one.

    Raises:
        ConfigError: The model cannot use the format, or no turn would end. With tools or answers, the format check must
            pass.
    """
    chat = _with_system_prompt(config, _chosen(config, tools, tokenizer))
    if is_known:
        _check(config, _proven(find_hidden_tools(chat, tools)))
        return chat
    # How turns, calls and answers are written is tried with one tool: prompts with all of them are long.
    tried = chat if len(tools) < 2 else _with_system_prompt(config, _chosen(config, tools[:1], chat.tokenizer))
    if not config.rollout.stop:
        _check_stop(config, tried)
    if tools:
        proof = _proven(check_tool_format(tried, tools[:1]))
        _check(config, () if proof.fit_for_tools else proof.problems)
    if len(tools) > 1:
        _check(config, _proven(find_hidden_tools(chat, tools)))
    if answers:
        _check_answers(config, tried)
    return chat


def _with_system_prompt(config: RunConfig, chat: ChatFormat) -> ChatFormat:
    if config.chat.system_prompt is None:
        return chat
    if not chat.shows_system():
        raise ConfigError(
            f"chat.system_prompt = {config.chat.system_prompt!r:.80}: the chat format of model.path = "
            f"{config.model.path} shows no system message: leave it out, put its text into the prompts, or name "
            f"another template with chat.template = file.jinja"
        )
    return WithSystemPrompt(chat, config.chat.system_prompt)


def _check_stop(config: RunConfig, chat: ChatFormat) -> None:
    end = _proven(end_that_does_not_stop(chat))
    if end is not None:
        raise ConfigError(
            f"model.path = {config.model.path}: its chat format ends a turn with {end!r}, and sampling stops at other "
            f"ids alone ({chat.stop_token_ids}), so every turn would run to rollout.max_turn_tokens: add {end!r} to "
            f"eos_token_id of generation_config.json, or set rollout.stop = [{end!r}]"
        )


def _check(config: RunConfig, problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(f"model.path = {config.model.path} cannot be used with tools: {'; '.join(problems)}")


def _check_answers(config: RunConfig, chat: ChatFormat) -> None:
    proof = _proven(check_answer_format(chat))
    if proof.appended is False:
        raise ConfigError(
            f"model.path = {config.model.path} cannot be used with an environment that answers turns (respond): "
            f"{'; '.join(proof.problems)}; name a renderer that knows the model with chat.renderer, or another "
            f"template with chat.template = file.jinja"
        )
    if proof.appended is None:
        logger.warning(
            "the chat format appends no user's message to a turn, as it leaves out earlier reasoning: each answer of "
            "an environment opens a new segment"
        )


def _proven(proof: Coroutine[Any, Any, _Proof]) -> _Proof:
    """Run a check in a thread with its own event loop, because the caller's loop may be running."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, proof).result()
