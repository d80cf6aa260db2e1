"""Writes the part of docs/models.md on what the learner trains, from the tables of its tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from slipstream.deploy.servers import cpu_build
from tests.learner.architectures import RESULTS
from tests.learner.families import LONGEST, MIXTURES, PADDED, REFUSED, TEXT, VISION

_HEAD = f"""\
## What the learner trains

At its start the learner finds out how a model's rows may be laid out, whatever its name (`learner.layout`):

- `trie`: tokens that sequences share stand in a row once. For layers in which attention alone mixes positions.
- `packed`: sequences stand end to end, and the layers are told where each begins. For linear attention and
  convolutions on a GPU with flash-linear-attention and causal-conv1d.
- `padded`: a batch of whole sequences of similar length. For every other causal model: layers with a state,
  convolutions, attention without transformers' interface.

It takes the first that is exact: the log-probs of made-up rows are those of each sequence alone through the model's
own eager attention and logits, and none of them changes with other sequences or with later tokens. One row is as long
as `learner.token_budget`, with a sequence of up to 2,048 tokens, where a forward pass over it is cheap; weights of 16
bits are compared in float32 too, up to 2 billion of them. If the layout is not `trie`, one line at the start says why.
Logits that a model scales or caps, and layers between its tower and its output, are computed as the model does; they
are compared at the size of a trained model's. A model is refused

- that scores a token by what comes after it, or computes its logits in yet another way;
- whose position embeddings depend on the whole row, or end below `vllm.max_model_len`;
- with weights that its checkpoint does not hold under the names they would be published with.

Speed of a step beside `padded`, of a dense model of 7M parameters on one core (`python -m benchmarks.layouts`), and of
a Qwen3-Next of its width and depth without the kernels of flash-linear-attention:

| batch | trie | packed | padded | hybrid, padded |
|---|---|---|---|---|
| groups of 8, prompts of 96 tokens, completions of 64 | 1.96 | 1.00 | 1 | 0.45 |
| prompts of 800 tokens, completions of 200 | 2.79 | 1.00 | 1 | 0.48 |
| rollouts of 32 to 2,048 tokens, nothing shared | 0.96 | 0.96 | 1 | 0.51 |

What is checked, and what to know:

- Each row of the table is a tiny random model that `tests/learner/model/test_model_families.py` loads on a CPU.
- **Exact**: log-probs of a packed row against each sequence alone, in float64 and eager attention, within 2e-4
  nats.
- **Published**: names and values are those that `save_pretrained` writes. Experts that transformers fuses are
  published one by one, as the checkpoint has them. Qwen3-MoE and Mixtral were updated twice in a real vLLM engine
  on a CPU; its log-probs matched the learner's to 2e-6.
- **Loaders of their own**: GPT-OSS's experts and attention sinks, and some tensors of other models, are copied into
  vLLM's parameters past their loaders. A publication takes these copies as well. One that leaves a parameter of the
  server unwritten is refused with that parameter's name, by every transport. GPT-OSS was updated twice in a real vLLM
  engine on a CPU: its log-probs matched the learner's to 1e-6; its weights are loaded under the pause.
- **vLLM's CPU build** (0.32) serves tiny models of these and takes two updates, with log-probs within 3e-5 nats of the
  learner's: Gemma 2, Gemma 4, GPT-OSS, Granite 4 (hybrid, with experts and without), Falcon-H1, Nemotron-H without
  experts; Qwen3-Next and Qwen3.5 (dense and mixture) in bfloat16. Where layers are of Mamba 2's kind, Slipstream
  switches its prefix cache off: with it, a prompt longer than a block ended the server. A run on a CPU is refused at
  its start, and by `slipstream doctor`, for what the build lacks: Nemotron-H's experts, Mamba 1 and Jamba, Kimi-Linear
  beside numba, Qwen3.5 in float32 (its linear attention has a kernel for bfloat16 and heads of 128 alone), LFM2 (it
  turns only the first head by position, 0.3 to 0.6 nats off), Gemma 3n (0.3 nats off, however its weights arrive).
- **Vision models** train their text tower and output layer; the rest is frozen and not published, unless
  `model.train_vision`. Rollouts are text, or show [images](images.md). vLLM has served Qwen2.5-VL here.
- **LongRoPE** (Phi-3, Phi-4): vLLM uses the long factors for every sequence if `vllm.max_model_len` is above the
  model's `original_max_position_embeddings`, else for none. The learner does the same.
- `learner.router_replay = true` trains a mixture on the experts that answered: vLLM records them with the tokens
  (`--enable-return-routed-experts`, which Slipstream sets; on GPUs), and the learner's routers choose the same ones,
  weighed by their own scores. It works for routers that choose by `torch.topk` over the experts' scores, which is
  tried at the start; JetMoE, Phi-MoE, Doge and Zaya are refused. Where sequences share tokens, the experts of the
  first one stand. Prompts and tool results have recorded experts too; what has none is computed with the
  learner's own choice and counted ([metrics](metrics.md)). A group grows by layers x choices bytes a token, twice
  that above 256 experts: raise `queue.max_group_bytes` for long episodes.
- **Heads that guess further tokens** (MTP) and draft models are left alone: the learner loads and saves a checkpoint
  without them. Speculative decoding (`--speculative-config` in `vllm.args`) is refused: a draft would keep the weights
  of the start, and with `ngram` vLLM 0.32's CPU build answered with log-probs of -9999.
- `learner.router_aux_loss_coef` keeps a mixture's experts evenly used. It is exact for the whole step: what
  sequences share counts for each of them, and packing does not change it.

| family | kind | result, with vllm.max_model_len = {LONGEST} |
|---|---|---|
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
    kinds = (("text", TEXT), ("mixture of experts", MIXTURES), ("vision", VISION))
    trained = [f"| {name} | {kind} | trains |" for kind, families in kinds for name in families]
    padded = [f"| {name} | text | trains, padded |" for name in PADDED]
    refused = [f"| {name} |  | refused: {_WHY[name]} |" for name in REFUSED]
    return _HEAD + "\n".join(trained + padded + refused) + "\n" + _architectures()


def _architectures() -> str:
    """Return the section on every architecture of transformers."""
    by_result = {result: [name for name in RESULTS if RESULTS[name] == result] for result in _SAID}
    built = len(RESULTS) - len(by_result["not built"])
    trained = len(by_result["trie"]) + len(by_result["padded"])
    lines = [f"**{_SAID[result]}** ({len(names)}): {', '.join(names)}." for result, names in by_result.items() if names]
    return _ARCHITECTURES.format(count=len(RESULTS), built=built, trained=trained) + "\n\n".join(lines) + "\n"


_SAID = {
    "trie": "Trains with shared prefixes",
    "padded": "Trains padded",
    "refused": "Refused",
    "not built": "Not tried",
}
_ARCHITECTURES = """
### Every architecture of transformers

Of the {count} architectures of `AutoModelForCausalLM`, {built} can be made small by sizes alone, with random weights.
{trained} of these train on a CPU: a row's log-probs are within 2e-4 nats of each sequence alone, and gradients within
2e-4 of their greatest value, in float64. `pytest --all tests/learner/model/test_every_architecture.py` tries them all;
each commit's tests try five.

"""


_WHY = {
    "Phi-MoE, LongRoPE above its bound": "its position embeddings look at the whole row; lower vllm.max_model_len",
    "Llama, dynamic RoPE above its bound": "frequencies depend on each sequence's length; lower vllm.max_model_len",
}
