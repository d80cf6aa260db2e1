"""Helps all commands: reads settings among their arguments, shows settings in their help, and ends them.

A wrong command line or setting is one message with exit code 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.client import QueueError
from slipstream.protocol.config import ConfigError, Finding
from slipstream.protocol.config.load import OPTION
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.text import find_field, named, nearest, settings

AsJson = Annotated[bool, typer.Option("--json", help="print it as one line of JSON")]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint")]

YES_OR_NO = ("true", "false", "yes", "no", "on", "off")


def reading(*settings: str, others: bool = False) -> dict[str, Any]:
    """Return the arguments of `app.command` for a command that takes settings.

    Args:
        settings: Settings that the command reads, for its help: each a section or a section.key.
        others: Whether it starts processes that read more.
    """
    return {
        "cls": type("SettingsCommand", (SettingsCommand,), {"reads": settings, "others": others}),
        "context_settings": {"allow_extra_args": True},
        "options_metavar": "[--section.key VALUE ...] [OPTIONS]",
    }


class SettingsCommand(TyperCommand):
    """A command with settings among its arguments. It leaves them in `context.args` for `parse_overrides`."""

    reads: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[bool] = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise `ConfigError` for an unknown option, with the nearest name."""
        flags = {name for param in self.params if getattr(param, "is_flag", False) for name in param.opts}
        options = {name for param in self.params for name in param.opts} | {*ctx.help_option_names}
        given, rest = _split_settings(args, options)
        unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in options]
        if not ctx.resilient_parsing:
            _check_options(rest, unknown, flags, options)
        left = super().parse_args(ctx, [word for word in rest if word not in unknown])
        ctx.args = [*given, *unknown, *left]
        return left

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        console = Console()
        if self.reads:
            console.print("[bold]Settings[/], of the run file or given as --section.key VALUE:\n")
            console.print(_table(self.reads))
        if self.others:
            console.print("\nThe processes that it starts read the others; slipstream config prints all of them.")


def _split_settings(args: list[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a command line into settings with their values, and the other words."""
    given: list[str] = []
    rest: list[str] = []
    words: Iterator[str] = iter(args)
    for word in words:
        match = OPTION.fullmatch(word)
        (given if match else rest).append(word)
        if match and match[3] is None and (value := next(words, None)) is not None:
            # An option is no value: `parse_overrides` then says that the value is missing.
            (rest if value.partition("=")[0] in options else given).append(value)
    return given, rest


def _check_options(rest: list[str], unknown: list[str], flags: Collection[str], options: Collection[str]) -> None:
    """Raise `ConfigError` for a mistyped option with a near name; `parse_overrides` refuses the others."""
    for option, value in pairwise(rest):
        if option in flags and value.lower() in YES_OR_NO:
            raise ConfigError(f"{option} {value}: {option} takes no value; give it alone, or leave it out")
    for word in unknown:
        name = word.partition("=")[0]
        meant = None if named(name.lstrip("-")) else nearest(name, options)
        if meant:
            raise ConfigError(f"{word}: not understood; did you mean {meant}?")


def _table(reads: Collection[str]) -> Table:
    table = Table("setting and default", "meaning", box=None, pad_edge=False, header_style="dim")
    for name in settings():
        section, key = name.split(".")
        field = find_field(section, key)
        if field is None or not {section, name} & {*reads}:
            continue
        default = "(to be set)" if field.is_required() else "" if field.default is None else toml_value(field.default)
        table.add_row(Text(f"--{name} {default}"), Text(str(field.description)))
    return table


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process with the exit code that `main` would give, without waiting for threads of the task's code."""
    try:
        yield
    except typer.Exit as ended:
        code = ended.exit_code
    except (ConfigError, QueueError, RunFailed) as error:
        code = print_error(error)
    except Exception:
        logging.getLogger(__name__).exception("the command failed unexpectedly")
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process. A thread or executor that the task file started would keep `sys.exit` from ending it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the task's code may have closed it
            stream.flush()
    os._exit(code)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one line for each finding on stderr, with its severity."""
    for finding in findings:
        print(f"slipstream: {finding.severity}: {finding}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout."""
    print(msgspec.json.encode(value).decode(), flush=True)


def print_error(error: Exception) -> int:
    """Print the error on stderr and return its exit code."""
    with contextlib.suppress(OSError, ValueError):  # the task's code may have closed stderr
        print(f"slipstream: {error}", file=sys.stderr)
    if isinstance(error, RunFailed):
        return error.code
    return 2 if isinstance(error, ConfigError) else 1
