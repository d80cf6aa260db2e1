"""Finds the renderer that the run file asks for, and its options, from `chat.*` and the library's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from slipstream.protocol.config import ChatSection, ConfigError, RunConfig
from slipstream.protocol.config.checks import template_settings
from slipstream.rollout_worker.chat.renderer import RendererFormat
from slipstream.rollout_worker.chat.tokenizer import load_tokenizer

# These configurations of the library are not notations. `auto` chooses by name. `default` is the tokenizer's own
# template, which `chat.format = "template"` handles better.
_NOT_NAMED = ("auto", "default")

# The library sets these options itself, so messages do not list them.
_HIDDEN_FIELDS = ("name",)


def renderer_name(config: RunConfig) -> str | None:
    """Find the name of the run's renderer.

    Returns:
        The renderer that `chat.renderer` names, or the one that the library knows for `model.path`. None means that
        the run uses a template.

    Raises:
        ConfigError: The name is unknown, or the run file gives a renderer's options and no renderer is known.
    """
    chat, path = config.chat, config.model.path
    if chat.format == "template":
        return None
    if chat.renderer is not None:
        return _checked(chat.renderer)
    if template_settings(chat):
        # A user who gives a template or a parser does not want the model's original notation.
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
    """Build the renderer `name`, with its options, for the run's tokenizer.

    Args:
        config: The run's config.
        name: The renderer's name.
        tools: JSON schemas of the tools.
        tokenizer: The run's tokenizer. It is loaded if not given.

    Returns:
        The chat format.

    Raises:
        ConfigError: An option is wrong, or the renderer cannot be built with this tokenizer.
    """
    options = renderer_config(config.chat, name)
    path = config.model.path
    tokenizer = tokenizer or load_tokenizer(config.model)
    try:
        return RendererFormat(tokenizer, options, tools, path)
    except Exception as error:  # the type depends on what the tokenizer lacks or what cannot be fetched
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model.path = {path}: the renderer {name!r} cannot be made with its tokenizer ({type(error).__name__}: "
            f'{first}); name another with chat.renderer, or set chat.format = "template"'
        ) from error


def renderer_config(chat: ChatSection, name: str) -> Any:
    """Build the library's configuration `name` from `chat.renderer_options` and `chat.chat_template_kwargs`.

    Raises:
        ConfigError: The renderer has no field for a key of `chat.chat_template_kwargs`, both settings give the same
            key, a value is wrong, or the user's own renderer cannot be built.
    """
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
    except (ImportError, OSError, TypeError, ValueError, AttributeError) as error:  # the user's own renderer
        raise ConfigError(f"chat.renderer_options: the renderer {name!r} cannot be made ({error})") from error


def _known(path: str) -> str | None:
    if Path(path).is_dir():  # not a hub name, so skip the library: its import takes a second
        return None
    from renderers.base import MODEL_RENDERER_MAP

    name: str | None = MODEL_RENDERER_MAP.get(path)
    return name


def _configurations() -> dict[str, Any]:
    """Return the classes of the library's configurations by name."""
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
