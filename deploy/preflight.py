"""What is checked before the first process of a run starts: each fault is one message with its remedy."""

from __future__ import annotations

import asyncio
import logging

from deploy import extras, kv_cache, model_check, run_directory, server_check
from deploy.ports import check_port
from deploy.vllm_server import on_cpu
from protocol.config import ConfigError, RunConfig


def check(config: RunConfig, resume: bool) -> None:
    """Raises `ConfigError` for what would stop the run later: packages, run directory, ports, servers, model, task."""
    extras.require("slipstream up", extras.LEARNER if config.vllm.servers else extras.LEARNER + extras.VLLM)
    run_directory.check(config, resume)
    run_file = config.run_dir.absolute() / run_directory.RUN_FILE
    check_port(config.queue.host, config.queue.port, "queue.port", run_file)
    if config.vllm.servers:
        server_check.check(config)
    else:
        for index in range(config.vllm.count):
            check_port(config.vllm.host, config.vllm.port + index, "vllm.port", run_file)
    # Every try to reach the hub is a warning of its own; here one message says it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    model_check.check(config)
    if not config.vllm.servers and on_cpu():
        kv_cache.check(config)
    _check_task(config)


def _check_task(config: RunConfig) -> None:
    """That the task loads, and its first prompt becomes tokens."""
    from rollout_worker.chat import build_chat_format
    from rollout_worker.chat.base import PromptError
    from rollout_worker.task.task import load_task
    from rollout_worker.task.tools import ToolBox

    task = load_task(config.task)
    chat = build_chat_format(config, ToolBox(task.tools, config.worker.tool_timeout_s).schemas)
    try:
        asyncio.run(chat.prompt_ids(task.dataset[0]["prompt"]))
    except PromptError as error:
        remedy = "mend that row, or the template"
        if "chat_template" in str(error):
            remedy = (
                "its tokenizer has no chat template, and the prompts are messages: save one beside the tokenizer as "
                "chat_template.jinja, or give the prompts as text"
            )
        raise ConfigError(
            f"model.path = {config.model.path}: the first prompt of {config.task.path} becomes no tokens: {remedy} "
            f"({str(error).splitlines()[0]:.200})"
        ) from None
