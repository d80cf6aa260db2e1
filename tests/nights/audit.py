"""Says which rules a run broke that was hurt: by its files, once it has ended, and by what was measured before."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from slipstream.protocol.messages import Segment, VersionSpan
from slipstream.protocol.trained_record import RECORD_FOLDER, RecordError, read_record
from slipstream.rollout_queue.store.base import StoreReader
from slipstream.rollout_queue.store.sqlite import SqliteReader
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME

MAX_STALENESS = 4
SEGMENTS = 200
# How much a process may grow while it lives, next to its memory: handles, threads (each hung call keeps one). Less
# cannot be told from warming up.
GROWTH = {"handles": 100, "threads": 300}
# Parts of a life whose medians are compared, and how many of their scatter a steady growth is apart from none.
PARTS = 12
SURE = 4.0


@dataclass(frozen=True)
class Trend:
    """How a figure of one process grew while it lived, in units an hour: in its first and second half, and as a line
    through all of it. `error`: the standard error of `per_hour`."""

    per_hour: float
    error: float
    first_half: float
    second_half: float

    @property
    def leaks(self) -> bool:
        """Whether it grew steadily: more than chance does, and no less in its second half, as what warms up does."""
        return self.per_hour > SURE * self.error and self.second_half > 0.5 * self.first_half


def trend(looks: Sequence[tuple[float, float]]) -> Trend | None:
    """Find the trend of a series of (seconds, value); None if it is too short to have one."""
    if len(looks) < 2 * PARTS:
        return None
    parts = np.array_split(np.array(looks, dtype=float), PARTS)
    hours, values = np.array([np.median(part, axis=0) for part in parts]).T / np.array([[3600.0], [1.0]])
    (per_hour, _), covariance = np.polyfit(hours, values, 1, cov=True)
    halves = [
        float(np.polyfit(hours[half], values[half], 1)[0]) for half in (slice(PARTS // 2), slice(PARTS // 2, None))
    ]
    return Trend(float(per_hour), float(np.sqrt(covariance[0, 0])), *halves)


@dataclass
class Growth:
    """Measures the processes of a run from time to time.

    Args:
        memory: How many bytes a process may grow while it lives.
        warm_after_s: Seconds from its start that count for nothing: it loads a model.
    """

    memory: int
    warm_after_s: float = 60.0
    seen: dict[tuple[str, int], list[tuple[float, dict[str, int]]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def limits(self) -> dict[str, int]:
        return {"memory": self.memory, **GROWTH}

    def look(self, processes: Mapping[str, psutil.Process]) -> None:
        for name, process in processes.items():
            try:
                with process.oneshot():
                    found = {
                        "memory": process.memory_info().rss,
                        "handles": process.num_fds(),
                        "threads": process.num_threads(),
                    }
            except psutil.Error:
                continue
            self.seen[name, process.pid].append((time.monotonic(), found))

    def table(self) -> dict[str, dict[str, int]]:
        """By process, the most that one of its lives grew after it was warm."""
        most: dict[str, dict[str, int]] = {}
        for (name, _), looks in self.seen.items():
            warm = [found for at, found in looks if at - looks[0][0] >= self.warm_after_s]
            if len(warm) < 2:
                continue
            row = most.setdefault(name, dict.fromkeys(self.limits, 0))
            for what in self.limits:
                row[what] = max(row[what], warm[-1][what] - warm[0][what])
        return most

    def trends(self) -> dict[str, dict[str, Trend]]:
        """By process, the trends of its longest life after it was warm."""
        found: dict[str, dict[str, Trend]] = {}
        for (name, _), looks in sorted(self.seen.items(), key=lambda item: item[1][-1][0] - item[1][0][0]):
            warm = [(at, values) for at, values in looks if at - looks[0][0] >= self.warm_after_s]
            of = {what: trend([(at, values[what]) for at, values in warm]) for what in self.limits}
            if all(of.values()):
                found[name] = {what: each for what, each in of.items() if each is not None}
        return found

    def broken(self) -> Iterator[str]:
        for name, row in self.table().items():
            for what, limit in self.limits.items():
                if row[what] > limit:
                    yield f"{name} grew by {row[what]:,} {what}"


@dataclass
class Labels:
    """How the labels of a sample of trained tokens agree with the weights of their versions."""

    tokens: int = 0
    versions: int = 0
    mid_turn_swaps: int = 0
    worst: float = 0.0
    mean: float = 0.0


def of_files(folder: Path, steps: int, store: StoreReader | None = None) -> list[str]:
    """Which rules the files of a finished run break: I1, I2, and the steps' and versions' order. `store`: where its
    ledger is; in the folder by default."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return [f"the run left no whole metrics and summary: {error}"]
    rows = (store or SqliteReader(folder / FILE_NAME)).read_ledger()
    trained = [row.index for row in rows if row.trained]
    outcomes = Counter("trained" if row.trained else str(row.state) for row in rows)
    versions = [line["version"] for line in lines]
    rules = {
        f"steps are not 1..{steps}": [line["step"] for line in lines] == list(range(1, steps + 1)),
        "versions do not increase": versions == sorted(set(versions)),
        "a row was trained twice": len(trained) == len(set(trained)),
        f"a ticket has not ended: {dict(outcomes)}": set(outcomes) <= {"trained", "dropped", "reissued"},
        "a drop has no reason": all(row.reason for row in rows if row.state == "dropped"),
        "the ledger and the steps disagree": len(trained) == sum(line["groups_trained"] for line in lines),
        "the ledger and the summary disagree": len(trained) == summary["groups_trained"],
        f"a token was {summary['staleness_max']} versions old": summary["staleness_max"] <= MAX_STALENESS,
    }
    return [broken for broken, holds in rules.items() if not holds]


def rewards(folder: Path) -> tuple[float, float]:
    """The mean reward of the first and the last ten steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["reward"] for line in lines if line.get("reward") is not None]
    first, last = found[:10], found[-10:]
    return sum(first) / max(1, len(first)), sum(last) / max(1, len(last))


class Versions:
    """The weights of some versions, in one model.

    Args:
        kept: Folder of the versions' weights, VERSION.pt.
        model: Folder of version 0.
    """

    def __init__(self, kept: Path, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._first = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._files = {int(file.stem): file for file in kept.glob("*.pt")}
        self._read: dict[int, dict[str, torch.Tensor]] = {0: self._first}

    def __contains__(self, version: object) -> bool:
        return version == 0 or version in self._files

    def __call__(self, version: int) -> Any:
        if version not in self._read:
            self._read[version] = torch.load(self._files[version], mmap=True)
        self._model.load_state_dict(self._read[version], strict=False)
        return self._model


@torch.no_grad()
def labels(folder: Path, kept: Path, model: Path, seed: int = 0) -> Labels:
    """Recompute the log-probs of a sample of trained tokens with the weights of the versions that sampled them.

    Args:
        kept, model: See `Versions`.
    """
    torch.set_num_threads(1)  # the model is small, and on a busy machine threads wait for one another
    known = Versions(kept, model)
    try:
        record = read_record(folder / RECORD_FOLDER)
    except (OSError, RecordError):
        return Labels()
    places = [place for step in record.steps for place in step.trained]
    random.Random(seed).shuffle(places)
    found, versions, count, sum_off = Labels(), set(), 0, 0.0
    for place in places:
        for rollout in place.group().rollouts:
            for segment in rollout.segments:
                for turn in turns_of(segment):
                    if all(span.version in known for span in turn):
                        off = _off(known, segment, turn)
                        found.tokens += len(off)
                        found.worst = max(found.worst, float(off.max()))
                        sum_off += float(off.sum())
                        found.mid_turn_swaps += len(turn) - 1
                        versions |= {span.version for span in turn}
                count += 1
        if count >= SEGMENTS:
            break
    found.versions, found.mean = len(versions), sum_off / max(1, found.tokens)
    return found


def turns_of(segment: Segment) -> list[list[VersionSpan]]:
    """The spans of each turn: what was sampled without a gap."""
    turns: list[list[VersionSpan]] = []
    for span in segment.version_spans:
        if turns and turns[-1][-1].end == span.start:
            turns[-1].append(span)
        else:
            turns.append([span])
    return turns


def _off(known: Versions, segment: Segment, turn: list[VersionSpan]) -> torch.Tensor:
    """The differences of a turn's log-probs.

    Weights that are exchanged in a turn continue with the keys and values that are there; a request that was preempted
    since is computed again. Which of the two is not in the record: the nearer one counts, span by span.
    """
    ids = torch.tensor(segment.token_ids).long()[None]
    told = torch.tensor(segment.logprobs)
    past, found = DynamicCache(), []
    for number, span in enumerate(turn):
        model = known(span.version)
        begin = 0 if number == 0 else span.start - 1
        going_on = model(ids[:, begin : span.end - 1], past_key_values=past).logits[0, span.start - 1 - begin :]
        nearest = _differences(going_on, ids, told, span)
        if number:
            anew = model(ids[:, : span.end - 1]).logits[0, span.start - 1 :]
            other = _differences(anew, ids, told, span)
            nearest = other if float(other.max()) < float(nearest.max()) else nearest
        found.append(nearest)
    return torch.cat(found)


def _differences(logits: torch.Tensor, ids: torch.Tensor, told: torch.Tensor, span: VersionSpan) -> torch.Tensor:
    exact = logits.float().log_softmax(-1).gather(1, ids[0, span.start : span.end, None])[:, 0]
    return (exact - told[span.start : span.end]).abs()
