"""Gives each rank of a learner its share of the published weights, so that ranks publish side by side.

Names are dealt out by size, and every rank works out the same deal by itself. A rank that holds all weights takes its
share from its own. Where weights are sharded, each rank sends its rows of a tensor to the rank whose share it is, a
bucket at a time and in the type that is published. Besides what its consumer keeps, a rank holds one unit (twice, where
the conversion to a checkpoint copies) and one bucket.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slipstream.learner.model import export
from slipstream.learner.model.export import CheckpointView
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team
from slipstream.weight_sync.weights.manifest import Manifest

BUCKET_BYTES = 256 << 20

# A layer of a network, and a module within it.
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_IN_LAYER = re.compile(r".*?\.\d+\.[^.]+")


def _module_of(name: str) -> str:
    found = _IN_LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0]


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0]


# From fine to coarse: which weights stay together. A conversion to the checkpoint may need several of them at once.
_UNITS: Sequence[Callable[[str], str]] = (_module_of, _layer_of, lambda name: "")


def deal_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Deal units out to `count` ranks: the largest first, each to the rank that has the least.

    Args:
        sizes: Bytes of each unit.

    Returns:
        Each rank's units. No rank has more than the mean and one unit.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    total = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = total.index(min(total))
        shares[rank].append(name)
        total[rank] += sizes[name]
    return shares


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that travels at once: rows `first` to `last` of each rank's own; `ends` marks the last one.
    A tensor that is not sharded has one piece without rows."""

    name: str
    first: int
    last: int
    ends: bool


class Share:
    """One rank's share of the published weights, made one at a time (`MadeOneByOne`), as often as wanted.

    All shares together are what `Published` gives. With sharded weights each rank must iterate over its own at the same
    time and to the end, as the ranks send each other rows meanwhile. On a GPU the tensors are ready for the stream that
    is current then.

    Args:
        network: The transformers model; sharded weights must be in parts (`wrapping.resharded`).
        dtype: Type in which floating-point tensors are published; None for their own.
        bucket_bytes: The most that a rank sends at once, and that it receives at once.
        view: Views the network as it is now; needed where other weights are wanted than all that train.

    Attributes:
        layouts: The `layout` of each rank.
    """

    def __init__(
        self,
        network: Any,
        team: Team,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        view: Callable[[], CheckpointView] | None = None,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._network, self._team = network, team
        self._look: Callable[[], CheckpointView] = view or (lambda: export.whole_view(network))
        self._view = self._look()
        self._tensors = export.untied(network, self._view.tensors)
        manifest = Manifest.of(self._tensors, dtype)
        self._types: dict[str, torch.dtype] = {
            name: getattr(torch, of) for name, of in zip(manifest.names, manifest.dtypes, strict=True)
        }
        units, converted = self._units()
        sizes = {unit: sum(map(self._bytes, names)) for unit, names in units.items()}
        shares = deal_out(sizes, team.count)
        self._names = [[units[unit] for unit in share] for share in shares]
        device = next((wrapping.local(tensor).device for tensor in self._tensors.values()), torch.device("cpu"))
        self.layouts = [
            {
                name: torch.empty(1, dtype=of.dtype, device=device).expand(of.shape)
                for unit in share
                for name, of in converted[unit].items()
            }
            for share in shares
        ]

    def layout(self) -> dict[str, torch.Tensor]:
        """Return tensors without content on the network's device, by the names of the checkpoint."""
        return self.layouts[self._team.rank]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors in the published type, in the order of `layout`, with the weights as they are
        now."""
        self._view = self._look()
        self._tensors = export.untied(self._network, self._view.tensors)
        for unit in self._exchanged():
            for name, tensor in export.converted(self._network, unit).items():
                yield name, self._view.whole(tensor).to(self.layout()[name].dtype)
            # Nothing of it is held while the next one arrives.
            del unit, tensor

    def _units(self) -> tuple[dict[str, list[str]], dict[str, dict[str, torch.Tensor]]]:
        """Find the smallest units that can be converted apart from each other.

        Returns:
            The network's names in each unit, and what becomes of them in the checkpoint, on the meta device.
        """
        empty = {
            name: torch.empty(tensor.shape, dtype=self._types[name], device="meta")
            for name, tensor in self._tensors.items()
        }
        right = _shapes(export.converted(self._network, empty))
        for unit_of in _UNITS:
            units: dict[str, list[str]] = {}
            for name in empty:
                units.setdefault(unit_of(name), []).append(name)
            try:
                converted = {
                    unit: export.converted(self._network, {name: empty[name] for name in names})
                    for unit, names in units.items()
                }
            except (ValueError, KeyError, IndexError, RuntimeError):  # a conversion misses weights of another unit
                continue
            if sorted(of for part in converted.values() for of in _shapes(part)) == sorted(right):
                break
        return units, converted

    def _bytes(self, name: str) -> int:
        return self._tensors[name].numel() * self._types[name].itemsize

    def _exchanged(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of each of this rank's units, by the network's names, as they are whole."""
        rank = self._team.rank
        waiting = deque(self._names[rank])
        arrived: dict[str, torch.Tensor] = {}
        arriving: dict[str, torch.Tensor] = {}
        for bucket in zip_longest(*map(self._buckets, self._names), fillvalue=()):
            wrapping.exchange(*self._round(bucket, arriving))
            arrived.update({piece.name: arriving.pop(piece.name) for piece in bucket[rank] if piece.ends})
            while waiting and all(name in arrived for name in waiting[0]):
                yield {name: arrived.pop(name) for name in waiting.popleft()}

    def _buckets(self, units: list[list[str]]) -> Iterator[list[_Piece]]:
        """Cut the tensors of a rank's share into pieces, and yield those that travel at once."""
        bucket: list[_Piece] = []
        left = self.bucket_bytes
        for name in (name for unit in units for name in unit):
            first, rows = 0, self._rows_each(name)
            # Each rank sends one row.
            width = self._bytes(name) // max(1, len(self._tensors[name])) * self._team.count if rows else 0
            ends = False
            while not ends:
                if left < width and bucket:
                    yield bucket
                    bucket, left = [], self.bucket_bytes
                last = min(rows, first + max(1, left // max(1, width)))
                ends = last == rows
                bucket.append(_Piece(name, first, last, ends))
                first, left = last, left - (last - first) * width
        if bucket:
            yield bucket

    def _rows_each(self, name: str) -> int:
        """Return the most rows of a sharded tensor that a rank holds; 0 where each holds all."""
        tensor = self._tensors[name]
        return len(wrapping.rows_of(len(tensor), self._team.count, 0)) if isinstance(tensor, DTensor) else 0

    def _round(
        self, buckets: Sequence[Sequence[_Piece]], arriving: dict[str, torch.Tensor]
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """Prepare one exchange: copy this rank's own rows to `arriving`, and return what it sends and receives.

        Args:
            buckets: What travels to each rank.
            arriving: This rank's tensors that are not whole yet, by name.
        """
        sent: list[tuple[int, torch.Tensor]] = []
        received: list[tuple[int, torch.Tensor]] = []
        for owner, piece in ((owner, piece) for owner, bucket in enumerate(buckets) for piece in bucket):
            tensor, dtype = self._tensors[piece.name], self._types[piece.name]
            rows = wrapping.local(tensor)[piece.first : piece.last] if piece.last else None
            if owner != self._team.rank:
                if rows is not None and rows.numel():
                    sent.append((owner, rows.to(dtype)))
            elif rows is None:
                arriving[piece.name] = tensor
            else:
                if not piece.first:
                    arriving[piece.name] = torch.empty(tensor.shape, dtype=dtype, device=rows.device)
                for source, part in enumerate(torch.split(arriving[piece.name], self._rows_each(piece.name))):
                    target = part[piece.first : piece.last]
                    if source == self._team.rank:
                        target.copy_(rows)
                    elif target.numel():
                        received.append((source, target))
        return sent, received


def _shapes(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, list[int]]]:
    return [(name, list(tensor.shape)) for name, tensor in tensors.items()]
