"""Which renderer the run file asks for, and its options: read off `chat.*` and the library's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from protocol.config import ChatSection, ConfigError, RunConfig
from protocol.config.checks import template_settings
from rollout_worker.chat.renderer import RendererFormat
from rollout_worker.chat.tokenizer import load_tokenizer

# Of the library's configurations those that are no notation: the choice by name, and the tokenizer's own template,
# which `chat.format = "template"` does better.
_NOT_NAMED = ("auto", "default")

# Options that are the library's own business.
_HIDDEN_FIELDS = ("name",)


def renderer_name(config: RunConfig) -> str | None:
    """The renderer that `chat.renderer` names, or the one that the library knows for `model.path`; None: a template is
    to be used. Raises `ConfigError` for a name that is not known, and for a renderer's options where there is none."""
    chat, path = config.chat, config.model.path
    if chat.format == "template":
        return None
    if chat.renderer is not None:
        return _checked(chat.renderer)
    if template_settings(chat):
        # Whoever gives a template or a parser does not want the notation that the model came with.
        return None
    known = _known(path)
    if known is None and chat.format == "renderer":
        raise ConfigError(
            f'chat.format = "renderer": no renderer is known for model.path = {path}; set chat.renderer to that of its '
            f"family: {', '.join(_configurations())}"
        )
    if known is None and chat.renderer_options:
        raise ConfigError(
            f"chat.renderer_options = {chat.renderer_options}: this setting is a renderer's, and none is known for "
            f"model.path = {path}: set chat.renderer, or leave it out"
        )
    return known


def load_renderer(
    config: RunConfig, name: str, tools: Sequence[dict[str, Any]], tokenizer: Any = None
) -> RendererFormat:
    """The renderer `name` for the run's tokenizer, loaded if it is not given, with its options. Raises
    `ConfigError`."""
    options = renderer_config(config.chat, name)
    path = config.model.path
    tokenizer = tokenizer or load_tokenizer(config.model)
    try:
        return RendererFormat(tokenizer, options, tools, path)
    except Exception as error:  # of many types, by what the tokenizer lacks, or cannot be fetched
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model.path = {path}: the renderer {name!r} cannot be made with its tokenizer ({type(error).__name__}: "
            f'{first}); name another with chat.renderer, or set chat.format = "template"'
        ) from error


def renderer_config(chat: ChatSection, name: str) -> Any:
    """The library's configuration `name`, with `chat.renderer_options` and those of `chat.chat_template_kwargs` that it
    has a field for. Raises `ConfigError`."""
    from pydantic import ValidationError
    from renderers import template_field_names

    kind = _configurations()[name]
    try:
        options = kind.model_validate({"name": name, **chat.renderer_options})
        fields = template_field_names(options)
        for key in chat.chat_template_kwargs:
            if key not in fields:
                raise ConfigError(
                    f"chat.chat_template_kwargs: {key!r} is no variable of the renderer {name!r}, which has "
                    f'{_listed(fields)}; leave it out, or set chat.format = "template"'
                )
            if key in chat.renderer_options:
                raise ConfigError(
                    f"chat.chat_template_kwargs and chat.renderer_options both set {key!r}; leave out one"
                )
        return kind.model_validate({"name": name, **chat.renderer_options, **chat.chat_template_kwargs})
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"chat.renderer_options or chat.chat_template_kwargs: {setting} = {first['input']!r}: {first['msg']}; the "
            f"fields of the renderer {name!r} are {_listed(set(kind.model_fields).difference(_HIDDEN_FIELDS))}"
        ) from None
    except (ImportError, OSError, TypeError, ValueError, AttributeError) as error:  # a renderer of the user's own
        raise ConfigError(f"chat.renderer_options: the renderer {name!r} cannot be made ({error})") from error


def _known(path: str) -> str | None:
    if Path(path).is_dir():  # no name of the hub: the library, which takes a second to import, is not asked
        return None
    from renderers.base import MODEL_RENDERER_MAP

    name: str | None = MODEL_RENDERER_MAP.get(path)
    return name


def _configurations() -> dict[str, Any]:
    """The classes of the library's configurations by name."""
    from renderers import RendererConfig

    classes = get_args(get_args(RendererConfig)[0])
    names = {kind.model_fields["name"].default: kind for kind in classes}
    return {name: kind for name, kind in sorted(names.items()) if name not in _NOT_NAMED}


def _checked(name: str) -> str:
    if name not in _configurations():
        raise ConfigError(
            f"chat.renderer = {name!r}: there is none of that name, the names are {', '.join(_configurations())}; for "
            f'the tokenizer\'s own template set chat.format = "template"'
        )
    return name


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"
