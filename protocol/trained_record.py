"""The record of a run's trained groups: files in `run_dir/record/`, written by the queue and read by `slipstream
replay`.

A record is a folder of parts, `part-000001.groups` and so on; the oldest ones may have been deleted. A part begins with
`RECORD_MAGIC` and holds entries, one a group, in the order in which the learner acknowledged them: two little-endian
uint32 (bytes of the head, CRC-32 of head and payload), the head in msgpack, and the group's msgpack as submitted.

A kill cuts a part's last entry short; nothing is appended to that part afterwards. An entry is written before the
ledger is changed, so a step may stand there twice, or be of a time line that a resume gave up: the later entry counts,
and replaces what stands there of its step and of later ones. A batch that is not complete, by its heads, is left out,
and so is everything after damage: the damaged bytes may have held a resume.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from slipstream.protocol import codec
from slipstream.protocol.messages import Group

RECORD_FOLDER = "record"

RECORD_MAGIC = b"slipstream record 1\n"

_FRAME = struct.Struct("<II")

# Maximum bytes of a head, far above any that is written.
_MAX_HEAD = 64 * 1024


class RecordError(ValueError):
    """The file is no record, or is damaged; the text names file and place."""


class Head(msgspec.Struct, frozen=True):
    """Head of a group's entry.

    Attributes:
        step, version: Of the optimiser step that trained the group, or that failed with it for the reason `dropped`.
        lease: Id of the group's batch.
        arrival_version: The learner's version when the group was accepted.
        bytes: Size of the group that follows.
        groups: Number of groups of its batch in the record; None in records of earlier releases.
    """

    step: int
    version: int
    ticket_id: str
    lease: str
    arrival_version: int
    bytes: int
    dropped: str | None = None
    groups: int | None = None


@dataclass(frozen=True)
class RecordPosition:
    """The place of a group's bytes in a record."""

    file: Path
    offset: int
    head: Head

    def group(self) -> Group:
        """Read the group. Raises `RecordError`."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            try:
                return codec.decode(file.read(self.head.bytes), Group)
            except codec.DecodeError as error:
                raise RecordError(f"{self.file}: the group of ticket {self.head.ticket_id}: {error}") from error


@dataclass
class RecordedStep:
    """One optimiser step: the groups that it trained, in order, and the batches that failed before it, by lease."""

    step: int
    version: int
    trained: list[RecordPosition] = field(default_factory=list)
    left_out: dict[str, list[RecordPosition]] = field(default_factory=dict)


@dataclass
class Recorded:
    """The part of a record on the surviving time line. `warnings`: what is missing from it, and why."""

    steps: list[RecordedStep]
    warnings: list[str]


class _Damage(Exception):
    """A part is damaged from here on; the text names file and place."""


def write_entry(file: BinaryIO, head: Head, payload: bytes) -> int:
    """Append an entry. Returns its size in bytes. Raises `OSError`."""
    encoded = codec.encode(head)
    file.write(_FRAME.pack(len(encoded), zlib.crc32(payload, zlib.crc32(encoded))))
    file.write(encoded)
    file.write(payload)
    return _FRAME.size + len(encoded) + len(payload)


def record_parts(path: Path) -> list[Path]:
    """Return the parts of a record, oldest first. `path`: its folder, or one part."""
    return sorted(path.glob("part-*.groups"), key=part_number) if path.is_dir() else [path]


def record_part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.groups"


def part_number(path: Path) -> int:
    digits = path.stem.removeprefix("part-")
    return int(digits) if digits.isdecimal() else 0


def read_record(path: Path) -> Recorded:
    """Read a record's heads; payloads are left in their files.

    A step whose batch was left out, and which was never made, is the last one. Raises `RecordError` where nothing can
    be read.
    """
    found: dict[int, RecordedStep] = {}
    there = record_parts(path)
    for number, file in enumerate(there):
        try:
            for place in _entries(file):
                found = _with(found, place)
        except _Damage as damage:
            steps, missing = _whole(list(found.values()), damaged=True)
            if not steps:
                raise RecordError(f"{damage}{_remedy(there[number + 1 :])}") from damage
            last = f"what it holds up to step {steps[-1].step} can be replayed"
            return Recorded(steps, [*missing, f"{damage}; {last}{_remedy(there[number + 1 :])}"])
    steps, missing = _whole(list(found.values()), damaged=False)
    return Recorded(steps, missing)


def _with(found: dict[int, RecordedStep], place: RecordPosition) -> dict[int, RecordedStep]:
    """Return the steps known so far, with one more entry of the record."""
    head = place.head
    known = found.get(head.step)
    if known is None or known.version != head.version or head.ticket_id in _tickets(known):
        found = {step: of for step, of in found.items() if step < head.step}
        known = found[head.step] = RecordedStep(head.step, head.version)
    if head.dropped is None:
        known.trained.append(place)
    else:
        known.left_out.setdefault(head.lease, []).append(place)
    return found


def _whole(steps: list[RecordedStep], damaged: bool) -> tuple[list[RecordedStep], list[str]]:
    """Separate complete steps and batches from incomplete ones.

    Args:
        damaged: The record ends in damage, which may have held groups of the last step.

    Returns:
        The complete steps, and texts about the others.
    """
    warnings = []
    for of in steps:
        for lease, places in [*of.left_out.items()]:
            if why := _lacks(places, unknown=damaged and of is steps[-1] and not of.trained):
                warnings.append(f"step {of.step}: batch {lease}, which failed, is left out: {why}")
                del of.left_out[lease]
        if of.trained and (why := _lacks(of.trained, unknown=damaged and of is steps[-1])):
            warnings.append(f"step {of.step} is left out: {why}; a kill or a full disk cut the record short there")
            of.trained.clear()
    return [of for of in steps if of.trained or of.left_out], warnings


def _lacks(places: list[RecordPosition], unknown: bool) -> str | None:
    groups = places[0].head.groups
    if groups is None:
        return "nothing says whether all of its groups are there" if unknown else None
    return f"{len(places)} of its {groups} groups are there" if len(places) < groups else None


def _remedy(later: list[Path]) -> str:
    by_itself = f"; a later part can be replayed by itself, as RECORD: {later[0]}" if later else ""
    return f"; put an intact copy of that file there, if you have one{by_itself}"


def _tickets(step: RecordedStep) -> set[str]:
    return {place.head.ticket_id for places in (step.trained, *step.left_out.values()) for place in places}


def _entries(path: Path) -> Iterator[RecordPosition]:
    """Yield the entries of a part, up to one that a kill cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if (magic := file.read(len(RECORD_MAGIC))) != RECORD_MAGIC:
                if RECORD_MAGIC.startswith(magic):
                    return  # The queue was killed when it began the part.
                raise _Damage(f"{path}: not a record of groups, or one of another release of Slipstream")
            while len(frame := file.read(_FRAME.size)) == _FRAME.size:
                at = file.tell()
                length, checksum = _FRAME.unpack(frame)
                if length > _MAX_HEAD:
                    raise _Damage(f"{path}: damaged at byte {at}: its head would have {length} bytes")
                encoded = file.read(length)
                if len(encoded) < length:
                    return
                try:
                    head = codec.decode(encoded, Head)
                except codec.DecodeError as error:
                    raise _Damage(f"{path}: damaged at byte {at}: {error}") from error
                offset = file.tell()
                if offset + head.bytes > size:
                    return
                if zlib.crc32(file.read(head.bytes), zlib.crc32(encoded)) != checksum:
                    raise _Damage(f"{path}: damaged at byte {at}: the checksum of {head.ticket_id} does not fit")
                yield RecordPosition(path, offset, head)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
