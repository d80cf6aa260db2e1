"""What is checked before the first process of a run starts: each fault is one message with its remedy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import socket
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from deploy import extras
from protocol.config import ConfigError, ModelSection, RunConfig, to_toml
from rollout_queue.store.sqlite import FILE_NAME


def check(config: RunConfig, resume: bool) -> None:
    """Raises `ConfigError` for what would stop the run later: packages, ports, servers, task, model, run directory."""
    extras.require("slipstream up", extras.LEARNER if config.vllm.servers else extras.LEARNER + extras.VLLM)
    _check_run_dir(config, resume)
    _check_port(config.queue.host, config.queue.port, "queue.port")
    if config.vllm.servers:
        for url in config.vllm.servers:
            _check_server(url, config.token)
    else:
        for index in range(config.vllm.count):
            _check_port(config.vllm.host, config.vllm.port + index, "vllm.port")
    _check_task_and_model(config)


def resolved(config: RunConfig) -> str:
    """The text of a run file that says the same from any folder. It holds no token: that goes by the environment."""
    run = config.run.model_copy(update={"dir": config.run.dir.absolute()})
    queue = config.queue.model_copy(update={"token": None})
    return to_toml(config.model_copy(update={"run": run, "queue": queue}))


@contextlib.contextmanager
def held_alone(config: RunConfig) -> Iterator[None]:
    """Hold the run directory against other launchers; raises `ConfigError` if one has it.

    A second one would write its own settings into the run file that the first restarts its processes with.
    """
    path = config.run_dir / "launcher.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir}: {path} cannot be written: {error.strerror}; choose another run.dir"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"run.name = {config.run.name}: {config.run_dir} is in use by another launcher; stop that one, or "
                f"choose another name: --run.name {config.run.name}-2"
            ) from None
        yield


def write_resolved(config: RunConfig) -> Path:
    """Write the resolved run file into the run directory, where all processes of the run read it."""
    path = config.run_dir / "run.toml"
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(resolved(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir}: {path} cannot be written: {error.strerror}; choose another run.dir"
        ) from None
    return path


def _check_run_dir(config: RunConfig, resume: bool) -> None:
    holds_a_run = any((config.run_dir / name).exists() for name in (FILE_NAME, "checkpoints"))
    if holds_a_run and not resume:
        raise ConfigError(
            f"run.name = {config.run.name}: {config.run_dir} already holds a run; go on with it by --resume, or choose "
            f"another name: --run.name {config.run.name}-2"
        )


def _check_port(host: str, port: int, setting: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{setting} = {port}: another process listens on {host}:{port}; stop it or choose another port"
                ) from None
            raise ConfigError(f"{setting} = {port}: cannot listen on {host}:{port}: {error.strerror}") from None


def _check_server(url: str, token: str | None) -> None:
    # As the worker asks: never by a proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # A route of weight sync, which a server without VLLM_SERVER_DEV_MODE lacks, and which wants the token.
        with opener.open(urllib.request.Request(f"{url}/weight_info", headers=headers), timeout=10):
            pass
    except HTTPError as error:
        hint = {401: "set SLIPSTREAM_TOKEN to the server's", 404: "it needs VLLM_SERVER_DEV_MODE=1"}.get(error.code, "")
        raise ConfigError(
            f"vllm.servers: {url}/weight_info answers HTTP {error.code}; {hint or 'is it a vLLM server?'}; start it "
            f"with: slipstream vllm run.toml"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"vllm.servers: no vLLM server answers at {url} ({reason}); start it with: slipstream vllm run.toml, or "
            f"leave vllm.servers empty to have it launched"
        ) from None


def _check_task_and_model(config: RunConfig) -> None:
    from rollout_worker.chat import build_chat_format
    from rollout_worker.task.task import load_task
    from rollout_worker.task.tools import ToolBox

    # Every try to reach the hub is a warning of its own; here one message says it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    task = load_task(config.task)
    _check_model(config.model)
    build_chat_format(config, ToolBox(task.tools, config.worker.tool_timeout_s).schemas)


def _check_model(model: ModelSection) -> None:
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(model.path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path = {model.path}: not a model that can be loaded: {first}; give an existing model folder or a "
            f"hub name"
        ) from None
    if model.attention == ModelSection.model_fields["attention"].default:
        return
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # the class checks it, and no weight is made
            AutoModelForCausalLM.from_config(architecture, attn_implementation=model.attention)
    except (ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.attention = {model.attention}: the model cannot use it: {first}") from None
