"""Writes tensors in safetensors files as they come, so that no more than one is held at a time.

Ranks write a model folder together: a file each, with its share of the weights, and an index over all of them, as
transformers and servers read it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from slipstream.learner.model import export
from slipstream.learner.model.policy import Policy
from slipstream.learner.model.share import Share
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team

# The format's names of types.
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The header ends at a multiple of it, so that tensors are aligned.
_ALIGNMENT = 8


def write_tensors(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file, durable when this returns. The tensors are taken to their end even if it cannot be written, since
    other ranks may take part in making them.

    Args:
        layout: Names, shapes and types, with any content.
        tensors: The same in any order, on any device.

    Raises:
        OSError: It cannot be written.
    """
    coming = iter(tensors)
    try:
        _write(path, layout, coming, {"format": "pt", **(metadata or {})})
    except OSError:
        for _ in coming:
            pass
        raise


def _write(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    places: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(layout.items(), key=lambda item: (-item[1].element_size(), item[0])):
        places[name], end = end, end + math.prod(tensor.shape) * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [places[name], end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        start = file.tell()
        for name, tensor in tensors:
            file.seek(start + places.pop(name))
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if places:
            raise ValueError(f"{path}: {next(iter(places))} did not come")
        file.flush()
        os.fsync(file.fileno())


def save_policy(folder: Path, policy: Policy, team: Team) -> None:
    """Save the policy as `Policy.save` does. Where ranks hold parts all must call it, and each writes its share, to the
    folder of rank 0; unless they do not all see that, and rank 0 gathers the weights.

    Raises:
        OSError: A rank cannot write.
    """
    if not team.sharded:
        policy.save(folder)
        return
    network, folder = policy.model, Path(team.spread(str(folder)))
    with team.failing_as_one():
        if team.leads:
            policy.save_without_weights(folder)
    if not team.agree(folder.is_dir()):
        state = wrapping.gathered(network.state_dict(), team.leads)
        if team.leads:
            policy.save(folder, state)
        return
    share = Share(network, team, view=partial(export.saved_view, network))
    names = [f"model-{rank + 1:05d}-of-{team.count:05d}.safetensors" for rank in range(team.count)]
    with team.failing_as_one():
        write_tensors(folder / names[team.rank], share.layout(), share)
        if team.leads:
            sizes = [tensor.nbytes for layout in share.layouts for tensor in layout.values()]
            files = {name: file for file, layout in zip(names, share.layouts, strict=True) for name in layout}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(files.items()))}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
