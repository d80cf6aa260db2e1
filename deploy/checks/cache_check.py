"""Compares the cache of keys and values that a server on a CPU reserves with what the episodes can fill."""

from __future__ import annotations

import os

from deploy.servers import kv_cache
from deploy.servers.gpu_memory import gib
from deploy.servers.model_shape import architecture_of
from deploy.servers.vllm_server import on_cpu
from protocol.config import Finding, RunConfig

# A cache is reported if it is larger than needed by this factor, and by this many bytes.
_OVERSIZED, _OVERSIZED_BYTES = 3, kv_cache.GIB


def reserved(config: RunConfig) -> int | None:
    """Return the bytes that each server reserves.

    None if they are not Slipstream's choice: on a GPU, for servers elsewhere, where the user has set them, or for a
    model of unknown shape.
    """
    architecture = architecture_of(config.model)
    chosen = config.vllm.launched and on_cpu() and not kv_cache.is_set(config.vllm.args, os.environ)
    model = kv_cache.model_of(architecture, config.model.dtype) if chosen and architecture is not None else None
    return None if model is None else kv_cache.budget(model, config, kv_cache.available_bytes()).size


def describe_cache(config: RunConfig) -> str | None:
    """Describe the cache of each server; None as for `reserved`."""
    size, vllm = reserved(config), config.vllm
    if size is None:
        return None
    return f"a cache of {gib(size)} for {vllm.max_num_seqs} sequences of {vllm.max_model_len:,} tokens"


def find_oversized_cache(config: RunConfig, longest: int) -> list[Finding]:
    """Find a cache that is far larger than episodes of one turn can fill.

    Args:
        longest: Tokens of the longest prompt.
    """
    size, tokens = reserved(config), longest + config.rollout.max_turn_tokens
    shorter = config.model_copy(update={"vllm": config.vllm.model_copy(update={"max_model_len": tokens})})
    needed = reserved(shorter)
    if size is None or needed is None or size < max(_OVERSIZED * needed, needed + _OVERSIZED_BYTES):
        return []
    text = (
        f"each server reserves {describe_cache(config)}, and an episode has at most {tokens:,} (the longest prompt and "
        f"rollout.max_turn_tokens), for which {gib(needed)} would do"
    )
    return [Finding("warning", text, f"set vllm.max_model_len = {tokens}")]
