"""The memory of a vLLM server's cache on a CPU: figures of real models, shares, and what the user set."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slipstream.deploy.servers import cpu_settings, vllm_server
from slipstream.deploy.servers.cpu_settings import GIB, Model, budget, model_of
from slipstream.protocol.config import ConfigError, RunConfig, load
from tests.kit.config import config

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_a_models_figures_follow_from_its_config() -> None:
    model = model_of(QWEN3_06B, "bfloat16")
    assert model is not None
    assert model.weights / 2 == pytest.approx(596.0e6, rel=1e-3), "Qwen3-0.6B has 596 million weights"
    assert model.token == 2 * 28 * 8 * 128 * 2
    assert model_of({"text_config": QWEN3_06B}, "float32") == Model(
        2 * model.weights, 2 * model.token, model.parameters
    )
    assert model_of({"model_type": "qwen3"}, "float32") is None


def test_mixtures_of_experts_count_all_experts() -> None:
    dense, mixture = (model_of(c, "float32") for c in (QWEN3_06B, {**QWEN3_06B, "num_experts": 8}))
    assert dense is not None
    assert mixture is not None
    assert mixture.weights - dense.weights == 28 * 7 * 3 * 1024 * 3072 * 4
    assert mixture.token == dense.token


@pytest.mark.parametrize(
    ("available", "count", "size"),
    [
        (64 * GIB, 1, "most"),
        (8 * GIB, 1, "room"),
        (14 * GIB, 2, "room"),
        (4 * GIB, 1, "least"),
    ],
)
def test_the_size_is_what_all_sequences_need_or_what_is_left(available: int, count: int, size: str) -> None:
    run = config(vllm={"max_model_len": 1024, "max_num_seqs": 64, "count": count})
    found = budget(Model(100 * 2**20, 100 * 1024, 10**7), run, available)
    assert found.size == getattr(found, size)
    assert found.least == 100 * 1024 * (1024 + 64)
    assert found.most == 64 * found.least
    if size == "room":
        assert found.room * count < available


@pytest.mark.parametrize(
    ("arguments", "environment", "given"),
    [
        ([], {}, False),
        (["--block-size", "32"], {"VLLM_CPU_KVCACHE_SPACE": ""}, False),
        (["--kv-cache-memory-bytes", "256M"], {}, True),
        (["--kv_cache_memory_bytes=256M"], {}, True),
        (["--gpu-memory-utilization=0.3"], {}, True),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "4"}, True),
    ],
)
def test_the_users_own_size_is_seen(arguments: list[str], environment: dict[str, str], given: bool) -> None:
    assert cpu_settings.is_set(arguments, environment) == given


@pytest.fixture
def qwen(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
    return load(run_file, ["--model.path", str(folder), "--vllm.max_model_len", "8000"])


def test_a_teacher_that_is_served_takes_memory_from_the_caches() -> None:
    model = Model(100 * 2**20, 100 * 1024, 10**7)
    alone, beside = (budget(model, config(teacher=teacher), 32 * GIB).room for teacher in ({}, {"path": "org/large"}))
    assert beside < alone - cpu_settings.PLAIN_CACHE_BYTES * 0.8


def test_a_cache_holds_episodes_that_are_shorter_than_the_context() -> None:
    run = config(vllm={"max_model_len": 1024, "max_num_seqs": 64})
    model = Model(100 * 2**20, 100 * 1024, 10**7)
    assert budget(model, run, 64 * GIB, episode_tokens=80).size == 64 * 100 * 1024 * (80 + 64)
    assert budget(model, run, 64 * GIB, episode_tokens=4000).size == budget(model, run, 64 * GIB).size
    few = config(vllm={"max_model_len": 1024, "max_num_seqs": 1})
    found = budget(model, few, 64 * GIB, episode_tokens=80)
    assert found.size == found.least, "vLLM refuses to start with less than one whole context"


@pytest.mark.parametrize(
    ("on_cpu", "given", "added"),
    [
        (True, [], ["--block-size", "--max-num-batched-tokens", "--kv-cache-memory-bytes"]),
        (True, ["--block-size", "64"], ["--max-num-batched-tokens", "--kv-cache-memory-bytes"]),
        (True, ["--max-num-batched-tokens", "999", "--kv-cache-memory-bytes", "256M"], ["--block-size"]),
        (False, [], []),
    ],
)
def test_a_cpu_servers_settings_are_derived_where_the_user_has_set_none(
    qwen: RunConfig, on_cpu: bool, given: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(cpu_settings, "available_bytes", lambda: 64 * GIB)
    qwen = qwen.model_copy(update={"vllm": qwen.vllm.model_copy(update={"args": given})})
    said: list[str] = []
    settled = vllm_server.with_cpu_settings(qwen, said.append)
    assert settled.vllm.args[: len(given)] == given
    assert settled.vllm.args[len(given) :: 2] == added
    assert len(said) == bool(added)
    assert vllm_server.with_cpu_settings(settled) == settled, "a server that is started again keeps them"


@pytest.mark.parametrize(
    ("available", "told"),
    [(512, "tokens"), (32, "; there is memory for 5 of that length at a time, so the others wait")],
)
def test_a_cache_that_does_not_hold_all_sequences_says_how_many(
    qwen: RunConfig, available: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)
    monkeypatch.setattr(cpu_settings, "available_bytes", lambda: available * GIB)
    said: list[str] = []
    vllm_server.with_cpu_settings(qwen, said.append)
    assert said[0].endswith(told)


def test_blocks_of_models_with_states_are_left_to_vllm(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**QWEN3_06B, "linear_num_key_heads": 4}}))
    arguments = cpu_settings.settled(load(run_file, ["--model.path", str(tmp_path)])).vllm.args
    assert "--block-size" not in arguments
    assert "--kv-cache-memory-bytes" in arguments


@pytest.mark.parametrize(
    ("layers", "sequences", "tokens"), [(28, 64, 256), (28, 300, 512), (2, 64, 4096), (2, 9000, 16384)]
)
def test_a_step_of_the_engine_takes_a_second_or_two(
    layers: int, sequences: int, tokens: int, tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 384} if layers == 2 else {}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "num_hidden_layers": layers, **small}))
    run = load(run_file, ["--model.path", str(tmp_path), "--vllm.max_num_seqs", str(sequences)])
    arguments = cpu_settings.settled(run).vllm.args
    assert arguments[arguments.index("--max-num-batched-tokens") + 1] == str(tokens)


def test_too_little_memory_is_refused_with_the_figures(qwen: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_settings, "available_bytes", lambda: 20 * GIB)
    with pytest.raises(ConfigError) as error:
        cpu_settings.check_cache_fits(qwen)
    for text in ("vllm.max_model_len = 8000", "1.7 GiB", "0.0 GiB is left", "1 servers", "20.0 GiB", "2.2 GiB"):
        assert text in str(error.value)
    cpu_settings.check_cache_fits(
        qwen.model_copy(update={"vllm": qwen.vllm.model_copy(update={"args": ["--kv-cache-memory-bytes"]})})
    )
    monkeypatch.setattr(cpu_settings, "available_bytes", lambda: 40 * GIB)
    cpu_settings.check_cache_fits(qwen)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 10_000),
        ({"memory.max": "max\n", "memory.current": "700"}, 10_000),
        ({"memory.max": "1000\n", "memory.current": "700\n"}, 300),
        ({"memory.max": "1000", "memory.current": "1700"}, 0),
        ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "700"}, 300),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "700"}, 10_000),
        ({"nodes/node0/meminfo": "Node 0 MemFree: 4 kB\nNode 0 Active(file): 2 kB\nNode 0 MemUsed: 99 kB"}, 6 * 1024),
    ],
)
def test_a_containers_limit_counts(
    files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert cpu_settings.available_bytes(tmp_path, tmp_path / "nodes") == left
