"""Checks a run before its first process starts: packages, run directory, ports, space, task, model, learner, servers.

A fault that would stop the run is raised as a `ConfigError`, one message with its remedy; others are returned as
findings. Nothing is printed here. Torch is imported late, so that a mistake in the task is reported at once: for the
check of the model, or before that where the run file asks for more than the defaults.
"""

from __future__ import annotations

import json
import logging
import shutil
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from slipstream.deploy.checks import learning_rates, model_check
from slipstream.deploy.run import run_directory
from slipstream.deploy.servers import cpu_build, cpu_settings, devices, probes, server_args
from slipstream.deploy.servers.gpu_memory import checkpoint_bytes, gib
from slipstream.deploy.servers.model_shape import architecture_of, model_shape
from slipstream.deploy.servers.probes import check_port
from slipstream.deploy.servers.vllm_server import on_cpu
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, Finding, LearnerSection, RunConfig
from slipstream.protocol.engine import ServerFacts
from slipstream.weight_sync.fleet.eligibility import TRIED_VERSION, Wanted, describe_mismatches, judge
from slipstream.weight_sync.server.answers import facts_of_description

# Settings of [learner] that name optimisers and schedules of other packages.
_NAMED_ELSEWHERE = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")

TIMEOUT_S = 10.0

# Before vLLM answers /server_info it collects what it knows about the machine.
INFO_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunCheck:
    """A run that can start.

    Attributes:
        rows: Rows of the data set; None if their number is not known.
        episode_tokens: Tokens of the longest episode; None where only the context bounds it.
        findings: Faults that do not stop the run.
    """

    rows: int | None
    episode_tokens: int | None
    findings: list[Finding]


def check_run(config: RunConfig, resume: bool) -> RunCheck:
    """Check everything that can be checked before a process starts.

    Args:
        config: The run file.
        resume: Whether the run continues from its newest checkpoint.

    Raises:
        ConfigError: Something would stop the run later.
    """
    probes.require_modules(
        "slipstream up", probes.LEARNER_MODULES if config.vllm.servers else probes.LEARNER_MODULES + probes.VLLM_MODULES
    )
    # What is found in milliseconds comes before the task is imported.
    run_directory.check_run_directory(config, resume)
    # Where epochs must be counted, only the data set tells whether a run to resume is over.
    knows_end = not resume or config.learner.epochs is None
    is_over = resume and knows_end and run_directory.finished(config) is not None
    findings: list[Finding] = []
    if knows_end and not is_over:
        _check_ports(config)
        findings += check_space(config)
    server_args.check_server_args(config)
    server_args.check_router_replay(config, on_cpu())
    check_learner(config)
    from slipstream.deploy.checks import task_check
    from slipstream.learner.checkpoints import uploads
    from slipstream.learner.report import trackers
    from slipstream.rollout_worker.data.dataset import check_evaluation, find_evaluation_warnings
    from slipstream.rollout_worker.demonstrations import load_demonstrations
    from slipstream.rollout_worker.task.rewards import build_rewards
    from slipstream.rollout_worker.task.task import load_task

    trackers.wanted_trackers(config.tracking)
    uploads.require(config.hub)
    # The hub's client warns at every try to reach it; here one message is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # The task comes first: users write it themselves, so most mistakes are there.
    task = load_task(config.task)
    build_rewards(config, task.rewards, task.reward_weights, own=task.own_rewards)
    rows = task.rows.size
    if task.has_no_data and config.learner.epochs is not None:
        raise ConfigError(
            f"learner.epochs = {config.learner.epochs:g}: the task has no data set, as its environment says what there "
            f"is to do, so there is nothing to count; give learner.steps instead (TRL's max_steps)"
        )
    counted = run_directory.with_steps_for_epochs(config, rows)
    if not knows_end:
        is_over = run_directory.finished(counted) is not None
        if not is_over:
            _check_ports(config)
            findings += check_space(config)
    if task.agent is not None and not is_over:
        run_file = config.run_file.absolute()
        check_port(config.worker.agent_host, config.worker.agent_port, "worker.agent_port", run_file)
    if config.learner.callbacks:
        from slipstream.learner import callbacks

        callbacks.load(config.learner.callbacks)
    check_evaluation(config, task.eval_dataset)
    findings += find_evaluation_warnings(config, task.eval_dataset)
    model_check.check_model(config)
    model_check.check_resumed(config, resume)
    check_adapter(config, resume)
    if (unusual := learning_rates.find_unusual_rate(config)) is not None:
        findings.append(unusual)
    if config.vllm.launched and on_cpu():
        _, served = devices.settle(config, cpu=True, say=lambda line: None)  # with the type that the servers will have
        cpu_build.check_served(served, architecture_of(served.model) or {})
        cpu_settings.check_cache_fits(served)
    checked = task_check.check_task(config, task)
    findings += checked.findings
    if config.learner.demonstrations_coef:
        findings += load_demonstrations(config).findings
    if config.vllm.servers and not is_over:  # last, since they answer in seconds, or not at all
        findings += find_untried_versions(check_servers(config))
    return RunCheck(rows, checked.episode_tokens, findings)


def check_space(config: RunConfig) -> list[Finding]:
    """Find a disk that is too small for the checkpoints to keep.

    Raises:
        ConfigError: It does not hold one checkpoint more, so that nothing that is learnt could be kept.
    """
    if (shape := model_shape(config.model)) is None:
        return []
    folder = checkpoints.folder(config.run_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, one = shutil.disk_usage(there).free, checkpoint_bytes(shape, config)
    if free < one:
        raise ConfigError(
            f"run.dir = {config.run.dir}: a checkpoint takes at least {gib(one)}, and its disk has {gib(free)} left: "
            f"make room, or choose another run.dir"
        )
    # The new one is written before the oldest is deleted.
    kept = config.learner.keep_checkpoints
    more = kept + 1 - min(kept, len(checkpoints.complete(config.run_dir)))
    if free >= more * one:
        return []
    text = (
        f"learner.keep_checkpoints = {kept}: with the one that is being written, {more} more checkpoints take at least "
        f"{gib(more * one)}, and the disk of run.dir = {config.run.dir} has {gib(free)} left"
    )
    return [Finding("warning", text, "make room, set it lower, or choose another run.dir")]


def check_learner(config: RunConfig) -> None:
    """Raise `ConfigError` if the optimiser, the schedule, the adapter or the precision cannot be made here."""
    defaults = LearnerSection()
    if any(getattr(config.learner, name) != getattr(defaults, name) for name in _NAMED_ELSEWHERE):
        from slipstream.learner.training import optimiser

        optimiser.check_optimiser(config.learner)
    if config.lora.r:
        from slipstream.learner.model import adapter

        adapter.check_installed(config.lora)
    if config.model.quantised_bits:
        from slipstream.learner.model import precision

        precision.check_quantisation(config.model)


def check_adapter(config: RunConfig, resume: bool) -> None:
    """Raise `ConfigError` if the adapter fits neither the model nor the checkpoint to resume."""
    kept = checkpoints.complete(config.run_dir) if resume else {}
    had_one = bool(kept) and (kept[max(kept)] / checkpoints.ADAPTER).is_dir()
    if config.lora.r or had_one:
        from slipstream.learner.checkpoints import resuming

        resuming.check_adapter(config, resume)


def _check_ports(config: RunConfig) -> None:
    """Check that the ports of all listeners are free. A run that is over needs none."""
    run_file = config.run_file.absolute()
    check_port(config.queue.host, config.queue.port, "queue.port", run_file)
    if not config.vllm.servers:
        for index in range(config.vllm.count):
            check_port(config.vllm.host, config.vllm.port + index, "vllm.port", run_file)
    if config.teacher.path is not None:
        check_port(
            config.vllm.host, config.teacher_port, "teacher.url" if config.teacher.url else "vllm.port", run_file
        )
    sync = config.weight_sync
    # An adapter is sent over the servers' own routes.
    if sync.adapter_only is not True:
        for port in (sync.transport == "http" and config.http_ports) or [0]:
            check_port(sync.host, port, "weight_sync.http_port", run_file, "weight_sync.host")


def check_servers(config: RunConfig) -> dict[str, ServerFacts]:
    """Ask each server of `vllm.servers` for its flags, since the probe of weight sync is blind to some of them.

    Returns:
        Each server's description of itself, by URL.

    Raises:
        ConfigError: With all mismatches of the first server that has any.
    """
    servers: dict[str, ServerFacts] = {}
    for url in config.vllm.servers:
        servers[url] = fetch(url, config.token_for("learner"))
        if mismatches := judge(servers[url], Wanted.of(config)):
            raise ConfigError(f"vllm.servers: {url}: {describe_mismatches(mismatches)}")
    return servers


def find_untried_versions(servers: Mapping[str, ServerFacts]) -> list[Finding]:
    """Find servers whose vLLM is not the version that weight sync was tried with."""
    return [
        Finding(
            "warning",
            f"vllm.servers: {url} runs vLLM {facts.version or 'of an unknown version'}; weight sync was tried with "
            f"{TRIED_VERSION} only",
            "if a publication fails, install that one",
        )
        for url, facts in servers.items()
        if facts.version != TRIED_VERSION
    ]


def fetch(url: str, token: str | None) -> ServerFacts:
    """Return the description that the vLLM server at `url` gives of itself.

    Raises:
        ConfigError: No vLLM server answers, or one without the routes of weight sync.
    """
    # This route needs VLLM_SERVER_DEV_MODE and the token, so its answer tells whether the server has both.
    try:
        _ask(url, "/weight_info", token)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, HTTPError) and cause.code in (404, 405, 501) and not _is_vllm(url, token):
            raise ConfigError(
                f"vllm.servers: {url} is not a vLLM server: it answers HTTP {cause.code} to /weight_info, and no "
                f"version to /version; give the URL of one, or start one with: slipstream vllm run.toml"
            ) from None
        raise
    info = _ask(url, "/server_info?config_format=json", token, timeout_s=INFO_TIMEOUT_S)
    version = _ask(url, "/version", token).get("version")
    try:
        # An empty object is no valid request: a server that has the route refuses it as such.
        _ask(url, "/inference/v1/generate", token, body=b"{}")
        scale_out = True
    except ConfigError as error:
        cause = error.__cause__
        scale_out = isinstance(cause, HTTPError) and cause.code not in (403, 404)
    return facts_of_description(version, info, scale_out)


def _is_vllm(url: str, token: str | None) -> bool:
    """Tell whether the server answers /version, as every vLLM server does."""
    try:
        return isinstance(_ask(url, "/version", token).get("version"), str)
    except ConfigError:
        return False


def _ask(
    url: str, path: str, token: str | None, *, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> Mapping[str, Any]:
    """Return the JSON object that the route answers with, {} for another kind of JSON."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Content-Type": "application/json"} if body else {}
    # Workers use no proxy of the environment either.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url + path, data=body, headers=headers)
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        unauthorized = "set SLIPSTREAM_TOKEN to the server's"
        hint = {401: unauthorized, 403: unauthorized, 404: "it needs VLLM_SERVER_DEV_MODE=1"}.get(error.code, "")
        raise ConfigError(
            f"vllm.servers: {url}{path} answers HTTP {error.code}; {hint or 'is it a vLLM server?'}; start it with: "
            f"slipstream vllm run.toml"
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"vllm.servers: no vLLM server answers at {url} ({reason}); start it with: slipstream vllm run.toml, or "
            f"leave vllm.servers empty to have it launched"
        ) from None
    return answer if isinstance(answer, Mapping) else {}
