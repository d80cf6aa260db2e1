"""Checks `vllm.args` before anything starts.

vLLM itself looks at its flags seconds after its start, when the queue and the other servers run. Its parser takes as
long to build, so its source is read instead.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from slipstream.deploy.servers.model_shape import architecture_of
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections.servers import flag_value, has_flag
from slipstream.protocol.config.text import nearest

# Where vLLM 0.32 declares its flags: as arguments, and as fields of classes.
_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
_FIELDS = ("BaseFrontendArgs", "FrontendArgs")

_LEAVE_OUT = "leave it out: Slipstream sets it for every server"
# Tried with method ngram on vLLM 0.32's CPU build: log-probs of -9999 and broken texts.
_SPECULATIVE = (
    "leave it out: speculative decoding is refused, since a draft model would keep the weights of the start, and "
    "log-probs of drafted tokens are not proven"
)
# Flags that Slipstream sets, and what a user does instead.
OWN_FLAGS = {
    "--enable-return-routed-experts": "set learner.router_replay",
    "--model": "set model.path",
    "--revision": "set model.revision",
    "--trust-remote-code": "set model.trust_remote_code",
    "--tokenizer": "set model.tokenizer",
    "--tokenizer-revision": "set model.tokenizer",
    "--host": "set vllm.host",
    "--port": "set vllm.port",
    "--max-model-len": "set vllm.max_model_len",
    "--max-num-seqs": "set vllm.max_num_seqs",
    "--seed": "set run.seed; servers with one seed would sample the same episodes",
    "--weight-transfer-config": "set weight_sync.transport",
    "--enable-lora": "set lora.r, and weight_sync.adapter_only where the adapter is to travel alone",
    "--api-key": "set SLIPSTREAM_TOKEN; vLLM's own key leaves the routes of weight sync open",
    "--config": "put what the file says into vllm.args, where it is checked",
    **dict.fromkeys(("--served-model-name", "--logprobs-mode", "--generation-config"), _LEAVE_OUT),
    **dict.fromkeys(("--enable-scale-out", "--worker-extension-cls"), _LEAVE_OUT),
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), _SPECULATIVE),
}


def check_server_args(config: RunConfig) -> None:
    """Check `vllm.args` against the flags that vLLM has, those that Slipstream sets, and what publications rest on.

    Quantised servers need a probe tolerance and a transport that allow for rounded weights. A server must have one API
    process: owner, pauses and adapters are kept there (`weight_sync.vllm.engine_state`). `vllm serve` would have one
    for each data-parallel engine; the entry that servers are started by has one for all of them.

    Raises:
        ConfigError: They do not fit.
    """
    arguments, transport = config.vllm.args, config.weight_sync.transport
    check_flags(arguments, known_flags())
    if (count := flag_value(arguments, "--api-server-count", "-asc")) not in (None, "1"):
        raise ConfigError(
            f"vllm.args: --api-server-count {count}: a server keeps its pauses and its owner in one API process; leave "
            f"it out, and raise vllm.count where one process is too few"
        )
    if not config.served_quantised:
        return
    if config.weight_sync.probe_tolerance == "auto":
        raise ConfigError(
            "vllm.args: --quantization rounds weights, so that the servers' log-probs differ from the learner's by "
            "more than weight_sync.probe_tolerance = auto allows; measure by how much, and set it, such as 1.0"
        )
    if transport not in ("auto", "nccl"):
        raise ConfigError(
            f"weight_sync.transport = {transport}: quantised servers (--quantization in vllm.args) take weights by "
            f"vLLM's own reload only; set weight_sync.transport = nccl, or leave out --quantization"
        )


# Where configs of mixtures say how many experts a layer has.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_router_replay(config: RunConfig, cpu: bool) -> None:
    """Check that servers can tell which experts they chose, where `learner.router_replay` needs it.

    Args:
        cpu: Whether the installed vLLM is the CPU build.

    Raises:
        ConfigError: vLLM would refuse to start with --enable-return-routed-experts (vllm 0.32, `config/vllm.py`).
    """
    if not config.learner.router_replay:
        return
    facts = architecture_of(config.model)
    if facts is not None and not any((facts.get("text_config") or facts).get(name) for name in _EXPERTS):
        raise ConfigError(
            f"learner.router_replay = true: model.path = {config.model.path} is a {facts.get('model_type')} without "
            f"experts, which nothing routes to; set learner.router_replay = false"
        )
    if config.vllm.servers:
        return
    arguments, why = config.vllm.args, ""
    if cpu and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        why = "vLLM's CPU build does not tell which experts it chose, only Model Runner V2 does, which GPUs take"
    for names in (("--pipeline-parallel-size", "-pp"), ("--decode-context-parallel-size", "-dcp")):
        if flag_value(arguments, *names) not in (None, "1"):
            why = f"vLLM does not tell which experts it chose with {names[0]} (vllm.args)"
    if has_flag(arguments, "--no-enable-prefix-caching"):
        why = "vLLM tells which experts it chose with its prefix cache alone, and vllm.args has it off"
    if why:
        raise ConfigError(f"learner.router_replay = true: {why}; set learner.router_replay = false")


def check_flags(arguments: Sequence[str], known: frozenset[str]) -> None:
    """Check the names of flags. Raises `ConfigError`.

    Args:
        known: vLLM's flags; empty if they could not be read, and then none is called unknown.
    """
    for given, name in _names(arguments):
        if not name.startswith("--") and name[:2] in known:  # a flag of one letter with its value: -qfp8
            continue
        meant = {flag for flag in known | OWN_FLAGS.keys() if flag.startswith(name)}
        # argparse takes a name's beginning for it, where it is no other's.
        found = name if name in meant or len(meant) != 1 else next(iter(meant))
        own = found if found in OWN_FLAGS else found.replace("--no-", "--", 1)
        if own in OWN_FLAGS:
            raise ConfigError(f"vllm.args: {given}: {OWN_FLAGS[own]}")
        if known and not meant:
            flag, space, value = given.partition(" ")
            near = nearest(name, sorted(known))
            if space:
                remedy = f'give a flag and its value as two entries: ["{flag}", "{value}"]'
            elif near is not None:
                remedy = f"did you mean {near}?"
            else:
                remedy = "remove it; python -m vllm.entrypoints.openai.api_server --help=all lists those there are"
            raise ConfigError(f"vllm.args: the installed vLLM has no flag {given}; {remedy}")


def _names(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag as it was given, without its value, and its name: `--a_b.c=1` as `--a_b.c` and `--a-b`."""
    for argument in arguments:
        given = argument.partition("=")[0]
        if given.startswith("--"):
            yield given, given.partition(".")[0].replace("_", "-")
        elif re.match(r"-[A-Za-z]", given) and not given.startswith("-O"):  # -O3 is a level of optimisation
            yield given, given.partition(".")[0]


@cache
def known_flags() -> frozenset[str]:
    """Return all flags of the installed vLLM, read from its source; none without vLLM, or where it is laid out
    otherwise."""
    spec = find_spec("vllm")
    root = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    files = [root / source for source in _SOURCES]
    if spec is None or not all(file.is_file() for file in files):
        return frozenset()
    found = {"--help", "-h"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                found |= {word for word in words if isinstance(word, str) and word.startswith("-")}
            elif isinstance(node, ast.ClassDef) and node.name in _FIELDS:
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found |= {f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name)}
    return frozenset(found | {name.replace("--", "--no-", 1) for name in found if name.startswith("--")})
