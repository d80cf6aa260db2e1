"""Writes the record of what a run trains, for `slipstream replay`; its format is in `protocol.trained_record`.

A group is written before the ledger says that it was trained, so that none is missing after a kill. Payloads go from
the store to the file one at a time. A record that cannot be written, as on a full disk, ends, and not the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from protocol import reasons, trained_record
from protocol.trained_record import Head
from rollout_queue.ledger.records import RunState, TicketRecord, TicketState

# Batches that the learner tried and left out: what a bug report is about.
LEFT_OUT = frozenset({reasons.STEP_NOT_FINITE, reasons.OUT_OF_MEMORY})

# The whole record's bytes are those of so many parts: the oldest is deleted when a new one is begun.
_PARTS = 8


def heads(lease: str, ended: Sequence[TicketRecord], run: RunState) -> list[Head]:
    """What an acknowledgement records: groups that were trained, in the order of its batch, or tried and left out.

    `ended`: the records that it changes, as they will be; `run`: the run before it. Pure.
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
    # Of one lease, those that were trained are a batch, and those that were left out are one.
    sizes = Counter(head.dropped is None for head in found)
    return [msgspec.structs.replace(head, groups=sizes[head.dropped is None]) for head in found]


class Recorder:
    """Appends to the record in `folder`, at most `max_bytes` of it. Its calls block; make them from one thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = max(1, max_bytes // _PARTS)
        self._file: BinaryIO | None = None
        self._written = 0
        self._ended = False

    def append(self, heads: Sequence[Head], payload: Callable[[str], bytes | None]) -> str | None:
        """Write these groups; `payload` gives the bytes of a ticket's. Returns why the record ends here, if it does."""
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
                return  # what could not be written was told

    def _part(self) -> BinaryIO:
        """The part to append to: a new one at the start, and where a part is full."""
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
        """Leave room for a part: those of earlier starts may be small, so bytes count."""
        sizes = [path.stat().st_size for path in there]
        total = sum(sizes)
        for path, size in zip(there, sizes, strict=True):
            if total <= (_PARTS - 1) * self._part_bytes:
                return
            path.unlink()
            total -= size


def _write(file: BinaryIO, head: Head, data: bytes | None) -> int:
    """In a function of its own, whose end lets go of the bytes before the next ones are read."""
    return 0 if data is None else trained_record.write_entry(file, head, data)
