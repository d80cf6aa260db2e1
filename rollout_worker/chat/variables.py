"""`chat.chat_template_kwargs`: which variables a template reads, so that a misspelt one is not passed in vain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser as JinjaParser

from protocol.config import ConfigError
from protocol.config.checks import RESERVED

# Functions that transformers gives to templates.
_FUNCTIONS = {"raise_exception", "strftime_now"}


def check_variables(variables: dict[str, Any], source: str | None, given: Iterable[str] = ()) -> None:
    """Raises `ConfigError` for a variable that the template `source` does not read.

    given: what else rendering gives to a template, such as the special tokens, which need not be told of.
    """
    if not variables or source is None:
        return
    try:
        read = read_by(source)
    except jinja2.TemplateSyntaxError:  # which is told where the template is used
        return
    if unread := sorted(set(variables) - read):
        others = sorted(read - RESERVED - _FUNCTIONS - {"documents"} - set(given))
        raise ConfigError(
            f"chat.chat_template_kwargs: the template reads no variable {unread[0]!r}, so that setting it changes "
            f"nothing; it reads {', '.join(others) or 'none'}: correct the name, or leave it out"
        )


def read_by(source: str) -> set[str]:
    """Names that a template reads and may get from outside. Raises `jinja2.TemplateSyntaxError`."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
    return find_undeclared_variables(environment.parse(source))


class _GenerationBlock(Extension):
    """`{% generation %}`, with which transformers marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: JinjaParser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
