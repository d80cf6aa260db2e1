"""`slipstream COMMAND run.toml [--section.key value ...]`: one command for each process, and some to look around.

Heavy packages are imported inside the commands, so that each process loads only what it is made of.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from protocol.client import QueueClient, QueueError
from protocol.config import ConfigError, RunFile, load, to_toml

HERE = Path(__file__).parent

app = typer.Typer(
    help=__doc__.split("\n\n")[0].split(":", 1)[1].strip().capitalize(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.TOML", help="the run file; --section.key value overrides it")]
QueueUrl = Annotated[str | None, typer.Option("--queue", help="URL of the queue; default: the run file's")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")]

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=OVERRIDES)
def config(context: typer.Context, run_file: RunFilePath) -> None:
    """Check a run file and print it resolved, with every setting's meaning."""
    typer.echo(to_toml(load(run_file, context.args)))


@app.command(context_settings=OVERRIDES)
def queue(context: typer.Context, run_file: RunFilePath) -> None:
    """Run the rollout queue."""
    from rollout_queue.service import serve

    serve(load(run_file, context.args))


@app.command(context_settings=OVERRIDES)
def worker(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    name: Annotated[str | None, typer.Option(help="the worker's name; default: host and process id")] = None,
) -> None:
    """Run one rollout worker; any number may join and leave."""
    from rollout_worker.worker import run

    run(load(run_file, context.args), queue, name)


@app.command(context_settings=OVERRIDES)
def learner(context: typer.Context, run_file: RunFilePath, queue: QueueUrl = None, resume: Resume = False) -> None:
    """Run the learner; it publishes its weights to the vLLM servers."""
    from learner.loop import run

    run(load(run_file, context.args), queue, resume)


@app.command(context_settings=OVERRIDES)
def vllm(
    context: typer.Context,
    run_file: RunFilePath,
    index: Annotated[int, typer.Option(min=0, help="which of the run file's servers")] = 0,
) -> None:
    """Run vLLM's server with the flags that RL needs."""
    from deploy.vllm_server import run

    run(load(run_file, context.args), index)


@app.command(context_settings=OVERRIDES)
def up(context: typer.Context, run_file: RunFilePath, resume: Resume = False) -> None:
    """Run everything on this machine: deploy/launch.sh."""
    arguments = [run_file, *(["--resume"] if resume else []), *context.args]
    os.execv("/usr/bin/env", ["env", "bash", str(HERE / "launch.sh"), *arguments])


@app.command(context_settings=OVERRIDES)
def status(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="redraw every second until Ctrl-C")] = False,
) -> None:
    """Show depth, staleness and who waits for whom."""
    from deploy.status_view import show

    settings = load(run_file, context.args)
    asyncio.run(show(_client(settings, queue), watch))


@app.command(context_settings=OVERRIDES)
def ledger(context: typer.Context, run_file: RunFilePath) -> None:
    """Print what became of every ticket of the run, one JSON object a line."""
    from deploy.ledger_view import print_ledger

    print_ledger(load(run_file, context.args))


@app.command(context_settings=OVERRIDES, hidden=True)
def preflight(context: typer.Context, run_file: RunFilePath, resume: Resume = False) -> None:
    """Check all that can be checked before a process starts; print the launcher's shell variables."""
    from deploy.preflight import check, shell_variables, write_resolved

    settings = load(run_file, context.args)
    check(settings, resume)
    write_resolved(settings)
    typer.echo(shell_variables(settings))


def _client(settings: RunFile, url: str | None) -> QueueClient:
    return QueueClient(url or settings.queue.url, settings.token, patience_s=3.0)


def main() -> None:
    """Entry point. A setting or a state that cannot work ends with one message and exit code 2."""
    logging.basicConfig(
        level=os.environ.get("SLIPSTREAM_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except (ConfigError, QueueError) as error:
        sys.exit(_report(str(error)))


def _report(message: str) -> int:
    print(f"slipstream: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
