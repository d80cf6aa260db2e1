"""Commands that look at a run and change nothing: what the command line makes of the views.

`slipstream ledger`: what became of every ticket of a run, for audits.

`slipstream servers`: what the command line makes of `deploy.servers.servers`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from deploy.servers import servers
from protocol import access
from protocol.client import QueueClient, QueueError
from protocol.config import ConfigError, RunConfig, load
from protocol.status import Status
from rollout_queue import store

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

    print_ledger(load(run_file, context.args))


def _client(config: RunConfig, queue: str | None, patience_s: float) -> QueueClient:
    return QueueClient(queue or config.queue.url, config.token_for("viewer"), patience_s=patience_s, timeout_s=10.0)


async def _status(client: QueueClient) -> Status:
    async with client:
        return await client.status()


def print_ledger(config: RunConfig) -> None:
    """One JSON object a line; works beside a running queue. Raises `ConfigError` where there is no ledger."""
    if config.queue.store == ":memory:":
        raise ConfigError('queue.store = ":memory:" keeps no ledger: choose "sqlite" to be able to read it later')
    for row in store.open_for_reading(config).read_ledger():
        print(msgspec.json.encode(row).decode())


app = typer.Typer(no_args_is_help=True)

OptionalRunFilePath = Annotated[
    str | None, typer.Argument(metavar="[RUN.TOML]", help="the run file, which names the queue")
]


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
