"""`slipstream queue run.toml` runs the rollout queue; `queue backup`, `copy` and `new` care for its store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slipstream.deploy.commands.arguments import AsJson, print_json, reading
from slipstream.deploy.commands.look import RunFilePath
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, RunConfig, load, parse_overrides, resolve
from slipstream.protocol.versions import new_run_id
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store import copying
from slipstream.rollout_queue.store.changes import Changes

# Folders of stores that a new ledger has taken the place of.
OLD = "old-store-"

STORE = ("run.name", "run.dir", "queue.store")


class _QueueGroup(TyperGroup):
    """Takes anything but the name of one of its commands for the arguments of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


app = typer.Typer(cls=_QueueGroup, help="Run the rollout queue; back up its store, move it, or begin it again.")


@app.command(
    **reading("run", "queue", "rollout.group_size", "learner.groups_per_step", "eval.share", "tracking.traces"),
    epilog="slipstream queue backup, queue copy and queue new care for its store: see their --help.",
)
def run(context: typer.Context, run_file: RunFilePath) -> None:
    """Run the rollout queue."""
    from slipstream.rollout_queue.service import serve

    serve(load(run_file, context.args))


@app.command(**reading(*STORE))
def backup(
    context: typer.Context,
    run_file: RunFilePath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="where to write it; must not exist")],
    as_json: AsJson = False,
) -> None:
    """Write the whole store into one SQLite file, of one moment, while the queue runs."""
    rows = copying.back_up(stores.open_for_reading(load(run_file, context.args)), file)
    if as_json:
        print_json({"file": str(file), "rows": rows})
    else:
        typer.echo(f"{file}: {_counted(rows)}; read whole")


@app.command(**reading(*STORE))
def copy(
    context: typer.Context,
    run_file: RunFilePath,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="postgresql://host/database, without a password")],
) -> None:
    """Copy the SQLite store of a run, whose queue is stopped, into PostgreSQL."""
    config = load(run_file, context.args)
    target = resolve(run_file, {**parse_overrides(context.args), ("queue", "store"): to}, "--to")
    if target.queue.store_kind != "postgresql":
        raise ConfigError(f"--to {to}: give the URL of a database: postgresql://host/database")
    for place in (config, target):
        _check_stopped(place)
    rows = copying.move_to_postgres(config, target)
    typer.echo(f"copied {_counted(rows)}. Write into {run_file}, under [queue], before the queue starts again:")
    typer.echo(f'store = "{target.queue.store}"')


@app.command(**reading(*STORE))
def new(context: typer.Context, run_file: RunFilePath) -> None:
    """Begin a new ledger next to the run's checkpoints, for a run whose store is lost; an old one is put aside."""
    config = load(run_file, context.args)
    if config.queue.store_kind == ":memory:":
        raise ConfigError('queue.store = ":memory:" begins again with each start of the queue: there is nothing to do')
    _check_stopped(config)
    _check_has_run(config)
    aside = _set_aside(config)
    store = stores.build(config)
    try:
        if (active := store.acquire()) is not None:
            raise ConfigError(f"queue.store = {config.queue.store}: the queue at {active} uses it; stop that first")
        store.commit(Changes(run=RunState(id=new_run_id(config.run.name))))
    finally:
        store.close()
    moved = f"; what was there is put aside as {aside.name}" if aside else ""
    typer.echo(f"{config.queue.store}: a new ledger{moved}. Continue with slipstream up {run_file} --resume")


def _check_stopped(config: RunConfig) -> None:
    """Raise `ConfigError` if a queue is active on the run's store, or if that cannot be reached."""
    if (queue := stores.open_for_reading(config).look().queue) is not None:
        raise ConfigError(
            f"queue.store = {config.queue.store}: {queue} is active on it: stop it first, with Ctrl-C or SIGTERM to "
            f"slipstream up or to slipstream queue"
        )


def _check_has_run(config: RunConfig) -> None:
    """Raise `ConfigError` if neither a checkpoint nor a store is there, as under a mistyped name."""
    if checkpoints.complete(config.run_dir) or stores.open_for_reading(config).exists():
        return
    folders = sorted(config.run.dir.glob("*"))
    runs = [path.name for path in folders if (path / config.run_file.name).is_file() or checkpoints.complete(path)]
    raise ConfigError(
        f"run.name = {config.run.name}: there is no such run: neither a checkpoint in {config.run_dir} nor a ledger in "
        f"queue.store = {config.queue.store}; the runs in {config.run.dir} are: {', '.join(runs) or 'none'}"
    )


def _set_aside(config: RunConfig) -> Path | None:
    """Put the run's store aside. Returns the folder that has it, or gave it its name; None if there was none."""
    reader = stores.open_for_reading(config)
    if not reader.exists():
        return None
    taken = [path.name.removeprefix(OLD) for path in config.run_dir.glob(f"{OLD}*")]
    folder = config.run_dir / f"{OLD}{1 + max((int(number) for number in taken if number.isdigit()), default=0)}"
    folder.mkdir(parents=True)
    try:
        reader.set_aside(folder)
    except ConfigError:
        folder.rmdir()
        raise
    return folder


def _counted(rows: dict[str, int]) -> str:
    return f"{rows.get('tickets', 0)} tickets, {rows.get('payloads', 0)} groups and {rows.get('servers', 0)} servers"
