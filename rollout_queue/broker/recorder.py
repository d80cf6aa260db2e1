"""Writes the record of the groups that a run trains, for `slipstream replay`. Its format: `protocol.trained_record`.

A group is written before the ledger says that it was trained, so that none is missing after a kill. If the record
cannot be written, as on a full disk, the record ends and the run continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from slipstream.protocol import reasons, trained_record
from slipstream.protocol.trained_record import Head
from slipstream.rollout_queue.ledger.records import RunState, TicketRecord, TicketState

# Batches that the learner tried and left out: a bug report needs them.
LEFT_OUT = frozenset({reasons.STEP_NOT_FINITE, reasons.OUT_OF_MEMORY})

# The record is kept in this many parts at most: the oldest is deleted before a new one is begun.
_PARTS = 8


def heads(lease: str, ended: Sequence[TicketRecord], run: RunState) -> list[Head]:
    """Return the entries that an acknowledgement adds: groups that were trained, or tried and left out. Pure.

    Args:
        lease: Id of the lease.
        ended: Records that the acknowledgement changes, as they will be, in the order of its batch.
        run: The run before it.
    """
    found = []
    for of in ended:
        if of.state is TicketState.TRAINED and of.step is not None and of.trained_version is not None:
            step, version, dropped = of.step, of.trained_version, None
        elif of.state is TicketState.DROPPED and of.reason in LEFT_OUT:
            step, version, dropped = run.step + 1, run.version + 1, of.reason
        else:
            continue
        found.append(Head(step, version, of.id, lease, of.arrival_version, of.group.bytes, dropped))
    # The trained groups of one lease are a batch, and so are those that were left out.
    sizes = Counter(head.dropped is None for head in found)
    return [msgspec.structs.replace(head, groups=sizes[head.dropped is None]) for head in found]


class Recorder:
    """Appends to the record in `folder`, which keeps at most `max_bytes`. Calls block: make them from one thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = max(1, max_bytes // _PARTS)
        self._file: BinaryIO | None = None
        self._written = 0
        self._ended = False

    def append(self, heads: Sequence[Head], payload: Callable[[str], bytes | None]) -> str | None:
        """Write groups.

        Args:
            payload: Reads the bytes of a ticket's group, so that only one is in memory at a time.

        Returns:
            Why the record ends here; None while it continues.
        """
        if self._ended:
            return None
        try:
            file = self._part()
            for head in heads:
                self._written += _write(file, head, payload(head.ticket_id))
            file.flush()
        except OSError as error:
            self._ended = True
            self.close()
            return (
                f"the record of what is trained ends before step {heads[0].step}: {self._folder} cannot be written: "
                f"{error.strerror or error}; make room and start the queue again, or set queue.record = false"
            )
        return None

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                return  # `append` has reported what could not be written

    def _part(self) -> BinaryIO:
        """Return the file to append to: a new part at the start and whenever one is full."""
        if self._file is not None and self._written < self._part_bytes:
            return self._file
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        there = trained_record.record_parts(self._folder)
        self._drop_oldest(there)
        path = trained_record.record_part(self._folder, 1 + max(map(trained_record.part_number, there), default=0))
        self._file = path.open("xb")
        self._written = self._file.write(trained_record.RECORD_MAGIC)
        return self._file

    def _drop_oldest(self, there: Sequence[Path]) -> None:
        """Delete the oldest parts until there is room for one more. Bytes count, since parts may be small."""
        sizes = [path.stat().st_size for path in there]
        total = sum(sizes)
        for path, size in zip(there, sizes, strict=True):
            if total <= (_PARTS - 1) * self._part_bytes:
                return
            path.unlink()
            total -= size


def _write(file: BinaryIO, head: Head, data: bytes | None) -> int:
    """Write one entry. Its own function, so that its bytes are freed before the next ones are read."""
    return 0 if data is None else trained_record.write_entry(file, head, data)
