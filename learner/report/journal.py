"""What is kept of each step and each publication: two files of JSON lines in the run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec


class StepRecord(msgspec.Struct):
    """One line of `metrics.jsonl`.

    Rewards are over every group that arrived for the step. loss to entropy: over the tokens that trained; ess:
    effective sample size of the importance ratios, 0 to 1. Staleness in versions: of the tokens that trained;
    `_in_flight` and `_in_queue` split it, by each arrived group's oldest token. tokens_sampled: of every arrived
    group = tokens_trained + those masked + those of dropped groups. step_s: from one acknowledgement to the next, of
    which wait_s for groups, train_s in the optimiser step, publish_blocked_ms for the version before to be on its way.
    cpu_s: of the whole process. packing_fill: tokens of the rows by rows times budget.
    """

    step: int
    version: int
    reward_mean: float
    reward_std: float
    loss: float
    ratio: float
    clipped_low: float
    clipped_high: float
    kl: float
    entropy: float
    ess: float
    grad_norm: float
    learning_rate: float
    staleness_mean: float
    staleness_max: int
    staleness_in_flight: float
    staleness_in_queue: float
    groups_trained: int
    groups_dropped: dict[str, int]
    tokens_sampled: int
    tokens_trained: int
    tokens_masked: dict[str, int]
    tokens_dropped: dict[str, int]
    rollouts: int
    two_span_rollouts: int
    rows: int
    packing_fill: float
    wait_s: float
    train_s: float
    step_s: float
    cpu_s: float
    publish_blocked_ms: float


class PublicationRecord(msgspec.Struct):
    """One line of `publications.jsonl`: `weight_sync.publisher.PublishRecord`, and the step that made the version."""

    step: int
    version: int
    snapshot_s: float
    blocked_s: float
    transfer_s: float
    pause_s: float
    probe_max_abs_diff: float
    servers_ok: list[str]
    servers_failed: dict[str, str]


class _Record(Protocol):
    step: int


R = TypeVar("R", bound=_Record)


class Journal(Generic[R]):
    """A file of JSON lines on one time line: opened at step c, it forgets what was written after c."""

    def __init__(self, path: Path, kind: type[R], step: int) -> None:
        self.records = [record for record in _read(path, kind) if record.step <= step]
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".unfinished")
        aside.write_bytes(b"".join(_line(record) for record in self.records))
        os.replace(aside, path)

    def append(self, record: R) -> None:
        self.records.append(record)
        with self._path.open("ab") as file:
            file.write(_line(record))


def _line(record: object) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def _read(path: Path, kind: type[R]) -> list[R]:
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError:
            break  # the line that a kill cut short; nothing follows it
    return records
