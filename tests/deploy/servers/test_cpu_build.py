"""What vLLM's CPU build serves, and with which flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.servers import cpu_build, vllm_server
from slipstream.protocol.config import ConfigError, load

GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
YARN = {"rope_type": "yarn", "factor": 32.0}

# Model type, further facts, dtype, and a word of why it is not served; None: nothing is known against it.
MODELS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("qwen3", {}, "float32", None),
    ("of_tomorrow", {}, "float32", None),
    ("qwen3_5_text", GATED, "bfloat16", None),
    ("qwen3_5_text", GATED, "float32", 'set model.dtype = "bfloat16"'),
    ("qwen3_next", GATED | {"linear_key_head_dim": 64}, "bfloat16", "[64, 128]"),
    ("gpt_oss", {"rope_parameters": YARN}, "float32", None),
    ("gpt_oss", {"rope_scaling": YARN}, "float32", None),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, "float32", "rope_parameters of the type yarn"),
    ("nemotron_h", {"n_routed_experts": 8, "layers_block_type": ["mamba", "mlp"]}, "float32", None),
    ("nemotron_h", {"n_routed_experts": 8, "layers_block_type": ["mamba", "moe"]}, "float32", "experts"),
    ("nemotron_h", {"n_routed_experts": 8, "hybrid_override_pattern": "M-E*"}, "float32", "experts"),
    ("jamba", {}, "float32", "selective_scan_fwd"),
    ("lfm2", {}, "float32", "first head"),
    ("gemma3n_text", {}, "float32", "0.3 nats"),
]


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_that_the_cpu_build_does_not_serve_is_refused_before_its_start(nested: bool) -> None:
    for kind, facts, dtype, why in MODELS:
        text = {"model_type": kind, **facts}
        found = cpu_build.obstacle({"model_type": "outer", "text_config": text} if nested else text, dtype)
        assert (found is None) == (why is None), (kind, found)
        assert why is None or (found is not None and why in found), (kind, found)


def test_the_check_of_a_run_names_the_model_and_what_to_do(run_file: Path) -> None:
    config_of(run_file, model_type="jamba")
    config = load(run_file)
    with pytest.raises(ConfigError, match=r"^model\.path = .*selective_scan_fwd\): serve it by GPUs, or take another"):
        cpu_build.check_served(config, vllm_server.architecture_of(config.model) or {})


@pytest.mark.parametrize(("kind", "cached"), [("granitemoehybrid", False), ("falcon_h1", False), ("qwen3", True)])
def test_states_of_mamba_2_are_not_kept_for_prefixes(run_file: Path, kind: str, cached: bool) -> None:
    """Else a prompt longer than a block ends the server (vllm 0.32, `mamba_mixer2.py`)."""
    config_of(run_file, model_type=kind)
    assert ("--no-enable-prefix-caching" not in vllm_server.command(load(run_file), 0)) == cached


def config_of(run_file: Path, **changed: Any) -> None:
    file = run_file.parent / "model" / "config.json"
    facts = json.loads(file.read_text()) | changed
    file.unlink()
    file.write_text(json.dumps(facts))
