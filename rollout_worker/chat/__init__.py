"""Chat formats: between messages and token ids, chosen with `chat.format`."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol.config import ConfigError, RunConfig
from rollout_worker.chat import renderer_choice
from rollout_worker.chat.base import ChatFormat
from rollout_worker.chat.proof import prove
from rollout_worker.chat.system_prompt import WithSystemPrompt
from rollout_worker.chat.template import TemplateFormat


def _chosen(config: RunConfig, tools: Sequence[dict[str, Any]], tokenizer: Any) -> ChatFormat:
    name = renderer_choice.renderer_name(config)
    if name is None:
        return TemplateFormat.load(config, tools, tokenizer)
    return renderer_choice.load(config, name, tools, tokenizer)


def build_chat_format(config: RunConfig, tools: Sequence[dict[str, Any]], tokenizer: Any = None) -> ChatFormat:
    """The format that `chat.format` names, for tools with these JSON schemas. `tokenizer`: that of another format of
    the run, which is then not loaded again. Raises `ConfigError` where the model cannot use it: with tools, the start
    check must pass."""
    chat = _chosen(config, tools, tokenizer)
    if config.chat.system_prompt is not None:
        chat = WithSystemPrompt(chat, config.chat.system_prompt)
    if tools:
        _check(config, chat, tools)
    return chat


def _check(config: RunConfig, chat: ChatFormat, tools: Sequence[dict[str, Any]]) -> None:
    # On a loop of its own, in a thread: the caller's may be running.
    with ThreadPoolExecutor(max_workers=1) as thread:
        proof = thread.submit(asyncio.run, prove(chat, tools)).result()
    if not proof.fit_for_tools:
        raise ConfigError(f"model.path = {config.model.path} cannot be used with tools: {'; '.join(proof.problems)}")
