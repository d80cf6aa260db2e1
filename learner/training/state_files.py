"""Writes what the optimiser remembers by rank, and reads it back with any number of ranks.

Each rank writes its rows of sharded tensors to its own file, in the layout of torch's distributed checkpoints
(torch.distributed.checkpoint) on safetensors: a file says of each tensor at which row it begins. torch's reader then
gives a rank the rows that it holds, from whichever files have them. No rank needs another to write or to read, and
nothing is pickled (I8).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor, Shard

from slipstream.learner.model.tensor_files import write_tensors
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team

# Stands for a tensor that is in the files: its shape and type.
_SHAPE, _TYPE = "shape of a sharded tensor", "dtype"
# Bytes that are read before the files are opened again: pages that were read count as memory while a file is mapped.
BATCH_BYTES = 64 << 20

# torch's names in the metadata of a file.
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def file_names(count: int) -> list[str]:
    """Return the names of the files that so many ranks write."""
    return [f"rank-{rank + 1:05d}-of-{count:05d}.safetensors" for rank in range(count)]


def written(state: Any, folder: Path | None, team: Team) -> Any:
    """Write the sharded tensors of a nested state, or gather them on rank 0's host: without a folder, or where not all
    ranks see it. All must call it.

    Args:
        folder: On rank 0; it is made in one that is there.

    Returns:
        On rank 0 the whole state, or the state with stand-ins and the names of the files as its `parts`.

    Raises:
        OSError: A rank cannot write.
    """
    told = team.spread(None if folder is None else str(folder))
    if told is None or not team.agree(Path(told).parent.is_dir()):
        return wrapping.gathered(state, team.leads)
    with team.failing_as_one():
        state = _write(Path(told), state, team)
    return {**state, "parts": file_names(team.count)}


def read_back(state: Any, folder: Path | None, team: Team, mesh: Any, device: torch.device) -> Any:
    """Return rank 0's state, whole or with stand-ins, as this rank needs it. All ranks must call it.

    Args:
        folder: On rank 0, if there are stand-ins: the folder of the files. Where not all ranks see it, rank 0 sends
            whole tensors.
        mesh: The ranks that the tensors are sharded over; None for whole tensors.
        device: Where tensors of the files are to be.
    """
    told = team.spread(None if folder is None else str(folder))
    if told is None:
        return team.spread(state)
    if team.agree(Path(told).is_dir()):
        return _read(Path(told), team.spread(state), mesh, device)
    return team.spread(_read(Path(told), state, None, torch.device("cpu")) if team.leads else None)


def _write(folder: Path, state: Any, team: Team) -> Any:
    """Write this rank's rows, and return the state with a stand-in for each tensor that is in the files."""
    tensors: dict[str, torch.Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}

    def stand_in(path: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if tuple(value.placements) != (Shard(0),):
            return wrapping.gathered(value, team.leads)
        rows = wrapping.own_rows(value)
        if rows:
            tensors[path] = wrapping.local(value.detach())
            offsets[path] = {_OFFSETS: [rows.start, *[0] * (value.ndim - 1)]}
        return {_SHAPE: list(value.shape), _TYPE: str(value.dtype).removeprefix("torch.")}

    plain = _mapped(state, stand_in)
    folder.mkdir(exist_ok=True)
    path = folder / file_names(team.count)[team.rank]
    write_tensors(path, tensors, tensors.items(), {_SHARDING: json.dumps(offsets)})
    return plain


def _read(folder: Path, state: Any, mesh: Any, device: torch.device) -> Any:
    """Replace stand-ins by what the files hold."""
    found: dict[str, torch.Tensor] = {}
    batch: dict[str, torch.Tensor] = {}
    for path, stand_in in _stand_ins(state).items():
        found[path] = batch[path] = _room(stand_in, mesh, device)
        if sum(wrapping.local(tensor).nbytes for tensor in batch.values()) >= BATCH_BYTES:
            _load(folder, batch)
            batch = {}
    if batch:
        _load(folder, batch)
    return _mapped(state, lambda path, value: found.get(path, value))


def _load(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with what the files hold."""
    with warnings.catch_warnings(action="ignore"):  # that it reads without the other ranks
        load_distributed(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _room(stand_in: Mapping[str, Any], mesh: Any, device: torch.device) -> torch.Tensor:
    shape, dtype = torch.Size(stand_in[_SHAPE]), getattr(torch, stand_in[_TYPE])
    if mesh is None:
        return torch.empty(shape, dtype=dtype, device=device)
    rows = wrapping.rows_of(shape[0], mesh.size(), mesh.get_local_rank())
    local = torch.empty((len(rows), *shape[1:]), dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Change the leaves, and the stand-ins, of nested values; `change` is given their paths."""
    if isinstance(value, Mapping) and _SHAPE not in value:
        return {name: _mapped(item, change, f"{path}.{name}" if path else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change, f"{path}.{number}") for number, item in enumerate(value))
    return change(path, value)


def _stand_ins(state: Any) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}

    def note(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            found[path] = value

    _mapped(state, note)
    return found
