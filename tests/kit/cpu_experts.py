"""The two collectives that vLLM's CPU build lacks for a mixture of experts on several data-parallel engines.

With them its engines move tokens between each other as those on GPUs do, and step together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Add both to vLLM's communicator of CPUs."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CpuCommunicator.reduce_scatterv_into_output = reduce_scatterv_into_output


def all_gatherv(group: Any, given: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Any = None) -> Any:
    """Gather the rows of all ranks, which have `sizes` rows each; of several tensors, one after the other."""
    if not isinstance(given, torch.Tensor):
        return [all_gatherv(group, tensor, dim, sizes) for tensor in given]
    sizes = [len(given)] * group.world_size if sizes is None else sizes
    longest = max(sizes)
    padded = torch.cat([given, given.new_zeros(longest - len(given), *given.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(group: Any, given: torch.Tensor, dim: int = -1, sizes: Any = None) -> torch.Tensor:
    """Sum over all ranks, and return this rank's rows."""
    sizes = [len(given) // group.world_size] * group.world_size if sizes is None else sizes
    total = given.contiguous().clone()
    dist.all_reduce(total, group=group.device_group)
    before = sum(sizes[: group.rank_in_group])
    return total[before : before + sizes[group.rank_in_group]]


def reduce_scatterv_into_output(
    group: Any, given: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: Any = None
) -> torch.Tensor:
    return output.copy_(reduce_scatterv(group, given, dim, sizes))
