"""Encodes the difference between two buffers of one manifest, bit for bit, and applies it to the first.

The buffers are cut into pieces. For each piece that differs the payload holds which elements differ (the gap to the one
before, one byte each) and by how much: the step between the two bit patterns read as integers, in as few bytes as most
of them need. A gap or step that does not fit leaves a mark and follows in full after the others. Nothing is rounded:
NaN payloads and the sign of zero are bits like any other.

    piece:  header, int64 [FIELDS]: elements that differ, gaps in full, bytes of a step, steps in full
            gaps, uint8 [n]            (none where the header says that every element has a step)
            gaps in full, uint32
            steps, signed [n]
            steps in full, as wide as an element
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.weight_sync.weights.manifest import Manifest

Array = npt.NDArray[Any]

PIECE_BYTES = 4 * 1024**2
FIELDS = 4
GAP_IN_FULL = 255

# Stands in place of the number of gaps if the piece has a step for every element.
EVERY = -1

# Threads that encode. numpy lets the interpreter go meanwhile; the learner's own work needs most of the cores.
THREADS = min(4, os.cpu_count() or 1)


class DeltaError(RuntimeError):
    """A payload does not fit the buffer that it is applied to, or is damaged."""


@dataclass(frozen=True)
class Delta:
    """A difference.

    Attributes:
        payload: uint8 [bytes].
        changed: Number of elements that differ.
        elements: Number of all elements, without the padding between tensors.
    """

    payload: torch.Tensor
    changed: int
    elements: int

    @property
    def share(self) -> float:
        """Share of elements that differ, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class _Piece:
    """Bytes `start` to `end` of the buffer, in elements of `width` bytes."""

    start: int
    end: int
    width: int


def encode_delta(base: torch.Tensor, new: torch.Tensor, manifest: Manifest) -> Delta:
    """Encode the difference from `base` to `new`: each uint8 [manifest.total_bytes()], contiguous, on the host."""
    old_bytes, new_bytes = _bytes_of(base, manifest), _bytes_of(new, manifest)

    def encoded(piece: _Piece) -> tuple[list[Array], int]:
        return _encode_piece(*(_elements(flat, piece) for flat in (old_bytes, new_bytes)))

    parts: list[Array] = []
    changed = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for piece_parts, count in pool.map(encoded, _pieces(manifest)):
            parts += piece_parts
            changed += count
    payload = np.concatenate([part.view(np.uint8) for part in parts]) if parts else np.empty(0, np.uint8)
    return Delta(torch.from_numpy(payload), changed, manifest.elements())


def apply(payload: torch.Tensor, flat: torch.Tensor, manifest: Manifest) -> None:
    """Apply `payload` to `flat` in place. Compare a digest of the result: only that shows that `flat` was the base.

    Raises:
        DeltaError: It does not fit. `flat` may be half changed then.
    """
    target = _bytes_of(flat, manifest)
    reader = _Reader(payload.numpy())
    try:
        for piece in _pieces(manifest):
            _apply_piece(reader, _elements(target, piece))
    except (IndexError, ValueError) as error:
        raise DeltaError(f"the delta does not fit the weights that it is laid on: {error}") from error
    if reader.left:
        raise DeltaError(f"the delta has {reader.left} bytes more than the weights have use for")


def _pieces(manifest: Manifest) -> Iterator[_Piece]:
    for start, end, width in manifest.runs():
        for at in range(start, end, PIECE_BYTES):
            yield _Piece(at, min(at + PIECE_BYTES, end), width)


def _bytes_of(flat: torch.Tensor, manifest: Manifest) -> Array:
    if flat.dtype != torch.uint8 or flat.numel() != manifest.total_bytes():
        raise DeltaError(f"{flat.numel()} x {flat.dtype} where the manifest has {manifest.total_bytes()} bytes")
    return flat.numpy()


def _elements(flat: Array, piece: _Piece) -> Array:
    elements: Array = flat[piece.start : piece.end].view(f"u{piece.width}")
    return elements


def _encode_piece(old: Array, new: Array) -> tuple[list[Array], int]:
    """Return what the payload holds of a piece, and how many of its elements differ."""
    places = _differing(old, new)
    if len(places) == 0:
        return [np.zeros(FIELDS, np.int64)], 0
    gaps, gaps_in_full = _gaps(places)
    if gaps.nbytes + gaps_in_full.nbytes >= len(old) - len(places):
        # A step of zero for each of the others costs less than the gaps.
        gaps, gaps_in_full = gaps[:0], gaps_in_full[:0]
        steps = (new - old).view(f"i{old.itemsize}")
        header_gaps = EVERY
    else:
        steps = (new[places] - old[places]).view(f"i{old.itemsize}")
        header_gaps = len(gaps_in_full)
    narrow, steps_in_full = _narrow(steps)
    header = np.array([len(steps), header_gaps, narrow.itemsize, len(steps_in_full)], np.int64)
    return [header, gaps, gaps_in_full, narrow, steps_in_full], len(places)


def _differing(old: Array, new: Array) -> Array:
    """Find where two pieces differ: first which words of eight bytes do, then which elements of those."""
    words = len(old) * old.itemsize // 8
    per_word = 8 // old.itemsize
    head = words * per_word
    old_words, new_words = old[:head].view(np.uint64), new[:head].view(np.uint64)
    where = np.flatnonzero(old_words != new_words)
    if per_word > 1:
        pairs = old_words[where].view(old.dtype) != new_words[where].view(old.dtype)
        within = np.flatnonzero(pairs)
        where = where[within // per_word] * per_word + within % per_word
    tail = np.flatnonzero(old[head:] != new[head:])
    return np.concatenate([where, tail + head]) if len(tail) else where


def _gaps(places: Array) -> tuple[Array, Array]:
    """Return the distance of each place to the one before, less one, as uint8, and those too large as uint32."""
    gaps = np.diff(places, prepend=-1) - 1
    large = gaps >= GAP_IN_FULL
    return np.where(large, GAP_IN_FULL, gaps).astype(np.uint8), gaps[large].astype(np.uint32)


def _narrow(steps: Array) -> tuple[Array, Array]:
    """Return `steps` in the width that takes the fewest bytes in all, and those that do not fit into it."""
    best, best_bytes = steps.itemsize, steps.nbytes
    fitting = steps
    for width in (1, 2, 4):
        if width >= steps.itemsize:
            break
        most = 2 ** (8 * width - 1) - 1
        fits = (steps >= -most) & (steps <= most)
        outside = len(steps) - int(np.count_nonzero(fits))
        size = width * len(steps) + steps.itemsize * outside
        if size < best_bytes:
            best, best_bytes, fitting = width, size, fits
    if best == steps.itemsize:
        return steps, steps[:0]
    mark = -(2 ** (8 * best - 1))
    return np.where(fitting, steps, mark).astype(f"i{best}"), steps[~fitting]


class _Reader:
    """Takes arrays off a payload, in their order."""

    def __init__(self, payload: Array) -> None:
        self._payload = payload
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def take(self, dtype: str, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        if count < 0 or size > self.left:
            raise ValueError(f"it ends {size - self.left} bytes short")
        start, self._at = self._at, self._at + size
        # Copied, as the position in the payload may not suit the type.
        return np.frombuffer(self._payload[start : self._at].tobytes(), dtype)


def _apply_piece(reader: _Reader, target: Array) -> None:
    count, gaps_in_full, step_width, steps_in_full = (int(field) for field in reader.take("i8", FIELDS))
    if count == 0:
        return
    if step_width not in (1, 2, 4, 8) or step_width > target.itemsize:
        raise ValueError(f"steps of {step_width} bytes for elements of {target.itemsize}")
    every = gaps_in_full == EVERY
    if every and count != len(target):
        raise ValueError(f"{count} steps for {len(target)} elements")
    places = None if every else _places(reader.take("u1", count), reader.take("u4", gaps_in_full))
    steps = _widened(reader.take(f"i{step_width}", count), reader.take(f"i{target.itemsize}", steps_in_full))
    if places is None:
        target += steps.view(target.dtype)
    else:
        target[places] += steps.view(target.dtype)


def _places(gaps: Array, in_full: Array) -> Array:
    wide = gaps.astype(np.int64)
    wide[gaps == GAP_IN_FULL] = in_full
    return np.cumsum(wide + 1) - 1


def _widened(steps: Array, in_full: Array) -> Array:
    if steps.dtype == in_full.dtype:
        return steps
    wide = steps.astype(in_full.dtype)
    wide[steps == np.iinfo(steps.dtype).min] = in_full
    return wide
