"""`slipstream servers`: what the command line makes of `deploy.servers`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from deploy import servers
from protocol import tokens
from protocol.client import QueueClient

app = typer.Typer(no_args_is_help=True)
RequiredQueueUrl = Annotated[str, typer.Option("--queue", help="URL of the queue, as http://host:8200")]


def _queue_of(url: str) -> QueueClient:
    return QueueClient(url, tokens.of(tokens.given(), "learner"), patience_s=5.0, timeout_s=10.0)


@app.command("list")
def show(queue: RequiredQueueUrl) -> None:
    """Each server with its state, version and what it waits for."""
    from deploy.status_view import print_servers

    print_servers(asyncio.run(servers.listed(_queue_of(queue))))


@app.command("add")
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="where workers and learner reach it")],
    queue: RequiredQueueUrl,
    name: Annotated[str | None, typer.Option(help="its name in the run; default: host and port")] = None,
) -> None:
    """Let a vLLM server that runs join the job. It serves once the learner has brought it up to date."""
    added = asyncio.run(servers.add(_queue_of(queue), url, name, tokens.of(tokens.given(), "learner")))
    typer.echo(f"{added.name} at {added.url} is {added.state}")


@app.command("remove")
def leave(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `slipstream servers list` shows it")],
    queue: RequiredQueueUrl,
    now: Annotated[bool, typer.Option("--now", help="without waiting for its requests")] = False,
    force: Annotated[bool, typer.Option("--force", help="even the last server that serves")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait until it is gone")] = 600.0,
) -> None:
    """Let a server leave: no new episodes, then the end of its requests; then it may be stopped."""
    asyncio.run(servers.remove(_queue_of(queue), name, now, timeout, force))
    typer.echo(f"{name} is gone")
