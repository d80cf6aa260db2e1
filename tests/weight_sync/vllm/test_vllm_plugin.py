"""The plugin that adds our engines to vLLM, and what it must not load into vLLM's processes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.weight_sync.transports.registry import TRANSPORTS, backend
from slipstream.weight_sync.vllm.plugin import register

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transports_engine_is_known_to_vllm_and_the_plugin_may_run_again(name: str) -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend=backend(name)), config, torch.device("cpu"), None
    )
    module, _, engine_class = TRANSPORTS[name].engine.partition(":")
    assert type(engine) is getattr(import_module(module), engine_class)


def test_an_engine_that_vllm_brings_along_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    before = dict(WeightTransferEngineFactory._registry)
    monkeypatch.setitem(TRANSPORTS, "nccl", TRANSPORTS["gloo"])
    register()
    assert WeightTransferEngineFactory._registry["nccl"] is before["nccl"]


def test_the_plugin_loads_neither_torch_nor_the_learners_end() -> None:
    """In a fresh interpreter, up to the call that vLLM makes in each of its processes."""
    code = (
        "import sys, slipstream.weight_sync.vllm.plugin\n"
        "heavy = [name for name in sys.modules if name.startswith(('torch', 'vllm', 'protocol'))]\n"
        "sys.exit(str(heavy) if heavy or 'slipstream.weight_sync.transports.base' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_learners_end_of_no_transport_loads_vllm() -> None:
    code = (
        "import sys\n"
        "from slipstream.protocol.config import WeightSyncSection\n"
        "from slipstream.weight_sync.transports.base import build_transport\n"
        f"for name in {sorted(TRANSPORTS)!r}:\n"
        "    build_transport(WeightSyncSection(transport=name))\n"
        "    assert 'vllm' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_of_the_package_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project["entry-points"]["vllm.general_plugins"]["slipstream_weight_sync"]
    assert EntryPoint("slipstream_weight_sync", value, "vllm.general_plugins").load() is register
