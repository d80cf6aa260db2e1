"""Writes docs/trained_models.md, from the tables of the learner's tests:
`python -m tests.trained_models_page > docs/trained_models.md`."""

from __future__ import annotations

from tests.learner.families import LONGEST, MIXTURES, REFUSED, TEXT, VISION

_HEAD = f"""\
# Models that the learner trains

Written by `python -m tests.trained_models_page > docs/trained_models.md` from the tables of
`tests/learner/families.py`: every row is a tiny random model that `tests/learner/test_model_families.py` loads. No real
checkpoint was at hand. Which chat formats work stands in [models.md](models.md).

At its start the learner scores a made-up row of several sequences, two with a common beginning, and compares it with
each sequence alone through the model's own eager attention. A model whose layers mix the positions of a row
(convolutions, linear attention), or whose position embeddings look at the whole row, is refused there, whatever it is
called. So is one with weights that its checkpoint does not hold under the names with which they would be published.

- **Exact**: log-probs of a packed row against each sequence alone, in float64 and eager attention, 2e-4 nats.
- **Published**: names and values are those that `save_pretrained` writes. Experts that transformers fuses are
  published one by one, as the checkpoint has them. Qwen3-MoE and Mixtral were updated twice in a real vLLM engine on a
  CPU, and its log-probs were the learner's to 2e-6.
- **Models that see** train their text tower and output layer; the rest is frozen and not published. Rollouts are text.
  None of them was served by vLLM here.
- **LongRoPE** (Phi-3, Phi-4): vLLM takes the long factors for every sequence if `vllm.max_model_len` is above the
  model's `original_max_position_embeddings`, and for none otherwise. The learner does the same.
- `learner.router_aux_loss_coef` keeps the experts of a mixture evenly used. It is exact for the whole step: what
  sequences share counts for each of them, and packing does not change it.

| family | what | outcome, with vllm.max_model_len = {LONGEST} |
|---|---|---|
"""


def page() -> str:
    kinds = (("text", TEXT), ("mixture of experts", MIXTURES), ("sees", VISION))
    trained = [f"| {name} | {kind} | trains |" for kind, families in kinds for name in families]
    refused = [f"| {name} |  | refused: {_WHY[name]} |" for name in REFUSED]
    return _HEAD + "\n".join(trained + refused) + "\n"


_WHY = {
    "Qwen3-Next (linear attention)": "its layers would mix the sequences of a row",
    "LFM2 (convolutions)": "its layers would mix the sequences of a row",
    "Mamba": "transformers has no attention to put ours in place of",
    "Falcon": "transformers has no attention to put ours in place of",
    "Granite (scales its logits)": "its logits are not lm_head(hidden)",
    "Phi-MoE, LongRoPE above its bound": "its position embeddings look at the whole row; lower vllm.max_model_len",
    "Llama, dynamic RoPE above its bound": "frequencies depend on each sequence's length; lower vllm.max_model_len",
    "Llama 4 above its chunk": "chunks are computed as full attention; lower vllm.max_model_len",
}


if __name__ == "__main__":
    print(page(), end="")
