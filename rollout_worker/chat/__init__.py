"""Chat formats: between messages and token ids, chosen with `chat.format`."""

from collections.abc import Callable, Sequence
from typing import Any

from protocol.config import RunConfig
from rollout_worker.chat.base import ChatFormat
from rollout_worker.chat.template import TemplateFormat

FORMATS: dict[str, Callable[[RunConfig, Sequence[dict[str, Any]]], ChatFormat]] = {
    "auto": TemplateFormat.load,
    "template": TemplateFormat.load,
}


def build_chat_format(config: RunConfig, tools: Sequence[dict[str, Any]]) -> ChatFormat:
    """The format that `chat.format` names, for tools with these JSON schemas. Raises `ConfigError` where the model
    cannot use it."""
    return FORMATS[config.chat.format](config, tools)
