"""Starts vLLM's own OpenAI server with the flags and the environment that RL needs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from slipstream.deploy.servers import cpu_build, cpu_settings, devices, probes, server_args
from slipstream.deploy.servers import joining as joining_of
from slipstream.deploy.servers.device_plan import Part, Seat
from slipstream.deploy.servers.devices import SHARE
from slipstream.deploy.servers.gpu_memory import Parallelism
from slipstream.deploy.servers.model_shape import architecture_of
from slipstream.deploy.servers.tokens import check_secret
from slipstream.protocol import access
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import ConfigError, ImagesSection, ModelSection, RunConfig, adapter_checks
from slipstream.protocol.config.sections import LOOPBACK
from slipstream.protocol.config.sections.sampling import MAX_TOP_K, mask_logprobs
from slipstream.protocol.config.sections.servers import has_flag
from slipstream.protocol.messages import Server
from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.weight_sync.transports.registry import backend, choice
from slipstream.weight_sync.vllm import cpu_server

logger = logging.getLogger(__name__)

# Each adapter takes memory of the server.
MAX_ADAPTERS = 8

# Seconds to try to reach the queue. It may start next to the server, which takes about two seconds.
ANNOUNCE_FOR_S = 5.0

THREADS_BIND, NO_BIND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"

# The full path, because vLLM replaces the short name "uni" with "mp" on a CPU.
IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def on_cpu() -> bool:
    """Tell whether the installed vLLM is the CPU build."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def command(config: RunConfig, index: int, seat: Seat | None = None, replica: int | None = None) -> list[str]:
    """Return the command line of a server. `vllm.args` stand last, so that they override ours.

    Args:
        config: The run file, with the transport settled if the GPUs decide it.
        index: Number of the server in the run file.
        seat: Its GPUs; None without a plan.
        replica: Number to derive its seed from in place of `index`.
    """
    vllm = config.vllm
    transport: str = config.weight_sync.transport
    if transport == "auto":
        transport = choice(on_cpu(), shares_gpu=False, quantised=config.served_quantised)
    flags = [
        *("--model", _resolved(config.model.path)),
        *_model_flags(config.model),
        *("--served-model-name", SERVED_MODEL_NAME),
        *("--host", vllm.host),
        *("--port", str(vllm.port + index)),
        *("--dtype", config.model.dtype),
        *("--max-model-len", str(vllm.max_model_len)),
        *("--max-num-seqs", str(vllm.max_num_seqs)),
        # Replicas with one seed would sample the same episodes.
        *("--seed", str(config.run.seed * 1000 + (index if replica is None else replica))),
        # Log-probs of the sampling distribution, and no sampling defaults from the checkpoint's folder.
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--max-logprobs", str(mask_logprobs(MAX_TOP_K))),
        # /inference/v1/generate: tokens in, tokens out.
        "--enable-scale-out",
        *("--weight-transfer-config", f'{{"backend": "{backend(transport)}"}}'),
        # Our routes next to vLLM's, and the methods of its workers that they call.
        *("--middleware", "slipstream.weight_sync.vllm.middleware.Slipstream"),
        *("--worker-extension-cls", "slipstream.weight_sync.vllm.worker.SlipstreamWorker"),
        "--disable-uvicorn-access-log",
    ]
    if config.images.enabled:
        flags += _image_flags(config.images)
    if adapter_checks.is_adapter_published_alone(
        config.weight_sync.adapter_only, config.model, config.lora, not on_cpu()
    ):
        flags += _adapter_flags(config)
    if config.learner.router_replay:
        flags.append("--enable-return-routed-experts")
    if config.token:
        # vLLM's own --api-key leaves the weight-transfer routes open, and would show the token in the process list.
        flags += ["--middleware", "slipstream.weight_sync.vllm.guard.RequireToken"]
    if seat is not None and seat.share:
        flags += ["--gpu-memory-utilization", f"{seat.share:.3f}"]
    if seat is not None and seat.cache and not has_flag(vllm.args, cpu_settings.FLAG):
        flags += [cpu_settings.FLAG, str(seat.cache)]
    facts = architecture_of(config.model) or {}
    if on_cpu():
        flags += _cpu_flags(facts, vllm.args)
    # -P keeps Python from importing from the working directory. `vllm serve` would ask for the release of a package
    # named vllm, which the CPU build is not, and start an API process for each data-parallel engine.
    module = cpu_server.SERVER
    # vLLM's code for the text part of a model that sees may import that of the whole.
    sees = "vision_config" in facts or str(facts.get("model_type", "")).endswith("_text")
    if on_cpu() and cpu_server.is_needed() and sees:
        module = cpu_server.__name__
    return [sys.executable, "-P", "-m", module, *flags, *vllm.args]


def _cpu_flags(facts: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Return the flags of the CPU build for a model. `args`: vLLM's own, which follow."""
    # A compiled CPU graph would keep the packed weights that it was compiled with.
    flags = ["--enforce-eager", *cpu_build.flags(facts)]
    if Parallelism.of(args).gpus == 1 and os.environ.get(THREADS_BIND, NO_BIND) == NO_BIND:
        # The engine computes in its own process. vLLM's default is a second process that binds threads to cores; it
        # takes as long to start as the engine, and each step waits for both.
        flags += ["--distributed-executor-backend", IN_ENGINE]
    return flags


def _image_flags(images: ImagesSection) -> list[str]:
    """Return the flags for images. Workers send them normalised, as the learner computes with them."""
    limits = json.dumps({"image": images.max_per_episode, "video": 0, "audio": 0})
    return ["--limit-mm-per-prompt", limits, "--no-mm-device-do-normalize"]


def _adapter_flags(config: RunConfig) -> list[str]:
    """Return the flags for publishing an adapter alone.

    At most max_staleness + 1 versions are in flight, and one more is arriving. Requests for more adapters than
    `--max-loras` would wait until those of an older one end.
    """
    rank = adapter_checks.max_adapter_rank(config.lora)
    at_once = max(2, min(config.queue.max_staleness + 2, MAX_ADAPTERS))
    return [
        "--enable-lora",
        *("--max-lora-rank", str(next(served for served in adapter_checks.SERVED_RANKS if served >= rank))),
        *("--max-loras", str(at_once)),
        *("--max-cpu-loras", str(at_once + 1)),
        # Middleware named later is further out: this one wraps our routes, and the token check wraps it.
        *("--middleware", "slipstream.weight_sync.vllm.adapters.Adapters"),
    ]


def _model_flags(model: ModelSection) -> list[str]:
    flags = []
    if model.revision:
        flags += ["--revision", model.revision]
    if model.trust_remote_code:
        flags.append("--trust-remote-code")
    if model.tokenizer is not None:
        # By default vLLM uses the model's revision for the tokenizer too (vllm 0.32, `ModelConfig`).
        flags += ["--tokenizer", _resolved(model.tokenizer), "--tokenizer-revision", "main"]
    return flags


def _resolved(path: str) -> str:
    """Make a local folder's path absolute; leaves a hub name as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


# Each version is built in the memory of the version before the last, and each step of the learner in that of the step
# before. If malloc returned that memory to the system, new pages would take three times as long as loading and packing
# (measured at 38 M weights), and a tenth of a learner's step (at 135 M). See mallopt(3).
KEPT_PAGES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def environment(config: RunConfig, seat: Seat | None = None) -> dict[str, str]:
    """Return the server's environment: this process's, the RL routes on, its GPUs, and what the CPU build needs."""
    model = config.model
    wanted = {"VLLM_SERVER_DEV_MODE": "1", **_basic()}
    if on_cpu():
        wanted |= KEPT_PAGES
    if seat is not None and seat.entries:
        wanted |= {"CUDA_VISIBLE_DEVICES": ",".join(seat.entries)}
    wanted |= devices.nccl_environment(config)
    if all(Path(path).exists() for path in (model.path, model.tokenizer_path)) and not model.trust_remote_code:
        wanted |= {"HF_HUB_OFFLINE": "1"}
    token = {access.TOKEN_VARIABLE: config.token} if config.token else {}
    return {**os.environ, **{key: value for key, value in wanted.items() if key not in os.environ}, **token}


def _basic() -> dict[str, str]:
    """Return the variables that every server gets, unless they are set."""
    of_cpu = {"TORCH_COMPILE_DISABLE": "1", THREADS_BIND: NO_BIND} if on_cpu() else {}
    return {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", **of_cpu}


def with_cpu_settings(
    config: RunConfig, say: Callable[[str], None] = lambda line: None, episode_tokens: int | None = None
) -> RunConfig:
    """Derive the settings of servers on a CPU that the user has not set, see `cpu_settings.settled`.

    Args:
        say: Takes the line that describes them.
        episode_tokens: Tokens of the longest episode; None where only the context bounds it.
    """
    if not (on_cpu() and config.vllm.launched):
        return config
    settled = cpu_settings.settled(config, episode_tokens)
    if settled != config:
        say(cpu_settings.described(settled, episode_tokens))
    return settled


async def announce(config: RunConfig, index: int, patience_s: float = ANNOUNCE_FOR_S) -> None:
    """Register the server as joining: whatever it proved before, it is about to load the checkpoint's weights (I5).

    A queue that is not up yet registers the run file's servers itself at its start.
    """
    name = list(config.server_names)[index]
    try:
        async with QueueClient(config.queue.address, config.token_for("learner"), patience_s) as queue:
            await queue.put_server(Server(name, config.server_names[name]))
    except QueueError as error:
        logger.info("not announced at the queue: %s", error)


def run(config: RunConfig, index: int) -> None:
    """Replace this process by a server of the run file, so that signals and exit code are vLLM's.

    One that the run file names by its URL (`vllm.servers`) starts on this machine, at the URL's port.
    """
    if index >= (known := len(config.vllm.urls)):
        raise ConfigError(
            f"--index {index}: the run file has {known} servers (vllm.servers, vllm.count), counted from 0"
        )
    probes.require_modules("slipstream vllm", probes.VLLM_MODULES)
    here = _at_its_url(config, index)
    check_secret(here)
    server_args.check_server_args(here)
    server_args.check_router_replay(here, on_cpu())
    asyncio.run(announce(config, index))
    line, env = _settled(here, 0, "server", index) if config.vllm.servers else _settled(config, index)
    os.execve(line[0], line, env)


def serve(model: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a plain vLLM server: of a teacher, or of a reward model.

    It is `vllm serve`, with what the CPU build needs: that asks for the release of a package of another name.

    Args:
        model: Its folder, or its name on the hub.
        arguments: vLLM's own.
    """
    probes.require_modules("slipstream serve", probes.VLLM_MODULES)
    line = [sys.executable, "-P", "-m", cpu_server.SERVER, "--model", _resolved(model)]
    if on_cpu():
        section = ModelSection(path=model)
        line += _cpu_flags(architecture_of(section) or {}, arguments)
        if cpu_settings.plain_dtype(section) == "float32":
            line += ["--dtype", "float32"]
        # vLLM would take nearly all memory of the machine.
        line += [cpu_settings.FLAG, str(cpu_settings.PLAIN_CACHE_BYTES)]
    os.execve(line[0], [*line, *arguments], {**_basic(), **os.environ})


def teacher_command(config: RunConfig) -> list[str]:
    """Return the command, after `slipstream`, of the server of `teacher.path`. `teacher.args` stand last."""
    teacher = config.teacher
    assert teacher.path is not None
    flags = ["--host", config.vllm.host, "--port", str(config.teacher_port)]
    if teacher.top_k > 20:
        flags += ["--max-logprobs", str(teacher.top_k)]
    if config.token:
        flags += ["--middleware", "slipstream.weight_sync.vllm.guard.RequireToken"]
    # As much context as fits.
    return ["serve", teacher.path, *flags, "--max-model-len", "-1", "--disable-uvicorn-access-log", *teacher.args]


def _at_its_url(config: RunConfig, index: int) -> RunConfig:
    """Return a run file that launches one server where `vllm.servers` expects this one."""
    if not config.vllm.servers:
        return config
    url = urlsplit(config.vllm.servers[index])
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    host = config.vllm.host
    if url.hostname and host in LOOPBACK and url.hostname not in LOOPBACK:
        host = url.hostname
    vllm = config.vllm.model_copy(update={"servers": [], "count": 1, "host": host, "port": port})
    return config.model_copy(update={"vllm": vllm})


def join(config: RunConfig, queue_url: str, name: str | None, advertise: str | None) -> int:
    """Run a server that joins the run of a queue elsewhere. Returns its exit code."""
    check_secret(config)
    server_args.check_server_args(config)
    server_args.check_router_replay(config, on_cpu())
    joining = joining_of.plan(config, queue_url, name, advertise)
    probes.require_modules("slipstream vllm", probes.VLLM_MODULES)
    line, env = _settled(config, 0, "server", joining.replica)
    return joining_of.run(config, joining, line, env)


def _settled(
    config: RunConfig, index: int, part: Part = "run", replica: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment, with GPUs, transport and the settings that they decide."""
    if SHARE in os.environ:
        planned, config = None, devices.settled(config, None, on_cpu())
    else:
        planned, config = devices.settle(config, on_cpu(), logger.info, part)
    logger.info("weights travel by %s", config.weight_sync.transport)
    seat = devices.seat_of(planned, index, os.environ)
    line = command(with_cpu_settings(config), index, seat, replica)
    return line, environment(config, seat)
