"""Which settings of [chat] go together: the rules that need neither the model nor the renderers library.

Which names of renderers and parsers there are is the worker's to know (`rollout_worker.chat`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from protocol.config.sections import ChatSection

# What rendering sets itself, and parameters of transformers' `apply_chat_template`: no variables of a template.
RESERVED = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("conversation", "conversations", "tokenize", "padding", "truncation", "max_length", "self"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")


def check(chat: ChatSection) -> None:
    """Raises `ValueError` that names the setting, the reason and the remedy."""
    _refuse_empty(chat)
    if ".py:" in chat.parser and not _FILE.fullmatch(chat.parser):
        raise ValueError(f"chat.parser = {chat.parser}: names no function; write it as path/to/file.py:function")
    if taken := sorted(RESERVED & chat.chat_template_kwargs.keys()):
        raise ValueError(
            f"chat.chat_template_kwargs: {', '.join(taken)} cannot be set by the run file, rendering does it; leave "
            f"{'them' if len(taken) > 1 else 'it'} out"
        )
    if chat.format == "template":
        _refuse(_renderer_settings(chat), 'a renderer\'s, and chat.format = "template" uses none')
    elif chat.format == "renderer":
        _refuse(template_settings(chat), 'a template\'s, and chat.format = "renderer" uses none')
    elif chat.renderer is not None:
        _refuse(template_settings(chat), f"a template's, and chat.renderer = {chat.renderer!r} needs none")
    elif template_settings(chat):
        _refuse(_renderer_settings(chat), "a renderer's, and a template's settings stand beside it")


def template_settings(chat: ChatSection) -> dict[str, Any]:
    """Those given that only a template reads."""
    return _given({"chat.template": chat.template, "chat.parser": None if chat.parser == "auto" else chat.parser})


def _renderer_settings(chat: ChatSection) -> dict[str, Any]:
    return _given({"chat.renderer": chat.renderer, "chat.renderer_options": chat.renderer_options})


def _refuse_empty(chat: ChatSection) -> None:
    empty = {
        "chat.renderer": chat.renderer == "",
        "chat.template": chat.template == Path(),
        "chat.parser": not chat.parser,
    }
    for name, is_empty in empty.items():
        if is_empty:
            raise ValueError(f'{name} = "": names nothing; leave it out for the default')


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value}


def _refuse(settings: dict[str, Any], why: str) -> None:
    """Raises `ValueError` for the first of the settings."""
    for name, value in settings.items():
        raise ValueError(f"{name} = {value}: this setting is {why}; leave one of them out")
