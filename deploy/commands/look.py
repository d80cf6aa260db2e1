"""Commands that inspect a run: `slipstream status`, `rollouts` and `ledger`; and `slipstream servers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

import typer

from slipstream.deploy.commands.arguments import AsJson, print_json
from slipstream.deploy.servers import servers
from slipstream.protocol import access
from slipstream.protocol.addresses import split_urls
from slipstream.protocol.client import QueueClient, QueueError, Unreachable
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.protocol.config.sections import LOOPBACK
from slipstream.protocol.rollouts import FILE_NAME as ROLLOUTS
from slipstream.protocol.status import ServerStatus, Status
from slipstream.rollout_queue import store

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.TOML", help="the run file")]

OptionalRunFilePath = Annotated[
    str | None, typer.Argument(metavar="[RUN.TOML]", help="the run file, which names the queue")
]


def _checked_urls(given: str | None) -> str | None:
    try:
        return given and ",".join(split_urls(given))
    except ValueError as error:
        raise ConfigError(f"--queue {given}: {error}") from None


QueueUrl = Annotated[
    str | None,
    typer.Option(
        "--queue",
        callback=_checked_urls,
        help="URL of the queue, or of several, separated by commas; default: the run file's",
    ),
]

# The commands of `slipstream servers`.
app = typer.Typer(no_args_is_help=True)


def status(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="redraw every second until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print it once, as one line of JSON")] = False,
) -> None:
    """Show depth, staleness and every wait; of a run that is over, how it ended."""
    from slipstream.deploy.commands.ended import EndedRun, launcher_runs
    from slipstream.deploy.commands.ended import find as find_ended
    from slipstream.deploy.commands.ended import show as show_ended
    from slipstream.deploy.commands.status import show
    from slipstream.deploy.commands.status import watch as watch_status

    config = _running(load(run_file, context.args), context.args)
    client = _client(config, queue, patience_s=0.0)
    checked = _checked_by(config, queue)

    def ended() -> EndedRun | None:
        return find_ended(config, time.time()) if queue is None else None

    try:
        if as_json:
            print_json(checked(asyncio.run(_status(client))))
        elif watch:
            asyncio.run(watch_status(client, checked, lambda: ended() is not None))
        else:
            asyncio.run(show(client, checked))
    except QueueError as error:
        if isinstance(error, Unreachable) and (found := ended()) is not None:
            show_ended(found, as_json)
            return
        if isinstance(error, Unreachable) and queue is None and launcher_runs(config.run_dir):
            raise ConfigError(
                f"run {config.run.name} is starting or ending: its launcher runs, and no queue answers at "
                f"{client.url}; look again in a few seconds, or into {config.run_dir / 'logs'}"
            ) from None
        raise ConfigError(f"{error}{_of_the_folder(config) if queue is None else ''}") from None


def rollouts(
    context: typer.Context,
    run_file: RunFilePath,
    step: Annotated[int | None, typer.Option(min=1, help="of this optimiser step only")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="the lowest rewards first")] = False,
    best: Annotated[bool, typer.Option("--best", help="the highest rewards first")] = False,
    evals: Annotated[bool, typer.Option("--eval", help="of evaluations; only those that the queue still has")] = False,
    role: Annotated[str | None, typer.Option(help="of this role only, where an episode has several")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many")] = 4,
    follow: Annotated[bool, typer.Option("--follow", help="show new ones until the run ends or Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
    queue: QueueUrl = None,
) -> None:
    """Read what the policy says, with rewards and staleness."""
    from slipstream.deploy.commands.ended import find as find_ended
    from slipstream.deploy.commands.rollouts import EVALUATIONS, Wanted, find, print_followed, print_lines, print_text

    if follow and (step is not None or worst or best or evals or role is not None or queue is not None):
        raise ConfigError("--follow shows new rollouts of the run directory as they come: give it without the others")
    if worst and best:
        raise ConfigError("--worst and --best: choose one of the two")
    config = load(run_file, context.args)
    if follow:
        if (over := find_ended(config, time.time())) is not None:
            raise ConfigError(
                f"--follow: run {config.run.name} {over.describe(time.time())}: no new rollouts will come"
            )
        print_followed(config.run_dir, as_json, lambda: find_ended(config, time.time()) is not None)
        return
    config = _running(config, context.args)
    wanted = Wanted(limit, step, "worst" if worst else "best" if best else "newest", evals, role)
    client = _client(config, queue, patience_s=0.0)
    ended = find_ended(config, time.time()) if queue is None else None
    how = "" if ended is None else f"run {config.run.name} {ended.describe(time.time())}"
    try:
        found = find(config.run_dir, wanted, client, queue is not None, None if queue else _checked_by(config, queue))
    except QueueError as error:
        if how and isinstance(error, Unreachable):
            left = f"rollouts of evaluations were in its queue alone; {EVALUATIONS} has their metrics"
            raise ConfigError(f"{how}; {left if evals else f'it left no rollout in {ROLLOUTS}'}") from None
        raise ConfigError(f"{error}{_of_the_folder(config) if queue is None else ''}") from None
    if how and not as_json:
        typer.echo(f"{how}\n")
    (print_lines if as_json else print_text)(found)


def ledger(context: typer.Context, run_file: RunFilePath) -> None:
    """Print how every ticket of the run ended, one JSON object a line."""
    print_ledger(load(run_file, context.args))


def print_ledger(config: RunConfig) -> None:
    """Print one JSON object a line, also next to a running queue. Raises `ConfigError` if there is no ledger."""
    try:
        rows = store.open_for_reading(config).read_ledger()
    except ConfigError as error:
        raise ConfigError(f"{error}{_of_the_folder(config)}") from None
    for row in rows:
        print_json(row)


def _of_the_folder(config: RunConfig) -> str:
    """Return the remedy for a run directory that is not here, to stand behind an error; "" if it is."""
    if config.run_dir.is_dir():
        return ""
    return (
        f"; there is no folder {config.run_dir.absolute()}: run.dir is taken from the working directory, so give the "
        f"command where the run was started, or add --run.dir"
    )


@app.command("list")
def show(
    run_file: OptionalRunFilePath = None,
    queue: QueueUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Show each server with its state, its version and what it waits for."""
    from slipstream.deploy.commands.status import print_servers

    try:
        client = _registry(run_file, queue).client(patience_s=0.0)
        checked = _checked_by(_running(load(run_file, [])), queue) if run_file else _any_run
        found = asyncio.run(servers.listed(client, checked))
    except Unreachable:
        if run_file is None or queue is not None:
            raise
        found = _servers_at_end(_running(load(run_file, [])), as_json)
    if not as_json:
        print_servers(found)
        return
    for server in found:
        print_json(server)


def _servers_at_end(config: RunConfig, as_json: bool) -> list[ServerStatus]:
    """Return the servers of a run that is over, as its queue last saw them, and say so unless `as_json`.

    Raises:
        ConfigError: The run may be under way, or left nothing of its servers.
    """
    from slipstream.deploy.commands.ended import find as find_ended

    url, ended = config.queue.address, find_ended(config, time.time())
    if ended is None:
        raise ConfigError(f"no queue answers at {url}: start it, or name another with --queue{_of_the_folder(config)}")
    how = f"run {config.run.name} {ended.describe(time.time())}"
    if ended.status is None:
        raise ConfigError(f"{how}; it left no state of its servers")
    if not as_json:
        typer.echo(f"{how}\nas its queue last saw them:")
    return ended.status.servers


@app.command("add")
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL at which workers and learner reach it")],
    run_file: OptionalRunFilePath = None,
    queue: QueueUrl = None,
    name: Annotated[str | None, typer.Option(help="its name in the run; default: host and port")] = None,
    as_json: AsJson = False,
) -> None:
    """Add a running vLLM server to the run. It serves once the learner has brought it up to date."""
    registry = _registry(run_file, queue)
    added = asyncio.run(servers.add(registry.client(), url, name, registry.token))
    if as_json:
        print_json(added)
    else:
        typer.echo(f"{added.name} at {added.url} is {added.state}")


@app.command("remove")
def leave(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `slipstream servers list` shows it")],
    run_file: OptionalRunFilePath = None,
    queue: QueueUrl = None,
    now: Annotated[bool, typer.Option("--now", help="do not wait for its running requests")] = False,
    force: Annotated[bool, typer.Option("--force", help="remove even the last server that serves")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait until it is gone")] = 600.0,
) -> None:
    """Remove a server: it gets no new episodes and finishes its requests; then it may be stopped."""
    asyncio.run(servers.remove(_registry(run_file, queue).client(), name, now, timeout, force))
    typer.echo(f"{name} is gone")


@dataclass(frozen=True)
class _Registry:
    """The queue whose servers are listed or changed, and a learner's token for it; None if the run has no secret."""

    url: str
    token: str | None

    def client(self, patience_s: float = 5.0) -> QueueClient:
        return QueueClient(self.url, self.token, patience_s=patience_s, timeout_s=10.0)


def _registry(run_file: str | None, queue: str | None) -> _Registry:
    """Raise `ConfigError` if neither names a queue."""
    if run_file is not None:
        config = _running(load(run_file, []))
        return _Registry(queue or config.queue.address, config.token_for("learner"))
    if queue is None:
        raise ConfigError("which run? Give its run file, or the queue's URL with --queue http://host:8200")
    return _Registry(queue, access.token_for(access.given_token(), "learner"))


def _running(config: RunConfig, given: Sequence[str] = ()) -> RunConfig:
    """Return the config with the queue's address of the run in its directory, if a launcher runs it.

    The run may have been started with another `--queue.port` than its file has.

    Args:
        given: Arguments of this command. An address among them is kept.
    """
    from slipstream.deploy.commands.ended import launcher_runs

    if any(word.startswith("--queue.") for word in given) or not launcher_runs(config.run_dir):
        return config
    try:
        queue = load(config.run_file).queue
    except ConfigError:  # it is starting, and has not written the file yet
        return config
    address = {"host": queue.host, "port": queue.port, "url": queue.url}
    return config.model_copy(update={"queue": config.queue.model_copy(update=address)})


def _any_run(status: Status) -> Status:
    return status


def _checked_by(config: RunConfig, queue: str | None) -> Callable[[Status], Status]:
    """Return what raises `ConfigError` for a status of another run, unless `queue` names the queue that is meant."""
    from slipstream.deploy.commands.status import of_run

    if queue is not None:
        return _any_run
    here = urlsplit(config.queue.address).hostname in LOOPBACK
    missing = config.run_dir if here and not config.run_dir.is_dir() else None
    return partial(of_run, run=config.run.name, url=config.queue.address, missing=missing)


def _client(config: RunConfig, queue: str | None, patience_s: float) -> QueueClient:
    return QueueClient(queue or config.queue.address, config.token_for("viewer"), patience_s=patience_s, timeout_s=10.0)


async def _status(client: QueueClient) -> Status:
    async with client:
        return await client.status()
