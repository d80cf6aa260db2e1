"""`slipstream servers`: what the command line makes of `deploy.servers.servers`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

import typer

from deploy.servers import servers
from protocol import access
from protocol.client import QueueClient
from protocol.config import ConfigError, load

app = typer.Typer(no_args_is_help=True)
OptionalRunFilePath = Annotated[
    str | None, typer.Argument(metavar="[RUN.TOML]", help="the run file, which names the queue")
]
QueueUrl = Annotated[str | None, typer.Option("--queue", help="URL of the queue; default: the run file's")]


@dataclass(frozen=True)
class _Asked:
    """The queue's URL, and the token of a learner, if there is one."""

    url: str
    token: str | None

    def client(self) -> QueueClient:
        return QueueClient(self.url, self.token, patience_s=5.0, timeout_s=10.0)


def _asked(run_file: str | None, queue: str | None) -> _Asked:
    """Raises `ConfigError` where neither says which queue."""
    if run_file is not None:
        config = load(run_file, [])
        return _Asked(queue or config.queue.url, config.token_for("learner"))
    if queue is None:
        raise ConfigError("which run? Give its run file, or the queue's URL with --queue http://host:8200")
    return _Asked(queue, access.token_for(access.given_token(), "learner"))


@app.command("list")
def show(run_file: OptionalRunFilePath = None, queue: QueueUrl = None) -> None:
    """Each server with its state, version and what it waits for."""
    from deploy.commands.status import print_servers

    print_servers(asyncio.run(servers.listed(_asked(run_file, queue).client())))


@app.command("add")
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="where workers and learner reach it")],
    run_file: OptionalRunFilePath = None,
    queue: QueueUrl = None,
    name: Annotated[str | None, typer.Option(help="its name in the run; default: host and port")] = None,
) -> None:
    """Let a vLLM server that runs join the job. It serves once the learner has brought it up to date."""
    asked = _asked(run_file, queue)
    added = asyncio.run(servers.add(asked.client(), url, name, asked.token))
    typer.echo(f"{added.name} at {added.url} is {added.state}")


@app.command("remove")
def leave(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `slipstream servers list` shows it")],
    run_file: OptionalRunFilePath = None,
    queue: QueueUrl = None,
    now: Annotated[bool, typer.Option("--now", help="without waiting for its requests")] = False,
    force: Annotated[bool, typer.Option("--force", help="even the last server that serves")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait until it is gone")] = 600.0,
) -> None:
    """Let a server leave: no new episodes, then the end of its requests; then it may be stopped."""
    asyncio.run(servers.remove(_asked(run_file, queue).client(), name, now, timeout, force))
    typer.echo(f"{name} is gone")
