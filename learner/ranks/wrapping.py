"""How the policy is spread over ranks: each has all of it (DDP, through accelerate), or a share of it (FSDP2).

FSDP2 is torch's `fully_shard` itself, the same call on a CPU as on GPUs: accelerate's way to it takes GPUs only, and
maps parameters by name, which tied embeddings do not outlive. What is sharded: each layer, and the rest as one, so that
a tied output layer and its embedding stay one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.ranks.team import Team

# torch's annotations leave out collectives.
dist: Any = torch.distributed

Module = TypeVar("Module", bound=torch.nn.Module)


def ddp_arguments(skips_weights: bool) -> DistributedDataParallelKwargs:
    """skips_weights: a row may use none of an expert's weights, which DDP must then look for. Where it finds none, it
    warns."""
    return DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=skips_weights)


def wrapped(policy: torch.nn.Module, accelerator: Accelerator, team: Team) -> Any:
    """The policy with rank 0's weights, as all ranks train it. Its parameters may be others afterwards."""
    if team.count == 1:
        return accelerator.prepare_model(policy)
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor, 0)
    if team.sharded:
        return sharded(policy, accelerator.device)
    model = accelerator.prepare_model(policy)
    # No step changes a buffer: sending them before each forward would only cost time.
    model.broadcast_buffers = False
    return model


def sharded(model: Module, device: torch.device) -> Module:
    """The model, in place, with its parameters shared out over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def synchronising(model: torch.nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of a row: with DDP, gradients go over the ranks with the last one only.

    With FSDP2 they do with each row: a rank would otherwise hold the whole gradient, which sharding is to avoid.
    """
    if last or not isinstance(model, DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def resharded(model: torch.nn.Module) -> None:
    """Let go of weights that a forward without a backward has left whole: a step would not change them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each rank holds a part, on all ranks; all must ask for it, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(value: Any, keep: bool) -> Any:
    """Nested values with whole tensors on the host, one after the other; where they are not kept, None."""
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item, keep) for item in value)
    return value


def like(full: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """`full` as this rank holds `held`: its part, if that has been shared out and has the same shape."""
    if isinstance(held, DTensor) and full.shape == held.shape:
        placed = full.to(held.device)
        return distribute_tensor(placed, held.device_mesh, held.placements, src_data_rank=None)
    return full


def shared_out(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimiser's state of whole tensors, as this rank holds them: its part of those that are like a parameter."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    parts = {
        number: {
            name: like(value, parameters[number]) if isinstance(value, torch.Tensor) else value
            for name, value in of.items()
        }
        for number, of in state["state"].items()
    }
    return {**state, "state": parts}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
