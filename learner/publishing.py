"""Whether an adapter is published by itself or merged into the model's weights: the run file, then the servers say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.model.adapter import Adapter
from protocol.config import RunConfig, adapter_checks
from weight_sync.fleet import adapter_publication
from weight_sync.weights.snapshot import Probe, Snapshot


def alone(
    config: RunConfig, adapter: Adapter, probe: Probe, on_gpu: bool, say: Callable[[str], None], run_id: str
) -> bool:
    """on_gpu: whether the learner is. With `weight_sync.adapter_only = "auto"` a server is asked to load it, and what
    keeps vLLM from it is said; with true the publication itself finds out. Blocks."""
    wanted = config.weight_sync.adapter_only
    if merged := adapter_checks.merged_adapter_message(wanted, config.model, config.lora, on_gpu):
        say(merged)
    if not adapter_checks.is_adapter_published_alone(wanted, config.model, config.lora, on_gpu):
        return False
    if wanted is True:
        return True
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    reason = adapter_publication.adapter_refusal(config, Snapshot(0, adapter.alone(), probe, dtype, run_id=run_id))
    if reason is not None:
        say(f"the merged weights are published, since {reason}")
    return reason is None
