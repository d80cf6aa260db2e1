"""What is checked before the first process of a run starts: each fault is one message with its remedy.

What is checked of the learner's optimiser, schedule and adapter before a run starts: that they can be made here, and
that the adapter fits the model and the checkpoint to go on from.

Whether a vLLM server that somebody else started is one that a run can use: its version and flags.

The probe of weight sync runs at temperature 1, so it is blind to log-probs of the wrong kind.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from deploy.checks import model_check
from deploy.checks.task_check import warn
from deploy.run import run_directory
from deploy.servers import devices, kv_cache, probes
from deploy.servers.probes import check_port
from deploy.servers.vllm_server import on_cpu
from protocol import checkpoints
from protocol.config import ConfigError, LearnerSection, RunConfig
from weight_sync.fleet.eligibility import TRIED_VERSION, Wanted, describe_mismatches, judge
from weight_sync.server.answers import ServerFacts

_OWN = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")


def check_learner(config: RunConfig) -> None:
    """Raises `ConfigError`. Imports torch only where the run file asks for more than the defaults."""
    plain = LearnerSection()
    if any(getattr(config.learner, name) != getattr(plain, name) for name in _OWN):
        from learner.training import optimiser

        optimiser.check(config.learner)
    if config.lora.r:
        from learner.model import adapter

        adapter.check_installed(config.lora)
    if config.model.quantised_bits:
        from learner.model import precision

        precision.check_quantisation(config.model)


def check_adapter(config: RunConfig, resume: bool) -> None:
    """Raises `ConfigError`. Of a model that can be found; imports torch only where an adapter is or was."""
    kept = checkpoints.complete(config.run_dir) if resume else {}
    had_one = bool(kept) and (kept[max(kept)] / checkpoints.ADAPTER).is_dir()
    if config.lora.r or had_one:
        from learner.checkpoints import resuming

        resuming.check_adapter(config, resume)


logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0

# vLLM collects what it knows of the machine first.
INFO_TIMEOUT_S = 60.0


def check_servers(config: RunConfig) -> None:
    """Ask each of `vllm.servers`. Raises `ConfigError` with all faults of the first that has one; a version that was
    not tried is a warning."""
    for url in config.vllm.servers:
        facts = fetch(url, config.token_for("learner"))
        if faults := judge(facts, Wanted.of(config)):
            raise ConfigError(f"vllm.servers: {url}: {describe_mismatches(faults)}")
        if facts.version != TRIED_VERSION:
            logger.warning(
                "vllm.servers: %s runs vLLM %s; weight sync was tried with %s only: if a publication fails, install "
                "that one",
                *(url, facts.version or "of an unknown version", TRIED_VERSION),
            )


def fetch(url: str, token: str | None) -> ServerFacts:
    """Raises `ConfigError` where no vLLM server answers, or one without the routes of weight sync."""
    # A route of weight sync, which a server without VLLM_SERVER_DEV_MODE lacks, and which wants the token.
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
        # No request at all: a server that has the route refuses it as such.
        _ask(url, "/inference/v1/generate", token, body=b"{}")
        scale_out = True
    except ConfigError as error:
        cause = error.__cause__
        scale_out = isinstance(cause, HTTPError) and cause.code not in (403, 404)
    return ServerFacts.parse(version, info, scale_out)


def _is_vllm(url: str, token: str | None) -> bool:
    """Whether it says its version, as every vLLM server does."""
    try:
        return isinstance(_ask(url, "/version", token).get("version"), str)
    except ConfigError:
        return False


def _ask(
    url: str, path: str, token: str | None, *, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> Mapping[str, Any]:
    """The JSON object that the route answers with."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Content-Type": "application/json"} if body else {}
    # As the worker asks: never by a proxy of the environment.
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


def check_run(config: RunConfig, resume: bool) -> int | None:
    """Raises `ConfigError` for what would stop the run later: packages, run directory, ports, servers, trackers, the
    hub's token, task, callbacks, model, adapter.

    Returns the rows of the data set; None where their number is not known.
    """
    probes.require_modules(
        "slipstream up", probes.LEARNER_MODULES if config.vllm.servers else probes.LEARNER_MODULES + probes.VLLM_MODULES
    )
    check_learner(config)
    run_directory.check(config, resume)
    if not resume:
        _check_addresses(config)
    from deploy.checks import task_check
    from learner.callbacks import load as load_callbacks
    from learner.checkpoints import uploads
    from learner.report import trackers
    from rollout_worker.data.dataset import check_evaluation
    from rollout_worker.task.rewards import build_rewards
    from rollout_worker.task.task import load_task

    trackers.wanted_trackers(config.tracking)
    uploads.require(config.hub)
    # Every try to reach the hub is a warning of its own; here one message says it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # The task first: it is what people write themselves.
    task = load_task(config.task)
    build_rewards(config, task.rewards, task.reward_weights, own=task.own_rewards)
    rows = task.rows.size
    if task.has_no_data and config.learner.epochs is not None:
        raise ConfigError(
            f"learner.epochs = {config.learner.epochs:g}: the task has no data set, as its environment says what there "
            f"is to do, so there is nothing to count; give learner.steps instead (TRL's max_steps)"
        )
    counted = run_directory.with_steps_for_epochs(config, rows)
    over = resume and run_directory.finished(counted) is not None
    if resume and not over:
        _check_addresses(config)
    if task.agent is not None and not over:
        run_file = config.run_file.absolute()
        check_port(config.worker.agent_host, config.worker.agent_port, "worker.agent_port", run_file)
    load_callbacks(config.learner.callbacks)
    if warning := check_evaluation(config, task.eval_dataset):
        warn(warning)
    model_check.check(config)
    model_check.check_resumed(config, resume)
    check_adapter(config, resume)
    if not config.vllm.servers and on_cpu():
        kv_cache.check(config)
    devices.check_quantised(config)
    task_check.check_task(config, task)
    return rows


def _check_addresses(config: RunConfig) -> None:
    """Not of a run that is over: it needs none."""
    run_file = config.run_file.absolute()
    check_port(config.queue.host, config.queue.port, "queue.port", run_file)
    if config.vllm.servers:
        check_servers(config)
    else:
        for index in range(config.vllm.count):
            check_port(config.vllm.host, config.vllm.port + index, "vllm.port", run_file)
    sync = config.weight_sync
    # An adapter is sent over the servers' own routes.
    if sync.adapter_only is not True:
        port = sync.http_port if sync.transport == "http" else 0
        check_port(sync.host, port, "weight_sync.http_port", run_file, "weight_sync.host")
