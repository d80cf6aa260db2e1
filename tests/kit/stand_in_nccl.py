"""Stands in for NCCL without a GPU: process groups are threads of one process, which block as NCCL does.

A collective ends when all ranks have joined it, in the order in which each issued its own. Nothing has a deadline. A
rank waits for a peer that is aborted or never joins until the rank itself is aborted. If the ranks' counts differ,
NCCL hangs or writes out of bounds; here the collective hangs and `misfits` records it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from slipstream.weight_sync.transports.gpu.communicator import Gpu
from slipstream.weight_sync.transports.gpu.ipc import FILLED, Handle, SharedBuckets
from slipstream.weight_sync.transports.gpu.nccl_library import UNIQUE_ID_BYTES, NcclError, Result


@dataclass(frozen=True)
class Op:
    """Holds one rank's part of a collective.

    Attributes:
        kind: "broadcast" of `count` bytes, or "sum" of one float32.
        address: Address of the bytes.
        count: Number of bytes.
        held: Bytes at the address when the collective's turn on its stream came. Kept because later work on the stream
            may overwrite them.
    """

    kind: str
    address: int
    count: int
    held: bytes


@dataclass
class World:
    """Holds all process groups.

    Attributes:
        groups: The groups by unique id.
        calls: Calls in order, each with its rank.
        aborted: Ranks that were aborted.
        misfits: Collectives in which the ranks' kinds or counts differed.
        hung: Ranks that issue calls but never take part in them.
    """

    groups: dict[bytes, Group] = field(default_factory=dict)
    calls: list[tuple[int, str]] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    hung: set[int] = field(default_factory=set)
    # Number of next broadcasts that arrive with one bit flipped.
    damaged: int = 0
    streams: dict[int, Place] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.numbers = itertools.count(1)


@dataclass
class Group:
    size: int = 0
    max_blocks: int | None = None
    joined: set[int] = field(default_factory=set)
    ops: dict[int, list[Op]] = field(default_factory=dict)
    done: int = 0


@dataclass
class Place:
    """Is one rank's handle of a group."""

    group: Group
    rank: int
    issued: int = 0
    aborted: bool = False


class StandIn:
    """Implements `Library`. A rank in `World.hung` issues its calls, but they never take part."""

    def __init__(self, world: World) -> None:
        self.world = world

    def unique_id(self) -> bytes:
        return next(self.world.numbers).to_bytes(UNIQUE_ID_BYTES, "big")

    def begin(self, unique_id: bytes, size: int, rank: int, max_blocks: int | None) -> Place:
        with self.world.changed:
            group = self.world.groups.setdefault(unique_id, Group(size, max_blocks))
            assert group.max_blocks == max_blocks, "ranks with different numbers of channels hang"
            assert group.size == size, f"rank {rank} comes with size {size}, another with {group.size}"
            assert rank in {*range(size)} - group.joined, f"rank {rank} of {size} is taken or not one"
            group.joined.add(rank)
            group.ops[rank] = []
            self._say(rank, "join")
            self.world.places.append(Place(group, rank))
            return self.world.places[-1]

    def result(self, place: Place | None) -> Result:
        assert place is not None, "asked about a group that was let go"
        assert not place.aborted, "asked about a group that was aborted: use after free"
        with self.world.changed:
            return Result.SUCCESS if len(place.group.joined) == place.group.size else Result.IN_PROGRESS

    def broadcast(self, place: Place, address: int, count: int, stream: int) -> None:
        self._issue(place, Op("broadcast", address, count, ctypes.string_at(address, count) if count else b""), stream)

    def sum_one(self, place: Place, address: int, stream: int) -> None:
        self._issue(place, Op("sum", address, 4, b""), stream)

    def abort(self, place: Place) -> None:
        with self.world.changed:
            place.aborted = True
            self.world.aborted.append(place.rank)
            self.world.changed.notify_all()

    def _issue(self, place: Place, op: Op, stream: int) -> None:
        with self.world.changed:
            self.world.streams[stream] = place
            if place.aborted:
                raise NcclError("the group was aborted")
            self._say(place.rank, op.kind)
            if place.rank in self.world.hung:
                place.issued += 10**9
                return
            place.issued += 1
            place.group.ops[place.rank].append(op)
            self._run(place.group)
            self.world.changed.notify_all()

    def _run(self, group: Group) -> None:
        while all(len(group.ops.get(rank, ())) > group.done for rank in range(group.size)):
            ops = [group.ops[rank][group.done] for rank in range(group.size)]
            if len({(op.kind, op.count) for op in ops}) > 1:
                self.world.misfits.append(str([(op.kind, op.count) for op in ops]))
                return
            if ops[0].kind == "sum":
                total = sum(ctypes.c_float.from_address(op.address).value for op in ops)
                for op in ops:
                    ctypes.c_float.from_address(op.address).value = total
            else:
                for op in ops[1:]:
                    ctypes.memmove(op.address, ops[0].held, op.count)
                    if self.world.damaged and op.count:
                        self.world.damaged -= 1
                        ctypes.c_ubyte.from_address(op.address + op.count // 2).value ^= 1
            group.done += 1

    def _say(self, rank: int, what: str) -> None:
        self.world.calls.append((rank, what))
        self.world.changed.notify_all()


class StandInStream:
    """Stands in for a CUDA stream. Its work has the order of the group's collectives."""

    def __init__(self, world: World) -> None:
        self.pointer = next(world.numbers)
        self._world = world

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Callable[[], bool]:
        place = self._world.streams.get(self.pointer)
        issued = place.issued if place is not None else 0
        return lambda: place is None or place.group.done >= issued


def stand_in_gpu(world: World, uuid: str = "GPU-0") -> Gpu:
    """Make a `Gpu` that uses the host's memory."""
    return Gpu(StandIn(world), torch.device("cpu"), uuid, lambda: StandInStream(world))


class Blocking:
    """Stands in for the part of vLLM's `PyNcclCommunicator` that its engine uses.

    Each call blocks until the collective is done.
    """

    def __init__(self, world: World, unique_id: bytes, rank: int, size: int) -> None:
        self._library = StandIn(world)
        self._world = world
        self._place = self._library.begin(unique_id, size, rank, max_blocks=None)
        self._until(lambda: len(self._place.group.joined) == size)
        one = torch.zeros(1)
        self._library.sum_one(self._place, one.data_ptr(), 0)
        self._until(lambda: self._place.group.done >= self._place.issued)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        assert tensor.is_contiguous()
        self._library.broadcast(self._place, tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
        self._until(lambda: self._place.group.done >= self._place.issued)

    def destroy(self) -> None:
        self._library.abort(self._place)

    def _until(self, done: Callable[[], bool]) -> None:
        with self._world.changed:
            self._world.changed.wait_for(lambda: done() or self._place.aborted)
        if self._place.aborted:
            raise NcclError("the group was aborted")


class SharedMemory:
    """Stands in for CUDA's handles of memory: `export` and `opened` of `slipstream.weight_sync.transports.gpu.ipc`."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.opened_times = 0

    def export(self, tensor: torch.Tensor, gpu: str) -> Handle:
        name = f"memory {len(self.tensors)}"
        self.tensors[name] = tensor
        return Handle(gpu, name, len(tensor), 0, "counter", 0, "event", False)

    def opened(self, handle: Handle, device: torch.device) -> torch.Tensor:
        self.opened_times += 1
        return self.tensors[handle.memory]

    def damage_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flip one bit of the next bucket that the learner fills."""
        tell = SharedBuckets.tell

        def damaging(shared: SharedBuckets, counter: int, count: int) -> None:
            if counter == FILLED:
                shared.place(count - 1)[0] ^= 1
            tell(shared, counter, count)

        monkeypatch.setattr(SharedBuckets, "tell", damaging)
