"""Writes the part of docs/models.md on what the learner trains, from the tables of its tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from slipstream.deploy.servers import cpu_build
from tests.learner.architectures import RESULTS
from tests.learner.families import MIXTURES, PADDED, TEXT, VISION

_HEAD = """\
## What the learner trains

At its start the learner measures how it may lay out a model's rows (`learner.layout`). It takes the first layout whose
log-probs are those of each sequence alone:

- `trie`: tokens that sequences share stand in a row once. For layers in which attention alone mixes positions.
- `packed`: sequences stand end to end. For linear attention and convolutions on a GPU with flash-linear-attention and
  causal-conv1d.
- `padded`: a batch of whole sequences of similar length. For every other causal model.

A model is refused if it scores a token by what comes after it, if its position embeddings depend on the whole row or
end below `vllm.max_model_len` (lower it for LongRoPE and dynamic RoPE), or if its checkpoint lacks weights under the
names they would be published with.

With groups of 8, prompts of 800 tokens and completions of 200, a step with `trie` is 2.79 times as fast as with
`padded` (7M parameters, one CPU core, `python -m benchmarks.layouts`).

- **Mixtures of experts**: experts that transformers fuses are published one by one, as the checkpoint has them.
  `learner.router_aux_loss_coef` keeps them evenly used.
- **Router replay**: `learner.router_replay = true` trains a mixture on the experts that answered, which vLLM records
  (on GPUs). It works for routers that choose by `torch.topk` over the experts' scores; JetMoE, Phi-MoE, Doge and Zaya
  are refused. Tokens without recorded experts are counted ([metrics](metrics.md)). A group grows by layers x choices
  bytes a token, twice that above 256 experts: raise `queue.max_group_bytes` for long episodes.
- **Vision models** train their text tower and output layer; the rest is frozen and not published, unless
  `model.train_vision` ([images](images.md)).
- **LongRoPE** (Phi-3, Phi-4): vLLM uses the long factors for every sequence if `vllm.max_model_len` is above the
  model's `original_max_position_embeddings`, else for none. The learner does the same.
- **Speculative decoding** (`--speculative-config` in `vllm.args`) is refused. The learner loads and saves checkpoints
  without heads for multi-token prediction (MTP).
- **vLLM's CPU build** (0.32) serves tiny models of Gemma 2, Gemma 4, GPT-OSS, Granite 4, Falcon-H1, Nemotron-H without
  experts, and in bfloat16 Qwen3-Next and Qwen3.5, with log-probs within 3e-5 nats of the learner's. A run on a CPU is
  refused for Nemotron-H's experts, Mamba 1 and Jamba, Kimi-Linear with numba, Qwen3.5 in float32, LFM2 and Gemma 3n.
"""


def facts(architecture: str) -> tuple[str, str, str]:
    """Return an architecture's layout, whether it takes adapters, and whether a real server was tried."""
    layout = _layouts().get(architecture) or RESULTS.get(architecture, "")
    # Every family of these tables is tried with an adapter.
    adapted = "yes" if architecture in _layouts() else ""
    return "" if layout == "not built" else layout, adapted, "yes" if architecture in cpu_build.SERVED else ""


@cache
def _layouts() -> Mapping[str, str]:
    """Return the layouts of the families that have tests of their own, by architecture."""
    tried = ((PADDED, "padded"), (TEXT, "trie"), (MIXTURES, "trie"), (VISION, "trie"))
    return {make().config.model_type: layout for families, layout in tried for make in families.values()}


def section() -> str:
    """Returns the text."""
    return _HEAD + _architectures()


def _architectures() -> str:
    """Return the section on every architecture of transformers."""
    by_result = {result: [name for name in RESULTS if RESULTS[name] == result] for result in _SAID}
    built = len(RESULTS) - len(by_result["not built"])
    trained = built - len(by_result["refused"])
    lines = [f"**{_SAID[result]}** ({len(names)}): {', '.join(names)}." for result, names in by_result.items() if names]
    return _ARCHITECTURES.format(count=len(RESULTS), built=built, trained=trained) + "\n\n".join(lines) + "\n"


_SAID = {"padded": "Trains padded", "refused": "Refused", "not built": "Not tried"}
_ARCHITECTURES = """
### Every architecture of transformers

Of the {count} architectures of `AutoModelForCausalLM`, {built} can be made small by sizes alone, with random weights.
{trained} of these train on a CPU, with log-probs and gradients within 2e-4 of those of each sequence alone
(`pytest --all tests/learner/model/test_every_architecture.py`). All that are not listed here train with the layout
`trie`.

"""
