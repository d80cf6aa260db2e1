"""The ranks of one learner, as each of them sees the others.

Rank 0 tells the others through a store what to do next. They wait there for as long as it takes: no collective is open
while rank 0 waits for groups. A rank that is gone is noticed: the store and the collectives lose their connections, and
a rank that gives no sign of life is taken to be dead (`slipstream.learner.ranks.liveness`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed
from safetensors import SafetensorError

from slipstream.learner.ranks.liveness import RANK_TIMEOUT_S, Alarm, RankLost
from slipstream.learner.ranks.messages import decode_message, encode_message

# torch's annotations leave out stores and collectives.
dist: Any = torch.distributed

# How far a rank may be behind another in a collective.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# The wait for a command: rank 0 may wait for groups for learner.stall_timeout_s, a week at most. poll(2) takes 24 days
# at most.
FOR_EVER = timedelta(days=20)

END = "end"

OUT_OF_MEMORY = "out-of-memory"


class Parted(OSError):
    """The ranks can do nothing together any more: rank 0 left the others in the middle of something, or one of them is
    gone while the run is to end."""


class PartFailed(OSError):
    """A rank could not do its part of work with files; none of them has done it."""


class Guard(Protocol):
    """Holds signals back, as `slipstream.learner.ranks.stopping.Stop` does."""

    last: Callable[[], str | None]

    @property
    def asked(self) -> bool: ...

    @property
    def signalled(self) -> bool: ...

    @property
    def left_s(self) -> float: ...

    def hold(self, max_hold_s: float) -> None: ...

    def release(self) -> None: ...


class Command(msgspec.Struct):
    """The next call of all ranks, by its name; the details follow by `Team.spread` and `Team.deal`."""

    name: str


class Team:
    """The ranks of a learner. Without a store there is one rank only, and nothing is sent.

    Args:
        timeout_s: `learner.rank_timeout_s`.

    Attributes:
        sharded: Whether each rank holds a part of the weights.
        alarm: Notices ranks that are gone; None with one rank.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        store: Any = None,
        sharded: bool = False,
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.count = count
        self.sharded = sharded and count > 1
        self._store = store and dist.PrefixStore("slipstream", store)
        self.alarm = Alarm(rank, count, self._store.clone(), timeout_s) if store is not None else None
        self._turn = 0
        self._parted = False
        self._names: tuple[list[str], list[str]] | None = None
        self._guard: Guard | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def guard(self, guard: Guard) -> None:
        """Make signals wait until work that all ranks do together is done, where ranks hold parts of the weights.
        Where each has all of them, rank 0 can continue alone."""
        self._guard = guard
        if self.alarm is not None:
            self.alarm.signalled = lambda: guard.asked
            guard.last = self.alarm.last

    def connect_store(self) -> Any:
        """Open another connection to the ranks' store, for a thread that waits there."""
        return self._store.clone()

    def on_lost(self, heard: Callable[[RankLost], None]) -> None:
        """Call `heard`, on a thread, with what is known of a rank that is gone."""
        if self.alarm is not None:
            self.alarm.on_lost = heard

    def on_silent(self, heard: Callable[[str | None], None]) -> None:
        """Call `heard`, on a thread, with the names of ranks that give no sign of life, and with None when all do
        again."""
        if self.alarm is not None:
            self.alarm.on_silent = heard

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wrap work of rank 0's main thread with the others. Raises `RankLost` if it fails because one of them is
        gone."""
        if self.alarm is None or not self.leads:
            yield
            return
        self.alarm.waits()
        try:
            if self.alarm.why is not None:
                raise self._lost(self.alarm.why)
            yield
        except RuntimeError as error:
            broke = type(error) is RuntimeError or isinstance(error, dist.DistError)
            if broke and (why := self.alarm.cause() or _broken(error)):
                raise self._lost(why) from error
            raise
        finally:
            self.alarm.is_free()

    def _lost(self, why: str) -> RankLost | Parted:
        # After a signal the run ends because of the signal; only a checkpoint that needs this rank cannot be written.
        return Parted(why) if self._guard is not None and self._guard.signalled else RankLost(why)

    @contextmanager
    def together(self, name: str, change: bool = False) -> Iterator[None]:
        """Tell the other ranks to do the same work as rank 0 inside the `with`.

        Args:
            name: Of the command.
            change: Whether the caller itself calls `release` of the guard.

        Raises:
            RankLost: A rank is gone.
            Parted: Rank 0 left an earlier command half-way.
        """
        if self.count == 1 or not self.leads:
            yield
            return
        if self._parted:
            raise Parted(f"the other {self.count - 1} ranks were left half-way through a step")
        # After a signal, it must not hold back the work that is left.
        guard = self._guard if self.sharded and self._guard is not None and not self._guard.signalled else None
        if guard is not None:
            guard.hold(guard.left_s / 2)
        try:
            with self.waiting():
                self._tell(name)
                yield
        except Exception:
            if guard is not None:
                guard.release()
            raise
        except BaseException:  # a signal
            self._parted = True
            raise
        if guard is not None and not change:
            guard.release()

    def end(self) -> None:
        """Tell the other ranks that there is nothing left to do."""
        if self.alarm is not None:
            with suppress(RuntimeError):  # the store's machine is gone
                self._tell(END)

    def close(self) -> None:
        """Stop watching the other ranks."""
        if self.alarm is not None:
            self.alarm.end()

    def next_command(self) -> Command:
        """Wait for the next command, on any rank but 0. Raises `RankLost` if rank 0 is gone."""
        key = f"command/{self._turn}"
        self._turn += 1
        try:
            self._store.wait([key], FOR_EVER)
            command = msgspec.json.decode(self._store.get(key), type=Command)
        except RuntimeError as error:
            raise RankLost(f"rank 0 has gone ({str(error).partition(chr(10))[0]})") from error
        if command.name == END:
            self.close()
        return command

    def spread(self, value: Any = None) -> Any:
        """Return rank 0's value on all ranks."""
        if self.count == 1:
            return value
        data = encode_message(value) if self.leads else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.leads else _bytes(int(size))
        dist.broadcast(buffer, 0)
        return value if self.leads else decode_message(buffer.numpy().data)

    def deal(self, values: Sequence[Any] | None = None) -> Any:
        """Give each rank its value, on rank 0, and return the first; on the others, return theirs."""
        if values is None:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, 0)
            buffer = _bytes(int(size))
            dist.recv(buffer, 0)
            return decode_message(buffer.numpy().data)
        for rank, value in enumerate(values[1:], start=1):
            data = encode_message(value)
            dist.send(torch.tensor([len(data)]), rank)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)
        return values[0]

    def agree(self, yes: bool) -> bool:
        """Say whether all ranks say yes."""
        answers = torch.tensor([int(yes)])
        if self.count > 1:
            dist.all_reduce(answers, op=dist.ReduceOp.MIN)
        return bool(answers)

    @contextmanager
    def failing_as_one(self) -> Iterator[None]:
        """Wrap work with files that all ranks do. Raises `PartFailed` on all of them if one cannot read or write; what
        they exchange inside, that one must exchange to the end."""
        failed = b""
        try:
            yield
        except (OSError, SafetensorError) as error:
            failed = f"rank {self.rank}: {error}".encode()
        if said := bytes(self.joined(torch.tensor(list(failed), dtype=torch.uint8)).tolist()).decode():
            raise PartFailed(said)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the ranks' tensors [N], each of its own length, end to end in the order of the ranks."""
        if self.count == 1:
            return tensor
        lengths = torch.zeros(self.count, dtype=torch.int64, device=tensor.device)
        lengths[self.rank] = len(tensor)
        sizes = [int(length) for length in self.add_up(lengths)]
        padded = tensor.new_zeros(max(1, *sizes))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduced(
        self, sums: Mapping[str, torch.Tensor], peaks: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Combine named scalars of all ranks: sums are added up, of peaks the greatest counts.

        The names are those of rank 0, the same in each step: a rank whose rows are all padding has none of its own. A
        value that is not a number becomes an infinite peak, as it has no order.
        """
        if self.count == 1:
            return dict(sums), dict(peaks)
        if self._names is None:
            self._names = self.spread((list(sums), list(peaks)))
        of_sums, of_peaks = self._names
        zero = torch.zeros((), dtype=torch.float64, device=device)
        added = torch.stack([sums.get(name, zero).double() for name in of_sums])
        highest = torch.stack([peaks.get(name, zero - torch.inf).double() for name in of_peaks])
        dist.all_reduce(added)
        dist.all_reduce(highest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), op=dist.ReduceOp.MAX)
        return dict(zip(of_sums, added.cpu(), strict=True)), dict(zip(of_peaks, highest.cpu(), strict=True))

    def tell_out_of_memory(self, what: str) -> None:
        """Tell rank 0, before this rank ends, why: rank 0 would see only that it is gone."""
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            self._store.set(OUT_OF_MEMORY, f"rank {self.rank}: {what}")

    def out_of_memory(self) -> str | None:
        """Return the message of a rank that ran out of memory; None if none did. For rank 0."""
        try:
            if self.count > 1 and self._store.check([OUT_OF_MEMORY]):
                return str(self._store.get(OUT_OF_MEMORY).decode())
        except RuntimeError:  # the store's machine is gone
            pass
        return None

    def _tell(self, name: str) -> None:
        if self._turn > 1:  # all ranks have read the command before the last one
            self._store.delete_key(f"command/{self._turn - 2}")
        self._store.set(f"command/{self._turn}", msgspec.json.encode(Command(name)).decode())
        self._turn += 1


def _broken(error: RuntimeError) -> str | None:
    """Say that the connection to a rank broke, whose end nobody here has seen: it is on another machine."""
    first = str(error).partition("\n")[0]
    found = re.search(r"Connection (closed|reset) by peer|Socket closed|Broken pipe|remote process exited", first)
    return f"the connection to another rank broke ({first})" if found else None


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)
