"""Commands that look at a run and change nothing: what the command line makes of the views."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from protocol.client import QueueClient, QueueError
from protocol.config import ConfigError, RunConfig, load
from protocol.status import Status

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.TOML", help="the run file")]

QueueUrl = Annotated[str | None, typer.Option("--queue", help="URL of the queue; default: the run file's")]


def status(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="redraw every second until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print it once, as one line of JSON")] = False,
) -> None:
    """Show depth, staleness and who waits for whom."""
    from deploy.commands.status import show

    config = load(run_file, context.args)
    # One look asks once; a watch outlives a restart of the queue.
    client = _client(config, queue, patience_s=60.0 if watch and not as_json else 0.0)
    try:
        if as_json:
            typer.echo(msgspec.json.encode(asyncio.run(_status(client))).decode())
        else:
            asyncio.run(show(client, watch))
    except QueueError as error:
        raise ConfigError(str(error)) from None


def rollouts(
    context: typer.Context,
    run_file: RunFilePath,
    step: Annotated[int | None, typer.Option(min=1, help="of this optimiser step only")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="the lowest rewards first")] = False,
    best: Annotated[bool, typer.Option("--best", help="the highest rewards first")] = False,
    evals: Annotated[bool, typer.Option("--eval", help="of evaluations, as far as the queue remembers")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
    queue: QueueUrl = None,
) -> None:
    """Read what the policy says, with rewards and staleness."""
    from deploy.commands.rollouts import Wanted, find, print_json, print_text

    if worst and best:
        raise ConfigError("--worst and --best: choose one of the two")
    config = load(run_file, context.args)
    wanted = Wanted(limit, step, "worst" if worst else "best" if best else "newest", evals)
    client = _client(config, queue, patience_s=0.0)
    try:
        found = find(config.run_dir, wanted, client, ask=queue is not None)
    except QueueError as error:
        raise ConfigError(str(error)) from None
    (print_json if as_json else print_text)(found)


def ledger(context: typer.Context, run_file: RunFilePath) -> None:
    """Print what became of every ticket of the run, one JSON object a line."""
    from deploy.ledger_view import print_ledger

    print_ledger(load(run_file, context.args))


def _client(config: RunConfig, queue: str | None, patience_s: float) -> QueueClient:
    return QueueClient(queue or config.queue.url, config.token_for("viewer"), patience_s=patience_s, timeout_s=10.0)


async def _status(client: QueueClient) -> Status:
    async with client:
        return await client.status()
