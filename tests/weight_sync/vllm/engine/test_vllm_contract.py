"""What Slipstream takes from vLLM is there: in the model runner of CPUs, and in that of GPUs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.vllm_source import Function, SourceTree
from weight_sync.vllm.engine import contract

ROOT = Path(__file__).parents[4]
VLLM = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]

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


def faults(tree: SourceTree, protocol: type, implementation: str) -> list[str]:
    """What a class of vLLM lacks of a type of the contract."""
    module, _, name = implementation.partition(":")
    found = tree.find_class(module, name)
    if found is None:
        return [f"{implementation} is gone"]
    there = tree.members(found)
    missing = [f"{implementation} has no {member}" for member in wanted(protocol) if member not in there]
    for member, signature in wanted(protocol).items():
        function = there.get(member)
        if signature is not None and function is not None and (why := takes(function, signature)):
            missing.append(f"{implementation}.{member} {why}")
    return missing


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


def test_vllm_has_everything_that_slipstream_takes_from_its_objects() -> None:
    tree = SourceTree(VLLM)
    found = [
        fault
        for protocol, classes in IMPLEMENTED_BY.items()
        for each in classes
        for fault in faults(tree, protocol, each)
    ]
    assert not found, "\n".join(found)


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


def imported() -> list[tuple[str, str]]:
    """Names that Slipstream imports from vLLM."""
    found = set()
    for package in ("weight_sync", "deploy"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                    found |= {(node.module, alias.name) for alias in node.names}
    return sorted(found)


def test_vllm_has_everything_that_slipstream_imports() -> None:
    missing = []
    for module, name in imported():
        imported_from: Any = importlib.import_module(module)
        if not hasattr(imported_from, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{module} has no {name}")
    assert not missing, "\n".join(missing)


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
    ],
)
def test_a_name_that_vllm_changes_is_found(tmp_path: Path, file: str, old: str, new: str, named: str | None) -> None:
    root = tmp_path / "vllm"
    for folder in ("config", "lora", "v1"):
        shutil.copytree(VLLM / folder, root / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source = root / file
    text = source.read_text()
    assert old in text
    source.write_text(re.sub(re.escape(old), new, text))
    tree = SourceTree(root)
    found = [
        fault
        for protocol, classes in IMPLEMENTED_BY.items()
        for each in classes
        for fault in faults(tree, protocol, each)
    ]
    if named is None:  # the mixin that both runners have still declares it
        assert not found
    else:
        assert any(named in fault for fault in found), found
