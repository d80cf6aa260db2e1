"""What Slipstream takes from vLLM is there: in the model runner of CPUs, in that of GPUs, and in each release.

The installed release is read, and those whose unpacked packages `VLLM_SOURCES` names, as a search path:

    VLLM_SOURCES=/tmp/vllm-0.33/vllm pytest tests/weight_sync/vllm/engine/test_vllm_contract.py
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.deploy.servers import vllm_server
from slipstream.weight_sync.server import control
from slipstream.weight_sync.vllm.control_rules import RULES
from slipstream.weight_sync.vllm.engine import contract
from tests.kit import config
from tests.weight_sync.vllm_source import Definition, Function, SourceTree, Use, uses

ROOT = Path(__file__).parents[4]
INSTALLED = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
SOURCES = [INSTALLED, *map(Path, filter(None, os.environ.get("VLLM_SOURCES", "").split(os.pathsep)))]
CONTROL = Path(str(control.__file__))
OURS = [file for package in ("weight_sync", "deploy") for file in sorted((ROOT / package).rglob("*.py"))]

# The classes that stand behind each type of `contract`.
IMPLEMENTED_BY = {
    contract.ParallelConfig: ["vllm.config.parallel:ParallelConfig"],
    contract.ModelConfig: ["vllm.config.model:ModelConfig"],
    contract.LoRAConfig: ["vllm.config.lora:LoRAConfig"],
    contract.WeightTransferConfig: ["vllm.config.weight_transfer:WeightTransferConfig"],
    contract.CompilationConfig: ["vllm.config.compilation:CompilationConfig"],
    contract.VllmConfig: ["vllm.config.vllm:VllmConfig"],
    contract.AdapterManager: ["vllm.lora.model_manager:LoRAModelManager"],
    contract.WorkerAdapterManager: ["vllm.lora.worker_manager:WorkerLoRAManager"],
    contract.ModelRunner: [
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    ],
    contract.AttentionImpl: ["vllm.v1.attention.backend:AttentionImpl"],
    contract.AttentionLayer: ["vllm.model_executor.layers.attention:Attention"],
    contract.QuantizeMethod: ["vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"],
    contract.LayerReloadingInfo: ["vllm.model_executor.model_loader.reload.types:LayerReloadingInfo"],
    contract.AdapterLayer: ["vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"],
    contract.RecordsOfWorker: ["vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector"],
    contract.RecordsOfScheduler: ["vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector"],
    contract.Worker: ["vllm.v1.worker.gpu_worker:Worker"],
    contract.WeightTransferEngine: ["vllm.distributed.weight_transfer.base:WeightTransferEngine"],
    contract.EngineManager: ["vllm.v1.engine.utils:CoreEngineProcManager"],
    contract.ServingModels: ["vllm.entrypoints.openai.models.serving:OpenAIServingModels"],
    contract.Request: ["vllm.v1.request:Request"],
    contract.Scheduler: ["vllm.v1.core.sched.scheduler:Scheduler"],
    contract.EngineCore: ["vllm.v1.engine.core:EngineCore"],
    contract.CoreClient: ["vllm.v1.engine.core_client:AsyncMPClient", "vllm.v1.engine.core_client:DPLBAsyncMPClient"],
    contract.OutputProcessor: ["vllm.v1.engine.output_processor:OutputProcessor"],
    contract.EngineClient: ["vllm.v1.engine.async_llm:AsyncLLM"],
}


def wanted(protocol: type) -> dict[str, inspect.Signature | None]:
    """What a type of the contract lists; methods come with their signatures."""
    fields = dict.fromkeys(protocol.__annotations__)
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("__")}
    methods = {
        name: inspect.signature(value) if inspect.isfunction(value) else None
        for name, value in members.items()
        if inspect.isfunction(value) or isinstance(value, property)
    }
    found = {**fields, **methods}
    return {name: of for name, of in found.items() if not name.startswith(("slipstream", "_abc", "_is"))}


def faults(tree: SourceTree) -> list[str]:
    """What a release of vLLM lacks."""
    listed = [
        fault
        for protocol, classes in IMPLEMENTED_BY.items()
        for each in classes
        for fault in lacking(tree, protocol, each)
    ]
    used = [f"{use.place}: {fault}" for file in OURS for use in uses(file) if (fault := fault_of(tree, use))]
    return listed + used


def lacking(tree: SourceTree, protocol: type, implementation: str) -> list[str]:
    """What a class of vLLM lacks of a type of the contract."""
    found = tree.find(*implementation.split(":"))
    if found is None or not isinstance(found.node, ast.ClassDef):
        return [f"{implementation} is gone"]
    there = tree.members(found)
    missing = [f"{implementation} has no {member}" for member in wanted(protocol) if member not in there]
    for member, signature in wanted(protocol).items():
        function = there.get(member)
        if signature is not None and function is not None and (why := takes(function, signature)):
            missing.append(f"{implementation}.{member} {why}")
    return missing


def fault_of(tree: SourceTree, use: Use) -> str | None:
    """Why a name that we import from vLLM cannot be used as we do, None if it can."""
    found = tree.find(use.module, use.name)
    if found is None:
        return f"{use.module} has no {use.name}"
    node = found.node
    if use.member and isinstance(node, ast.ClassDef):
        there = tree.members(found)
        if use.member not in there and not use.member.startswith(("slipstream_", "__")):
            return f"{use.name} has no {use.member}"
        node = there.get(use.member)
    elif use.member and isinstance(node, ast.Module) and tree.find(found.module, use.member) is None:
        return f"{use.name} has no {use.member}"
    if use.call is None or not isinstance(node, ast.ClassDef | Function):
        return None
    parameters = arguments_of(tree, found, node)
    return parameters and refuses(use.call, *parameters, name=f"{use.name}{use.member and '.'}{use.member}")


def arguments_of(tree: SourceTree, found: Definition, node: ast.AST) -> tuple[list[str], set[str]] | None:
    """The arguments by place and those by name; None if any pass, or the source does not say."""
    if isinstance(node, ast.ClassDef):
        init = tree.members(found).get("__init__")
        if init is None:
            fields = tree.fields(found)
            return (fields, set(fields)) if fields else None
        node = init
    assert isinstance(node, Function)
    given = node.args
    if given.vararg is not None or given.kwarg is not None:
        return None
    placed = [argument.arg for argument in (*given.posonlyargs, *given.args) if argument.arg not in ("self", "cls")]
    return placed, {*placed, *(argument.arg for argument in given.kwonlyargs)}


def refuses(call: ast.Call, placed: list[str], named: set[str], name: str) -> str | None:
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in named:
            return f"{name} has no parameter {keyword.arg}"
    by_place = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    return f"{name} takes {len(placed)} arguments only" if len(by_place) > len(placed) else None


def takes(function: Function, signature: inspect.Signature) -> str | None:
    """Why a function of vLLM cannot be called as the contract says, None if it can."""
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    named = {*positional, *(argument.arg for argument in given.kwonlyargs)}
    ours = list(signature.parameters.values())
    for place, parameter in enumerate(ours):
        if parameter.kind is parameter.VAR_POSITIONAL:
            if given.vararg is None:
                return "takes no further arguments"
        elif parameter.kind is parameter.KEYWORD_ONLY or parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            if parameter.name not in named:
                return f"has no parameter {parameter.name}"
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and positional.index(parameter.name) != place:
                return f"has {parameter.name} at another place"
        elif place >= len(positional):
            return f"takes {len(positional)} arguments only"
    required = positional[: len(positional) - len(given.defaults)]
    known = {parameter.name for parameter in ours if parameter.kind is not parameter.POSITIONAL_ONLY}
    unfilled = [name for place, name in enumerate(required) if name not in known and place >= len(ours)]
    return f"wants {', '.join(unfilled)} besides" if unfilled else None


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_vllm_has_everything_that_slipstream_takes(source: Path) -> None:
    found = faults(SourceTree(source))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_vllm_has_every_flag_that_slipstream_starts_it_with(source: Path) -> None:
    tree = SourceTree(source)
    assert tree.find("vllm.entrypoints.openai", "api_server") is not None
    engine = tree.find("vllm.engine.arg_utils", "AsyncEngineArgs")
    server = tree.find("vllm.entrypoints.launchers.cli_args", "FrontendArgs")  # until 0.32
    server = server or tree.find("vllm.entrypoints.common.cli_args", "FrontendArgs")
    assert engine is not None
    assert server is not None
    known = tree.members(engine).keys() | tree.members(server).keys()
    flags = {
        flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        for flag in vllm_server.command(config(lora={"r": 8}, weight_sync={"adapter_only": True}), 0)
        if flag.startswith("--")
    }
    assert flags
    assert flags <= known


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_vllm_has_every_route_that_slipstream_asks(source: Path) -> None:
    entrypoints = [file.read_text(encoding="utf-8") for file in (source / "entrypoints").rglob("*.py")]
    served = {
        (verb.upper(), path)
        for text in entrypoints
        for verb, path in re.findall(r"@router\.(get|post|put)\(\s*\"([^\"]+)\"", text)
    }
    rules = {route for route in RULES if route != ("GET", "/health")}
    asked = {("POST", f"/{name}") for name in re.findall(r"_call\(\"POST\", \"/(\w+)\"", CONTROL.read_text())}
    assert asked
    assert rules | asked | {("GET", "/weight_info"), ("POST", "/inference/v1/generate")} <= served


def test_every_type_of_the_contract_is_compared() -> None:
    declared = {
        value for value in vars(contract).values() if isinstance(value, type) and value.__module__ == contract.__name__
    }
    assert declared == set(IMPLEMENTED_BY)


def test_no_object_of_vllm_is_taken_as_any() -> None:
    """Else mypy would let pass what the contract does not list."""
    loose = []
    for file in (ROOT / "weight_sync" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Function):
                loose += [
                    f"{file.name}: {node.name}({argument.arg})"
                    for argument in (*node.args.args, *node.args.kwonlyargs)
                    if argument.arg
                    in {"runner", "core", "engine", "scheduler", "request", "vllm_config", "model_config"}
                    and argument.annotation is not None
                    and ast.unparse(argument.annotation) == "Any"
                ]
    assert not loose, "\n".join(loose)


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("v1/worker/gpu/model_runner.py", "self.lora_config", "self.adapter_config", None),
        (
            "v1/worker/gpu/model_runner.py",
            "self.device =",
            "self.gpu =",
            "gpu.model_runner:GPUModelRunner has no device",
        ),
        ("v1/worker/lora_model_runner_mixin.py", "token_lora_mapping", "mapping", "_set_active_loras has no parameter"),
        ("v1/core/sched/scheduler.py", "def _preempt_request", "def _preempt", "Scheduler has no _preempt_request"),
        ("v1/engine/core.py", "_idle_state_callbacks", "_idle_callbacks", "EngineCore has no _idle_state_callbacks"),
        ("v1/engine/core_client.py", "def call_utility_all_async", "def call_all", "has no call_utility_all_async"),
        ("config/model.py", "def uses_mrope", "def mrope", "ModelConfig has no uses_mrope"),
        ("forward_context.py", "skip_compiled", "eager", "set_forward_context has no parameter skip_compiled"),
        ("model_executor/layers/attention/attention.py", "self.head_size_v", "self.v", "Attention has no head_size_v"),
        ("v1/worker/gpu_worker.py", "_weight_update_active", "_updating", "Worker has no _weight_update_active"),
        ("v1/core/sched/interface.py", "PAUSED_ALL", "PAUSED", "PauseState has no PAUSED_ALL"),
        ("distributed/weight_transfer/factory.py", "def register_engine", "def add", "has no register_engine"),
        ("model_executor/model_loader/reload/meta.py", "SKIP_TENSORS", "SKIPPED", "reload.meta has no SKIP_TENSORS"),
    ],
)
def test_a_name_that_vllm_changes_is_found(file: str, old: str, new: str, named: str | None) -> None:
    text = (INSTALLED / file).read_text()
    assert old in text
    found = faults(SourceTree(INSTALLED, {file: re.sub(re.escape(old), new, text)}))
    if named is None:  # the mixin that both runners have still declares it
        assert not found
    else:
        assert any(named in fault for fault in found), found
