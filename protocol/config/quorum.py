"""Whether as many servers can have a version as its publication wants."""

from __future__ import annotations

from protocol.config.sections import VllmSection, WeightSyncSection


def doubts(weight_sync: WeightSyncSection, vllm: VllmSection) -> list[str]:
    """What may be meant, as servers may join, but hardly is."""
    there = len(vllm.servers) if vllm.servers else vllm.count
    if weight_sync.quorum <= there:
        return []
    named = f"the {there} of vllm.servers" if vllm.servers else f"vllm.count = {there}"
    return [
        f"weight_sync.quorum = {weight_sync.quorum} with {named}: the first step waits until "
        f"{weight_sync.quorum - there} more have joined (`slipstream vllm run.toml --join URL`), and without them the "
        f"run ends after vllm.start_timeout_s = {vllm.start_timeout_s:g} s; if none are to join, lower "
        f"weight_sync.quorum to {max(1, there)}"
    ]
