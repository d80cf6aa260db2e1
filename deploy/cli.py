"""`slipstream COMMAND run.toml [--section.key value ...]`: one command for each process, and some to look around.

Heavy packages are imported inside the commands, so that each process loads only what it is made of.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from deploy import extras
from deploy.supervisor import SIGNALS, RunFailed, supervise
from protocol.client import QueueClient, QueueError
from protocol.config import ConfigError, load, to_toml

app = typer.Typer(
    help="One command for each process of a run. All take --section.key VALUE to override the run file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.TOML", help="the run file")]
QueueUrl = Annotated[str | None, typer.Option("--queue", help="URL of the queue; default: the run file's")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")]

OVERRIDES: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "options_metavar": "[--section.key VALUE ...] [OPTIONS]",
}


@app.command(**OVERRIDES)
def config(context: typer.Context, run_file: RunFilePath) -> None:
    """Check a run file and print it resolved, with every setting's meaning."""
    typer.echo(to_toml(load(run_file, context.args)))


@app.command(**OVERRIDES)
def queue(context: typer.Context, run_file: RunFilePath) -> None:
    """Run the rollout queue."""
    from rollout_queue.service import serve

    serve(load(run_file, context.args))


@app.command(**OVERRIDES)
def worker(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    name: Annotated[str | None, typer.Option(help="the worker's name; default: host and process id")] = None,
) -> None:
    """Run one rollout worker; any number may join and leave."""
    # Without torch, which it does not need, transformers would warn.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from rollout_worker.worker import run

    raise typer.Exit(run(load(run_file, context.args), queue, name))


@app.command(**OVERRIDES)
def learner(context: typer.Context, run_file: RunFilePath, queue: QueueUrl = None, resume: Resume = False) -> None:
    """Run the learner; it publishes its weights to the vLLM servers."""
    extras.require("slipstream learner", extras.LEARNER)
    from learner.loop import run
    from learner.trainer import DivergedError
    from weight_sync.publisher import PublishError

    try:
        run(load(run_file, context.args), queue, resume)
    except (DivergedError, PublishError) as error:
        raise RunFailed(str(error)) from error


@app.command(**OVERRIDES)
def vllm(
    context: typer.Context,
    run_file: RunFilePath,
    index: Annotated[int, typer.Option(min=0, help="which of the run file's servers")] = 0,
) -> None:
    """Run vLLM's server with the flags that RL needs."""
    from deploy.vllm_server import run

    run(load(run_file, context.args), index)


@app.command(**OVERRIDES)
def up(context: typer.Context, run_file: RunFilePath, resume: Resume = False) -> None:
    """Run everything on this machine until the learner is done."""
    try:
        supervise(load(run_file, context.args), resume)
    except (KeyboardInterrupt, SystemExit):
        # Everything has ended: an impatient second signal has nothing left to stop but the exit.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise


@app.command(**OVERRIDES)
def status(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="redraw every second until Ctrl-C")] = False,
) -> None:
    """Show depth, staleness and who waits for whom."""
    from deploy.status_view import show

    config = load(run_file, context.args)
    # One look asks once; a watch outlives a restart of the queue.
    client = QueueClient(queue or config.queue.url, config.token, patience_s=60.0 if watch else 0.0, timeout_s=10.0)
    try:
        asyncio.run(show(client, watch))
    except QueueError as error:
        raise ConfigError(str(error)) from None


@app.command(**OVERRIDES)
def ledger(context: typer.Context, run_file: RunFilePath) -> None:
    """Print what became of every ticket of the run, one JSON object a line."""
    from deploy.ledger_view import print_ledger

    print_ledger(load(run_file, context.args))


@app.command(**OVERRIDES, hidden=True)
def preflight(context: typer.Context, run_file: RunFilePath, resume: Resume = False) -> None:
    """Check all that can be checked before a process starts. What is wrong goes to stdout, for `up` to read."""
    from deploy.preflight import check

    code = 0
    # Keep a task file's own prints out of the answer.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            check(load(run_file, context.args), resume)
        except ConfigError as error:
            answer.write(str(error))
            code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that the task file started would keep the process from ending otherwise


def main() -> None:
    """Entry point. Exit code 2 and one message: a setting or a state that cannot work; 1: the run failed."""
    logging.basicConfig(
        level=os.environ.get("SLIPSTREAM_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except ConfigError as error:
        _end(error, 2)
    except QueueError as error:
        _end(error, 1)
    except RunFailed as error:
        _end(error, error.code)


def _end(error: Exception, code: int) -> NoReturn:
    print(f"slipstream: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
