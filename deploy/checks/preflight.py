"""What is checked before the first process of a run starts: each fault is one message with its remedy."""

from __future__ import annotations

import logging

from deploy import epochs, extras, learner_check, server_check
from deploy.checks import model_check
from deploy.run import run_directory
from deploy.servers import devices, kv_cache
from deploy.servers.probes import check_port
from deploy.servers.vllm_server import on_cpu
from deploy.warn import warn
from protocol.config import ConfigError, RunConfig


def check_run(config: RunConfig, resume: bool) -> int | None:
    """Raises `ConfigError` for what would stop the run later: packages, run directory, ports, servers, trackers, the
    hub's token, task, callbacks, model, adapter.

    Returns the rows of the data set; None where their number is not known.
    """
    extras.require("slipstream up", extras.LEARNER if config.vllm.servers else extras.LEARNER + extras.VLLM)
    learner_check.check(config)
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
    counted = epochs.in_steps(config, rows)
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
    learner_check.check_adapter(config, resume)
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
        server_check.check(config)
    else:
        for index in range(config.vllm.count):
            check_port(config.vllm.host, config.vllm.port + index, "vllm.port", run_file)
    sync = config.weight_sync
    # An adapter is sent over the servers' own routes.
    if sync.adapter_only is not True:
        port = sync.http_port if sync.transport == "http" else 0
        check_port(sync.host, port, "weight_sync.http_port", run_file, "weight_sync.host")
