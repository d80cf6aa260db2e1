"""The cache that a server on a CPU reserves, beside what episodes of one turn can fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.cache_check import describe_cache, find_oversized_cache, reserved
from deploy.servers import kv_cache
from protocol.config import RunConfig
from tests.kit import config

# SmolLM2-135M: 46 KB of keys and values for each token in float32.
SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 64 * kv_cache.GIB)


def run_file(folder: Path, context: int, **vllm: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return config(
        model={"path": str(folder), "dtype": "float32"},
        rollout={"max_turn_tokens": 16},
        vllm={"max_model_len": context, "max_num_seqs": 64, "servers": [], **vllm},
    )


def test_a_context_far_beyond_the_episodes_is_told_with_the_one_that_they_need(tmp_path: Path) -> None:
    run = run_file(tmp_path, 4096)
    (finding,) = find_oversized_cache(run, longest=46)
    assert finding.remedy == "set vllm.max_model_len = 62"
    assert "a cache of 12.0 GiB for 64 sequences of 4,096 tokens" in finding.text
    assert find_oversized_cache(run, longest=2000) == []
    assert find_oversized_cache(run_file(tmp_path, 512), longest=46) == []


@pytest.mark.parametrize(
    "vllm", [{"servers": ["http://127.0.0.1:8100"]}, {"args": ["--kv-cache-memory-bytes", "1000000"]}], ids=str
)
def test_a_size_that_is_not_ours_is_not_judged(tmp_path: Path, vllm: dict[str, Any]) -> None:
    run = run_file(tmp_path, 4096, **vllm)
    assert (reserved(run), describe_cache(run), find_oversized_cache(run, longest=46)) == (None, None, [])
