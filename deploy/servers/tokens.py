"""Tokens on the command line: prints a role's, keeps them out of arguments, asks for the run's secret."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, RunConfig


def print_token(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="worker, learner or viewer")],
    file: Annotated[
        Path | None, typer.Option(help="file with the secret, mode 0600; default: SLIPSTREAM_TOKEN")
    ] = None,
) -> None:
    """Print the token of a role, for a process on another machine."""
    typer.echo(token_of(role, file))


def token_of(role: str, file: Path | None) -> str:
    """Derive a role's token from the secret in `file`, else in the environment. Raises `ConfigError` without one."""
    if role not in access.ROLES:
        raise ConfigError(f"ROLE = {role}: there is no such role; the roles are: {', '.join(access.ROLES)}")
    try:
        secret = access.read_token_file(file) if file is not None else access.given_token()
        if not secret:
            raise ConfigError(
                f"{access.TOKEN_VARIABLE} is not set: set it to the run's secret, or "
                f"give a file that holds it with --file"
            )
        if len(access.secret_of(secret)) < access.MIN_TOKEN_CHARACTERS:
            raise ConfigError(
                f"the secret has {len(secret)} characters, and whoever holds a role's token could find it by trying: "
                f"take a random one of at least {access.MIN_TOKEN_CHARACTERS}, as from openssl rand -hex 16"
            )
        return access.derive_token(secret, role)
    except access.TokenError as error:
        raise ConfigError(str(error)) from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a token, or the URL of a database with its password, among the arguments: every user of
    the machine can read a command line."""
    for argument in arguments:
        if re.search(r"postgres(ql)?://(.*:.*@|.*password=)", argument):
            raise ConfigError(
                "the URL of a database: its password does not belong on a command line, which every user of the "
                "machine can read: set PGPASSWORD, or write it into ~/.pgpass"
            )
        name = argument.partition("=")[0]
        if name == "--queue.token" or access.role_of(argument) is not None:
            raise ConfigError(
                f"{name if name.startswith('--') else 'a token'}: a token does not belong on a command line, which "
                f"every user of the machine can read: set {access.TOKEN_VARIABLE}, or {access.TOKEN_FILE_VARIABLE} to "
                f"a file with mode 0600 that holds it"
            )


def check_secret(config: RunConfig) -> None:
    """Raise `ConfigError` if a process that checks tokens was given a role's token in place of the run's secret."""
    try:
        access.secret_of(config.token or "")
    except access.TokenError as error:
        raise ConfigError(str(error)) from None
