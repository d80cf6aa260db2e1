"""`slipstream sft`: teaches the run's model from conversations, before RL."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from slipstream.deploy.checks.learning_rates import parameters_of
from slipstream.deploy.commands.arguments import Resume, print_findings
from slipstream.deploy.commands.look import RunFilePath
from slipstream.deploy.run import run_directory
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.deploy.servers import devices, probes
from slipstream.protocol import access
from slipstream.protocol.config import RunConfig, load, parse_overrides
from slipstream.protocol.config.learning_rates import supervised_rate
from slipstream.protocol.demonstrations import Demonstration


def sft(
    context: typer.Context,
    run_file: RunFilePath,
    data: Annotated[str | None, typer.Option(help="conversations; default: demonstrations.path")] = None,
    resume: Resume = False,
) -> None:
    """Teach the model from conversations with the task's tools, before RL."""
    probes.require_modules("slipstream sft", probes.LEARNER_MODULES)
    given = [] if data is None else ["--demonstrations.path", data]
    config = load(run_file, [*context.args, *given], needs=["task", "model", "chat"])
    access.hide_token()  # The task's code must not read it.
    found = conversations(config)
    config = devices.settle_learner(without_servers(config), typer.echo)
    from slipstream.learner.ranks.liveness import RankLost
    from slipstream.learner.ranks.stopping import LearnerFailed
    from slipstream.learner.supervised import SUFFIX, train

    rate = config.demonstrations.learning_rate or supervised_rate(parameters_of(config.model), config.lora.r > 0)
    typer.echo(
        f"{len(found)} conversations of {config.demonstrations.path}, {config.demonstrations.epochs:g} epochs, steps "
        f"of {config.demonstrations.batch_size}, learning rate {rate:g}"
    )
    own = config.run.model_copy(update={"name": config.run.name + SUFFIX})
    try:
        with run_directory.held_alone(config.model_copy(update={"run": own})):
            model = train(config, found, rate, resume)
    except (LearnerFailed, RankLost) as error:
        raise RunFailed(str(error)) from error
    path = os.path.relpath(model)
    of_run = [(key, value) for (section, key), value in parse_overrides(context.args).items() if section == "run"]
    same = [text for key, value in of_run for text in (f"--run.{key}", str(value))]
    command = shlex.join(["slipstream", "up", run_file, "--model.path", path, *same])
    typer.echo(f"the model is in {path}; continue with: {command}")


def conversations(config: RunConfig) -> list[Demonstration]:
    """Load and render the conversations of `demonstrations.path`, and print what is left out. Raises `ConfigError`."""
    from slipstream.rollout_worker.demonstrations import load_demonstrations

    loaded = load_demonstrations(config)
    print_findings(loaded.findings)
    return loaded.demonstrations


def mixed_in(config: RunConfig) -> list[Demonstration]:
    """Return the conversations of `learner.demonstrations_coef`; none where it is 0. Raises `ConfigError`."""
    return conversations(config) if config.learner.demonstrations_coef else []


def without_servers(config: RunConfig) -> RunConfig:
    """Return the run file of a learner that has this machine to itself."""
    return config.model_copy(update={"vllm": config.vllm.model_copy(update={"count": 0, "servers": []})})
