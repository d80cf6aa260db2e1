"""`slipstream COMMAND run.toml [--section.key value ...]`: one command for each process, and some to inspect a run.

Heavy packages are imported inside the commands, so that each process loads only what it uses.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from slipstream.deploy.clusters.roles import check_release
from slipstream.deploy.commands import cluster, demos, look, queue, report, sft, summary
from slipstream.deploy.commands.arguments import (
    AsJson,
    Resume,
    ending_at_once,
    leave,
    print_error,
    print_findings,
    print_json,
    reading,
)
from slipstream.deploy.commands.look import QueueUrl, RunFilePath
from slipstream.deploy.run.process_keeper import TAKEN_OVER, RunFailed
from slipstream.deploy.run.supervisor import SIGNALS
from slipstream.deploy.servers import devices, probes, tokens
from slipstream.deploy.servers.tokens import check_arguments, check_secret
from slipstream.protocol import access, log_lines, reasons
from slipstream.protocol.client import QueueError, QueueRefused
from slipstream.protocol.config import (
    ConfigError,
    Finding,
    Need,
    RunConfig,
    load,
    missing_files,
    parse_overrides,
    resolve,
    to_toml,
)
from slipstream.protocol.config.checks import find_algorithm_warnings, find_quorum_warnings
from slipstream.protocol.config.fingerprint import release
from slipstream.protocol.config.text import nearest
from slipstream.protocol.import_path import python_path

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

OptionalRunFilePath = Annotated[str | None, typer.Argument(metavar="[RUN.TOML]", help="the run file, if there is one")]

RUN = ("run.name", "run.dir")
QUEUE = ("queue.host", "queue.port", "queue.token")
MODEL = ("model.path", "model.tokenizer", "model.revision", "model.trust_remote_code")
EVERYTHING: tuple[Need, ...] = ("task", "model", "chat", "callbacks")
# Placeholders for the settings without a default, while there is no run file.
TO_BE_SET = {("model", "path"): "model", ("task", "path"): "task.py:task"}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {release()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """One command for each process of a run, and some to inspect it. With a run file, --section.key VALUE overrides a
    setting."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="where to write; may exist")] = Path(),
    model: Annotated[str, typer.Option(help="a local model folder, or a Hugging Face hub name")] = "Qwen/Qwen3-0.6B",
) -> None:
    """Write a run file, a task and its data to start from."""
    from slipstream.deploy.commands.setup import write_task_files

    write_task_files(folder, model)


@app.command(**reading(*RUN, "queue.port", "queue.store", "vllm.port", "vllm.count", "vllm.servers"))
def doctor(context: typer.Context, run_file: OptionalRunFilePath = None, as_json: AsJson = False) -> None:
    """Show packages, devices, the run's store, and what is broken."""
    from slipstream.deploy.commands.setup import examine

    raise typer.Exit(examine(load(run_file, context.args) if run_file else None, as_json))


@app.command(**reading())
def config(
    context: typer.Context,
    run_file: OptionalRunFilePath = None,
    section: Annotated[str | None, typer.Option(help="print this section only")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a run file and print it with all settings; without one, print the defaults."""
    from slipstream.deploy.servers.vllm_server import on_cpu

    given = parse_overrides(context.args)
    unset = {} if run_file else {name: value for name, value in TO_BE_SET.items() if name not in given}
    found = resolve(run_file, {**unset, **given}, "command line")
    if section is not None and section not in RunConfig.model_fields:
        meant = nearest(section, RunConfig.model_fields)
        hint = f"did you mean {meant}?" if meant else f"the sections are: {', '.join(RunConfig.model_fields)}"
        raise ConfigError(f"--section {section}: there is no such section; {hint}")
    if run_file:
        found = devices.with_checkpoint_type(found, on_cpu(), partial(typer.echo, err=True))
    text = to_toml(found, section and [section], unset.keys())
    if as_json:
        print_json(tomllib.loads(text))
    else:
        typer.echo(text)
    # A file may still be missing here: only the commands that start something need it.
    missing = [Finding("warning", text) for text in missing_files(found, EVERYTHING)] if run_file else []
    print_findings(
        [*find_algorithm_warnings(found.learner), *find_quorum_warnings(found.weight_sync, found.vllm), *missing]
    )


app.add_typer(queue.app, name="queue")


@app.command(
    **reading(
        *("task", "teacher", "worker", "agent", "rollout", "chat", "images", "eval", *MODEL, "vllm.max_model_len"),
        *("run.seed", "tracking.traces", *QUEUE),
    )
)
def worker(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    name: Annotated[str | None, typer.Option(help="the worker's name; default: host and process id")] = None,
) -> None:
    """Run one rollout worker. Any number may join and leave."""
    from slipstream.rollout_worker.worker import run

    config = load(run_file, context.args, needs=["task", "tokenizer", "chat"])
    access.hide_token()  # Programs that the task's code starts must not read it.
    with ending_at_once():
        raise typer.Exit(run(config, queue, name))


@app.command(
    **reading(
        *(
            "run",
            "model",
            "task",
            "learner",
            "images.enabled",
            "lora",
            "demonstrations",
            "eval",
            "tracking",
            "hub",
            "weight_sync",
            "queue.max_staleness",
            "queue.overage",
            *QUEUE,
        ),
        *("rollout.temperature", "rollout.top_k", "rollout.mask_truncated", "rollout.accept_sampler_mismatch"),
    ),
)
def learner(
    context: typer.Context,
    run_file: RunFilePath,
    queue: QueueUrl = None,
    resume: Resume = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="with --resume: end one that lives")] = False,
) -> None:
    """Run the learner; it publishes its weights to the vLLM servers."""
    probes.require_modules("slipstream learner", probes.LEARNER_MODULES)
    # Importing torch takes seconds; report a wrong setting before that.
    config = load(run_file, context.args, needs=["model", "chat", "callbacks"])
    if config.learner.script is not None:
        resumed = ["--resume"] if resume else []
        _become(config.learner.script, run_file, *(["--queue", queue] if queue else []), *resumed, *context.args)
    from slipstream.learner.ranks.liveness import RANK_LOST, RankLost
    from slipstream.learner.ranks.stopping import LearnerFailed
    from slipstream.learner.run import run
    from slipstream.weight_sync.publisher import PublishError

    access.hide_token()  # Callbacks, and programs that they start, must not read it.
    if config.learner.epochs is not None:
        config = _with_steps(load(run_file, context.args, needs=EVERYTHING))
    demonstrations = sft.mixed_in(config)
    config = devices.settle_learner(config, typer.echo)
    devices.forbid_peers(config)
    try:
        run(config, queue, resume, take_over, demonstrations)
    except QueueRefused as error:
        if error.reason != reasons.SESSION_SUPERSEDED:
            raise
        raise RunFailed(f"another learner has taken the run over: {error}", TAKEN_OVER) from error
    except RankLost as error:
        raise RunFailed(str(error), RANK_LOST) from error
    except (LearnerFailed, PublishError) as error:
        raise RunFailed(str(error)) from error


@app.command(
    **reading(
        *("vllm", *MODEL, "model.dtype", "weight_sync.transport", "weight_sync.adapter_only", "lora", "images.enabled"),
        *("queue.max_staleness", "run.seed", *QUEUE),
    )
)
def vllm(
    context: typer.Context,
    run_file: RunFilePath,
    index: Annotated[int, typer.Option(min=0, help="number of the server in the run file, from 0")] = 0,
    to_join: Annotated[
        str | None, typer.Option("--join", metavar="QUEUE_URL", help="join the run of this queue")
    ] = None,
    name: Annotated[str | None, typer.Option(help="with --join: its name in the run; default: host and port")] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="URL", help="with --join: URL at which workers and learner reach it")
    ] = None,
) -> None:
    """Run vLLM's server with the flags that RL needs."""
    from slipstream.deploy.servers.vllm_server import join, run

    if to_join is None and (name or advertise):
        raise ConfigError("--name and --advertise are for a server that joins a run: add --join QUEUE_URL")
    config = load(run_file, context.args, needs=["model"])
    if to_join is not None:
        raise typer.Exit(join(config, to_join, name, advertise))
    run(config, index)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a local model folder, or a Hugging Face hub name")],
) -> None:
    """Run a plain vLLM server, for a teacher or a reward model. Other arguments are vLLM's."""
    from slipstream.deploy.servers.vllm_server import serve

    serve(model, context.args)


@app.command(
    **reading("run", "model", "task", "deploy", "cluster", "worker.count", "vllm.servers", "vllm.count", others=True),
)
def up(
    context: typer.Context,
    run_file: RunFilePath,
    resume: Resume = False,
    on: Annotated[
        str, typer.Option("--on", metavar="ENGINE", help=f"where: {', '.join(cluster.ENGINES)} (docs/clusters.md)")
    ] = "local",
) -> None:
    """Run everything until the learner is done, here or, with --on, on a cluster."""
    try:
        config = load(run_file, context.args, needs=EVERYTHING)
        check_secret(config)
        try:
            cluster.run_on(on, config, str(Path(run_file).absolute()), context.args, resume)
        except RunFailed:
            summary.tell(config.run_dir)
            raise
        summary.tell(config.run_dir)
    except (KeyboardInterrupt, SystemExit):
        # All processes have ended; a second signal would only interrupt the exit.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise


@app.command(
    **reading(
        *("worker.count", "worker.episodes", "vllm.count", "vllm.max_num_seqs", "rollout.group_size"),
        *("learner.groups_per_step", "queue.max_staleness", "queue.depth", "weight_sync.every", *RUN),
    )
)
def plan(
    context: typer.Context,
    run_file: RunFilePath,
    servers: Annotated[int | None, typer.Option(min=1, max=256, help="vLLM servers; default: the run file's")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="workers; default: the run file's")] = None,
    steps: Annotated[int, typer.Option(min=10, max=2000, help="optimiser steps to simulate")] = 100,
    learnt_from: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="run to learn rates from; default: the run's own")
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="draw it too, in one HTML file")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="first start one of the run's vLLM servers here, and measure it")
    ] = False,
) -> None:
    """Predict speed and waits from a run's record; say which change helps most."""
    from slipstream.deploy.commands.plan import run

    run(load(run_file, context.args), learnt_from, servers, workers, steps, as_json, out, probe)


app.command(
    **reading("demonstrations", "run", "model", "task", "chat", "learner", "lora", "vllm.max_model_len"), name="sft"
)(sft.sft)
app.command()(demos.demos)
app.command(**reading(*QUEUE))(look.status)
app.command(**reading(*RUN, *QUEUE))(look.rollouts)
app.command()(report.report)
app.command()(summary.summary)
app.add_typer(cluster.app, name="render", help="Write what places a run on a cluster, for people who own that.")
app.add_typer(look.app, name="servers", help="List, add or remove the vLLM servers of a run.")


app.command(**reading(*RUN, "queue.store"))(look.ledger)


@app.command(
    **reading(
        *(*RUN, "run.seed", "model", "learner", "queue.max_staleness", "queue.overage"),
        *("rollout.temperature", "rollout.mask_truncated", "rollout.max_episode_tokens"),
    ),
)
def replay(
    context: typer.Context,
    run_file: RunFilePath,
    record: Annotated[
        Path | None,
        typer.Argument(metavar="[RECORD]", help="folder of a record, or one file of it; default: the run's own"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="replay at most this many steps")] = None,
    from_step: Annotated[
        int | None, typer.Option("--from", min=0, help="begin after this step's checkpoint; 0: at the initial model")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="new folder for the metrics; default: replay-1, replay-2 and so on in the run directory"),
    ] = None,
) -> None:
    """Repeat a run's training from its record alone. For bug reports."""
    probes.require_modules("slipstream replay", probes.LEARNER_MODULES)
    from slipstream.deploy.commands.replay import run

    run(load(run_file, context.args, needs=["model"]), record, out, from_step, steps)


app.command(name="token")(tokens.print_token)


@app.command(**reading(), hidden=True)
def preflight(context: typer.Context, run_file: RunFilePath, resume: Resume = False) -> None:
    """Check everything that can be checked before a process starts. `up` reads the result from stdout: the error, or
    a JSON object of what was measured."""
    from slipstream.deploy.checks.preflight import check_run

    code = 0
    # The task file may print; keep that out of the answer.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            config = load(run_file, context.args, needs=EVERYTHING)
            access.hide_token()
            checked = check_run(config, resume)
            answer.write(msgspec.json.encode(checked).decode())
        except ConfigError as error:
            answer.write(str(error))
            code = 2
    leave(code)


def _become(script: str, *arguments: str | Path) -> NoReturn:
    """Continue as the trainer of the user's own, in this process."""
    os.environ["PYTHONPATH"] = python_path()
    os.execv(sys.executable, [sys.executable, script, *map(str, arguments)])


def _with_steps(config: RunConfig) -> RunConfig:
    """Load the task to count its rows, and return `config` with `learner.steps` in place of `learner.epochs`."""
    from slipstream.deploy.run import run_directory
    from slipstream.rollout_worker.task.task import load_task

    rows = load_task(config.task).rows.size
    counted = run_directory.with_steps_for_epochs(config, rows)
    typer.echo(run_directory.describe_steps(config, rows or 0))
    return counted


def main() -> None:
    """Run the command line. Exits with 2 and one message for a setting or state that cannot work, with 1 for a run
    that failed."""
    log_lines.set_up()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # transformers warns if torch is not imported, and most commands do not need torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        check_release(os.environ)
        check_arguments(sys.argv[1:])
        app(prog_name="slipstream")
    except (ConfigError, QueueError, RunFailed) as error:
        sys.exit(print_error(error))


if __name__ == "__main__":
    main()
