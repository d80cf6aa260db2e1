"""Spreads the policy over ranks: each has all of it (DDP, through accelerate), or a part of it (FSDP2).

FSDP2 is torch's `fully_shard` itself, the same call on a CPU as on GPUs: accelerate's way to it supports GPUs only, and
maps parameters by name, which breaks tied embeddings. Each layer of the text tower is sharded, and the rest as one, so
that a tied output layer and its embedding stay one parameter.

Layers travel in the type that they compute in, and gradients in float32. The rest travels as it is: the layers add up
in float32 what the embeddings begin, and the output layer's gradient is written in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.learner.ranks.team import Team

# torch's annotations leave out collectives.
dist: Any = torch.distributed

Module = TypeVar("Module", bound=torch.nn.Module)


def ddp_arguments(skips_weights: bool) -> DistributedDataParallelKwargs:
    """Return the arguments of DDP.

    Args:
        skips_weights: Whether a row may use none of an expert's weights, which DDP must then look for. It warns where
            it finds none.
    """
    return DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=skips_weights)


def wrapped(policy: Any, accelerator: Accelerator, team: Team) -> Any:
    """Wrap the policy with rank 0's weights, as all ranks train it; one that is sharded has its own. Its parameters may
    be other objects afterwards."""
    if team.count == 1:
        return accelerator.prepare_model(policy)
    if is_sharded(policy):
        return policy
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor, 0)
    if team.sharded:
        return sharded(policy, accelerator.device, policy.precision.of_layers)
    model = accelerator.prepare_model(policy)
    # No step changes a buffer: sending them before each forward would only cost time.
    model.broadcast_buffers = False
    return model


def sharded(model: Module, device: torch.device, layers: torch.dtype | None = None) -> Module:
    """Shard the parameters of the model over all ranks, in place; one that is sharded stays as it is.

    Args:
        layers: Type in which a layer is gathered; None for that of its weights.
    """
    if is_sharded(model):
        return model
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs stay as they are: autocast chooses the type of each product, as it does where a rank holds all weights.
    travels = MixedPrecisionPolicy(param_dtype=layers, reduce_dtype=layers and torch.float32, cast_forward_inputs=False)
    # Layers that see belong to the rest: a rank whose row has no image runs none of them.
    text = getattr(model, "text", model)
    for module in list(text.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh, mp_policy=travels)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "run"):
        register_fsdp_forward_method(model, "run")
    return model


def is_sharded(model: torch.nn.Module) -> bool:
    """Say whether ranks hold parts of the model's weights."""
    return isinstance(model, FSDPModule)


@contextmanager
def synchronising(model: torch.nn.Module, last: bool) -> Iterator[None]:
    """Wrap forward and backward pass of a row: with DDP, gradients are exchanged with the last row only.

    With FSDP2 they are with each row: a rank would otherwise hold the whole gradient, which sharding is to avoid.
    """
    if last or not isinstance(model, DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def resharded(model: torch.nn.Module) -> None:
    """Free weights that a forward pass without a backward pass has left whole: a step would not change them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def rows_of(rows: int, count: int, rank: int) -> range:
    """Return the rows of a sharded tensor that a rank holds; the last ranks may hold fewer, or none."""
    each = -(-rows // count)
    return range(min(rows, each * rank), min(rows, each * (rank + 1)))


def own_rows(tensor: torch.Tensor) -> range | None:
    """Return the rows of a sharded tensor that this rank holds; None for one that it holds whole."""
    if not isinstance(tensor, DTensor):
        return None
    return rows_of(len(tensor), tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())


def own_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that train as this rank holds them, its rows of those that are sharded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, local(parameter.detach())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each rank holds a part, on all ranks; all must ask for it, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(value: Any, keep: bool) -> Any:
    """Return nested values with whole tensors on the host, one after the other; None for those not kept."""
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item, keep) for item in value)
    return value


def like(full: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return `full` as this rank holds `held`: its part, if `held` is sharded and has the same shape; `full` itself if
    it is sharded."""
    if not isinstance(full, DTensor) and isinstance(held, DTensor) and full.shape == held.shape:
        placed = full.to(held.device)
        return distribute_tensor(placed, held.device_mesh, held.placements, src_data_rank=None)
    return full


def shared_out(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimiser's state of whole tensors as this rank holds it: its part of those like a parameter."""
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
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange(sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Send tensors to ranks, and fill others with what ranks send; all must exchange at the same time.

    Args:
        sent: Each with the rank that it goes to, contiguous.
        received: Each with the rank that it comes from, contiguous and in that rank's order.
    """
    operations = [
        *(dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sent),
        *(dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in received),
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
