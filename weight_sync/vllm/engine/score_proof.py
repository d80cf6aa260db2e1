"""Computes log-probs of given tokens inside a vLLM worker, between two steps of its engine.

No request, slot or cache is taken, so nobody waits: one forward pass, in which attention looks at the tokens themselves
and not at the cache. All else is the code and the weights that generation uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from slipstream.weight_sync.vllm.engine.contract import AttentionLayer, ModelRunner

# Attention keeps the square of this many scores for each head.
MAX_TOKENS = 1024


def reason_not_to(runner: ModelRunner, tokens: int) -> str | None:
    """Return why the model of `runner` (vLLM's model runner) cannot be scored this way, None if it can."""
    config = runner.vllm_config
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "its layers are spread over a pipeline"
    if parallel.data_parallel_size > 1:  # vLLM says 1 to the engines of a dense model, which are independent
        return "its experts are spread over engines, which must all step at once"
    if parallel.prefill_context_parallel_size > 1:
        return "its workers share the tokens of a prompt"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens are more than {MAX_TOKENS}"
    if runner.model_config.is_encoder_decoder:
        return "its inputs are not tokens alone"
    for name, layer in config.compilation_config.static_forward_context.items():
        if (reason := _reason_of_layer(layer, tokens)) is not None:
            return f"{name} {reason}"
    return None


def _reason_of_layer(layer: Any, tokens: int) -> str | None:
    if not isinstance(layer, AttentionLayerBase):
        return None  # a mixture of experts is registered too, but keeps nothing from token to token
    if type(layer) is not Attention:
        return f"is {type(layer).__name__}, not plain attention"
    if layer.attn_type != AttentionType.DECODER:
        return f"is attention of the kind {layer.attn_type}"
    if layer.sliding_window is not None and layer.sliding_window < tokens:
        return f"looks back {layer.sliding_window} tokens only"
    if getattr(layer, "kv_cache_update_bypass", False):
        return "is given its keys and values by the cache"
    if layer.kv_sharing_target_layer_name is not None:
        return "shares the keys and values of another layer"
    for special in ("alibi_slopes", "sinks"):
        if getattr(layer.impl, special, None) is not None:
            return f"has {special}"
    return None


@torch.inference_mode()
def score(runner: ModelRunner, token_ids: list[int]) -> list[float] | None:
    """Compute log p(token_ids[i + 1] | token_ids[: i + 1]) at temperature 1.

    To be called on the engine's thread, in every worker at once: tensor-parallel ones compute together.

    Returns:
        T - 1 values in nats; None in a worker without logits.
    """
    device = runner.device
    ids = torch.tensor(token_ids, device=device)
    positions = torch.arange(len(ids), device=device)
    if runner.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    with (
        set_forward_context(None, runner.vllm_config, num_tokens=len(ids), skip_compiled=True),
        _attending_to_itself(runner),
    ):
        hidden = runner.model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits = runner.model.compute_logits(hidden[:-1])
    if logits is None:
        return None
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0]
    values: list[float] = logprobs.tolist()
    return values


@contextmanager
def _attending_to_itself(runner: ModelRunner) -> Iterator[None]:
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    patched = [layer for layer in layers if type(layer) is Attention]
    try:
        for layer in patched:
            layer.forward = partial(_attend, layer)
        yield
    finally:
        for layer in patched:
            layer.__dict__.pop("forward", None)


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output_shape: torch.Size | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `Attention.forward` of one sequence without a cache: causal, in float32."""
    heads, groups = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    q = query.view(-1, heads, groups, layer.head_size).float()
    k = key.view(-1, heads, layer.head_size).float()
    v = value.view(-1, heads, layer.head_size_v).float()
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * layer.impl.scale
    if cap := getattr(layer.impl, "logits_soft_cap", None):
        scores = torch.tanh(scores / cap) * cap
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    output = torch.einsum("hgqk,khd->qhgd", weights, v).to(output_dtype or query.dtype)
    return output.reshape(output_shape or (len(q), -1))


def put_under(runner: ModelRunner, tokens: int, adapter: Any | None) -> None:
    """Have the next pass over `tokens` tokens compute under `adapter`, a `LoRARequest`, or under none.

    Without this the adapters of the engine's last step would apply. Its next step sets its own. The logits of all
    tokens but the last are wanted.
    """
    if runner.lora_config is None:
        return
    number = 0 if adapter is None else adapter.lora_int_id
    requests = set() if adapter is None else {adapter}
    runner._set_active_loras((number,) * (tokens - 1), (number,) * tokens, requests)
