"""The workers' methods inside vLLM's Model Runner V2, which GPUs take: what is scored there is what is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.copies import ENVIRONMENT, ROOT
from tests.kit.model import SIZES, tiny_model
from tests.kit.second_runner import ENVIRONMENT as SECOND_RUNNER

HEAD = 32  # the smallest that vLLM's attention has on a CPU

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from blake3 import blake3
from safetensors.torch import save
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, folder = sys.argv[1], Path(sys.argv[2])
llm = LLM(
    model, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128,
    kv_cache_memory_bytes=8 << 20, block_size=32, logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
    enable_lora=True, max_lora_rank=8, worker_extension_cls="slipstream.weight_sync.vllm.worker.SlipstreamWorker",
)
sizes = {name: tensor.shape for name, tensor in llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
         .model_runner.model.named_parameters()}
hidden = next(size for name, size in sizes.items() if "embed" in name)[1]
torch.manual_seed(0)
config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"})
prefix = "base_model.model.model.layers.0.self_attn.o_proj"
heads = int(sys.argv[3])
file = save({f"{prefix}.lora_A.weight": torch.randn(4, heads), f"{prefix}.lora_B.weight": torch.randn(hidden, 4)})
(folder / "adapter_model.safetensors").write_bytes(file)
(folder / "adapter_config.json").write_text(config)
name = f"run.1.{blake3(file).update(config.encode()).hexdigest()[:16]}"
adapter = LoRARequest(name, 1, str(folder))
ids = [3 + i % 50 for i in range(40)]

def served(lora):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
    out = llm.generate({"prompt_token_ids": ids}, params, lora_request=lora, use_tqdm=False)[0]
    return [of[token].logprob for of, token in zip(out.prompt_logprobs[1:], ids[1:])]

def off(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))

under, base = served(adapter), served(None)
which = (name, 1, str(folder))
(scored,) = llm.collective_rpc("slipstream_score", args=([ids],))
(adapted,) = llm.collective_rpc("slipstream_score", args=([ids], which))
llm.collective_rpc("slipstream_read_adapter", args=(which,))
layers = {}
while not layers:
    (layers,) = llm.collective_rpc("slipstream_layers")
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
print(json.dumps({
    "runner": [of.__module__ for of in type(runner).__mro__], "base": off(base, scored["logprobs"][0]),
    "adapter": off(under, adapted["logprobs"][0]), "moved": off(under, base), "layers": layers,
}))
"""


@pytest.mark.wide
def test_scores_are_those_of_the_served_path_with_an_adapter_and_without(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model(head_dim=HEAD).save_pretrained(model)
    adapter.mkdir()
    env = {**os.environ, **ENVIRONMENT, **SECOND_RUNNER, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    arguments = [str(model), str(adapter), str(HEAD * SIZES["num_attention_heads"])]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "vllm.v1.worker.gpu.model_runner" in found["runner"]
    assert found["base"] < 2e-5
    assert found["adapter"] < 2e-5
    assert found["moved"] > 1e-3
    assert found["layers"]["wrong"] == []
    assert found["layers"]["checked"] > 0
