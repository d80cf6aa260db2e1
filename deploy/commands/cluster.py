"""`slipstream up --on` and `slipstream render`: a run on the machines of a cluster."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slipstream.deploy.clusters import kubernetes, ray, slurm, slurm_job
from slipstream.deploy.clusters.roles import check_token
from slipstream.deploy.commands.arguments import reading
from slipstream.deploy.commands.look import RunFilePath
from slipstream.deploy.run.supervisor import supervise
from slipstream.deploy.servers.tokens import check_secret
from slipstream.protocol.config import ConfigError, RunConfig, load

ENGINES = ("local", "slurm", "ray")

# The commands of `slipstream render`.
app = typer.Typer(no_args_is_help=True)


def run_on(engine: str, config: RunConfig, run_file: str, settings: Sequence[str], resume: bool) -> None:
    """Run everything where `engine` places it, until the learner is done.

    Args:
        engine: One of `ENGINES`.
        config: The run file as read, with `settings`.
        run_file: Its path.
        settings: Settings of the command line.
        resume: Whether to continue from the newest checkpoint.
    """
    if engine == "local":
        supervise(config, resume)
    elif engine == "slurm" and slurm_job.in_job():
        try:
            supervise(config, slurm_job.to_resume(config, resume), slurm_job.SlurmJob(os.environ))
        except SystemExit as ended:
            # SLURM sends SIGTERM before the time limit, and Ctrl-C of the one who follows is SIGINT.
            if ended.code == 143 and config.cluster.requeue:
                slurm_job.requeue()
            raise
    elif engine == "slurm":
        slurm.submit_and_follow(config, run_file, settings, resume)
    elif engine == "kubernetes":
        raise ConfigError(
            f"--on kubernetes: kubectl places the run: slipstream render kubernetes {shlex.quote(run_file)} --out DIR, "
            f"and kubectl apply -k DIR"
        )
    elif engine == "ray":
        supervise(config, resume, ray.connect(config))
    else:
        raise ConfigError(f"--on {engine}: there is no such engine; the engines are: {', '.join(ENGINES)}")


@app.command("slurm", **reading("cluster", "run", "worker.count", "vllm.count"))
def render_slurm(
    context: typer.Context,
    run_file: RunFilePath,
    workers: Annotated[
        int | None, typer.Option(min=1, help="an array of so many workers that join the run, in place of its job")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(min=1, help="an array of so many servers that join the run, in place of its job")
    ] = None,
) -> None:
    """Print the batch script of a run, as `slipstream up --on slurm` submits it. Holds no token."""
    config = load(run_file, context.args)
    check_secret(config)
    check_token(config)
    slurm.write_tokens(config)
    (config.run_dir / "logs").mkdir(exist_ok=True)  # SLURM makes no folder for a job's output
    if workers is not None and servers is not None:
        raise ConfigError("--workers and --servers are two arrays: render one at a time")
    if workers is not None or servers is not None:
        text = slurm.array(config, "worker" if workers else "server", workers or servers or 1)
    else:
        text = slurm.script(config, str(Path(run_file).absolute()), context.args, resume=False)
    typer.echo(text, nl=False)


@app.command("kubernetes", **reading("cluster", "run", "worker.count", "vllm.count", "queue.store"))
def render_kubernetes(
    context: typer.Context,
    run_file: RunFilePath,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder for the manifests; may exist")],
) -> None:
    """Write the manifests of a run, for `kubectl apply -k`. Tokens are in secret.yaml alone."""
    config = load(run_file, context.args)
    check_secret(config)
    folder = Path(run_file).absolute().parent
    try:
        written = kubernetes.write(config, out, folder)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.filename} cannot be written: {error.strerror}; name another folder"
        ) from None
    there = shlex.quote(str(out))
    typer.echo(f"wrote {len(written)} files. The volume comes first, and stays: kubectl apply -f {there}/storage.yaml")
    typer.echo(f"then: kubectl apply -k {there}")
