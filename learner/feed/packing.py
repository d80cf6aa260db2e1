"""Sequences packed into rows of at most `token_budget` tokens: no padding, and what they share stands there once.

Packing must not change what is learnt: in a row every sequence attends to its own tokens only (`learner.feed.trie`),
and the loss is a sum over tokens with one normaliser for the step.

A step's rows, dealt to the ranks: about equal work for each, and the same number of rows. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithm.step_data import StepRollouts
from learner.feed import trie

PACKED_ATTENTION = "varlen_sdpa"

# Attending to this many tokens costs as much as a token's matrix products: 6 times the hidden size, in a model whose
# feed-forward layer is 3 times as wide. Here a size of 1,024; it only has to tell long paths from short ones.
ATTENDED_PER_TOKEN = 6144


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on.

    token_ids: int32 [T]; behaviour: float32 [T], log-probs under the policy that sampled; weights: float32 [T], 1 where
    a token trains, 0 for the first one and where not sampled; staleness: int32 [T], versions between sampling and
    training; fresh: bool [T], whether the version that trains sampled the token, and all of its turn before it;
    rollout: the number of its rollout in the step; group: a number that samples with a common prompt share; servers:
    int32 [T], which of the step's servers sampled each token, None where it does not matter.
    """

    token_ids: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    staleness: npt.NDArray[np.int32]
    fresh: npt.NDArray[np.bool_]
    rollout: int
    group: int = 0
    servers: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def forwarded(self) -> npt.NDArray[np.int32]:
        """The tokens that must be computed: the last one is predicted only, and what follows the last token with weight
        does not matter, as attention is causal."""
        return self.token_ids[: int(self.weights.nonzero()[0][-1])]


@dataclass(frozen=True)
class PackedRow:
    """Several sequences as a trie in depth-first order, and the tokens with weight in them.

    input_ids, position_ids: int64 [1, T]; starts: n + 1 places, where each of the trie's nodes begins, and T; reach: n
    places, where what descends from each ends; copies: int64 [T], how many of the sequences have the token; longest:
    tokens of the longest sequence; raw_tokens: T, if nothing were shared.

    positions, targets: int64 [U], the pairs to be scored, each once: index in the row of the token before, whose output
    predicts, and the id that is predicted. For each of the N tokens that train: scored, int64 [N], its pair; behaviour,
    float32 [N]; staleness, int32 [N]; fresh, bool [N]; rollout, int64 [N], the number of its rollout in the step;
    server, int32 [N], its place in the step's `StepRollouts.servers`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    starts: list[int]
    reach: list[int]
    copies: torch.Tensor
    longest: int
    raw_tokens: int
    positions: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor
    behaviour: torch.Tensor
    staleness: torch.Tensor
    fresh: torch.Tensor
    rollout: torch.Tensor
    server: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def cost(self) -> float:
        """Of its tokens, in tokens without attention; of a row on the host."""
        return self.tokens + float(self.position_ids.sum()) / ATTENDED_PER_TOKEN

    @property
    def is_padding(self) -> bool:
        """Whether it is there for the number of rows only (`padding_row`)."""
        return self.raw_tokens == 0

    def to(self, device: torch.device) -> Self:
        """On a GPU without waiting for it, if the row is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """In page-locked memory, from which a GPU copies by itself."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **changed)


def pack(samples: Sequence[Sample], token_budget: int, branches: bool = True, ranks: int = 1) -> list[PackedRow]:
    """Rows of at most `token_budget` tokens that hold every sample once; raises `ValueError` if one is longer.

    Samples of one group stand in one row, unless they need more than a row: then neighbours in the trie stand together.
    `branches` false: for attention that knows whole sequences only. `ranks`: who train them, with as many rows each if
    there are groups enough.
    """
    by_group = groupby(sorted(samples, key=_group), key=_group)
    units = [unit for _, group in by_group for unit in _units(list(group), token_budget, branches)]
    lengths = [unit.tokens for unit in units]
    bins = assign(lengths, token_budget)
    bins += [[] for _ in range(-len(bins) % ranks)]
    bins = [row for row in even(bins, lengths, [unit.cost for unit in units], token_budget) if row]
    return [pack_row([sample for i in members for sample in units[i].samples], branches) for members in bins]


def assign(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best-fit decreasing: indices of `lengths` by row, each row's longest first.

    Best fit rather than first fit, because it leaves large gaps whole; at most 11/9 of the fewest rows, plus one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > token_budget:
            raise ValueError(
                f"a sequence of {length} tokens does not fit learner.token_budget = {token_budget}: raise it to at "
                f"least {length}, or lower rollout.max_episode_tokens"
            )
        fitting = [(room[b], b) for b in range(len(bins)) if room[b] >= length]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[best].append(index)
        room[best] -= length
    return bins


def even(bins: list[list[int]], lengths: Sequence[int], costs: Sequence[float], token_budget: int) -> list[list[int]]:
    """As many rows as `bins`, of about equal cost: each unit, the dearest first, goes to the row that costs least so
    far and has room (Graham, 1969). Where the units do not fit in this way, `bins` as they are.

    Even rows need less memory than a full one beside one that is nearly empty, and ranks do not wait for one another.
    """
    rows: list[list[int]] = [[] for _ in bins]
    room, spent = [token_budget] * len(bins), [0.0] * len(bins)
    for index in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        fitting = [row for row in range(len(bins)) if room[row] >= lengths[index]]
        if not fitting:
            return bins
        cheapest = min(fitting, key=lambda row: spent[row])
        rows[cheapest].append(index)
        room[cheapest] -= lengths[index]
        spent[cheapest] += costs[index]
    return rows


def pack_row(samples: Sequence[Sample], branches: bool = True) -> PackedRow:
    """One row of `samples`."""
    paths = trie.build([sample.forwarded for sample in samples], branches)
    positions, targets, entries = [], [], []
    for index, places in zip(paths.order, paths.places, strict=True):
        sample = samples[index]
        (trained,) = sample.weights.nonzero()
        positions.append(places[trained - 1])
        targets.append(sample.token_ids[trained].astype(np.int64))
        entries.append(
            (
                sample.behaviour[trained],
                sample.staleness[trained],
                sample.fresh[trained],
                np.full(len(trained), sample.rollout, dtype=np.int64),
                np.zeros(len(trained), dtype=np.int32) if sample.servers is None else sample.servers[trained],
            )
        )
    pairs, scored = np.unique(np.concatenate(positions) << 32 | np.concatenate(targets), return_inverse=True)
    behaviour, staleness, fresh, rollout, server = (np.concatenate(column) for column in zip(*entries, strict=True))
    return PackedRow(
        input_ids=torch.from_numpy(paths.token_ids)[None],
        position_ids=torch.from_numpy(paths.depths)[None],
        starts=paths.starts.tolist(),
        reach=paths.reach.tolist(),
        copies=torch.from_numpy(np.bincount(np.concatenate(paths.places), minlength=paths.tokens)),
        longest=int(paths.depths.max()) + 1,
        raw_tokens=sum(len(places) for places in paths.places),
        positions=torch.from_numpy(pairs >> 32),
        targets=torch.from_numpy(pairs & 0xFFFFFFFF),
        scored=torch.from_numpy(scored),
        behaviour=torch.from_numpy(behaviour),
        staleness=torch.from_numpy(staleness),
        fresh=torch.from_numpy(fresh),
        rollout=torch.from_numpy(rollout),
        server=torch.from_numpy(server),
    )


def padding_row() -> PackedRow:
    """A row of one token, that trains nothing and counts for nothing."""
    ids, ones = np.zeros(2, dtype=np.int32), np.array([0.0, 1.0], dtype=np.float32)
    nothing = np.zeros(2, dtype=np.float32)
    row = pack_row([Sample(ids, nothing, ones, ids, ids.astype(np.bool_), rollout=0)])
    return replace(row, raw_tokens=0, copies=torch.zeros_like(row.copies))


@dataclass(frozen=True)
class _Unit:
    """Samples that stand in one row, the tokens that they need there, and what these cost, in tokens."""

    samples: list[Sample]
    tokens: int
    cost: float


def _group(sample: Sample) -> int:
    return sample.group


def _units(samples: Sequence[Sample], token_budget: int, branches: bool) -> Iterator[_Unit]:
    """A group's samples, cut between sorted neighbours where they need more than a row: each part repeats the path."""
    paths = [sample.forwarded for sample in samples]
    members: list[Sample] = []
    tokens, cost = 0, 0.0
    before = np.empty(0, dtype=np.int32)
    for index in trie.sorted_order(paths):
        added = len(paths[index]) - trie.shared(before, paths[index], branches)
        if members and tokens + added > token_budget:
            yield _Unit(members, tokens, cost)
            members, tokens, cost, added = [], 0, 0.0, len(paths[index])
        members.append(samples[index])
        tokens += added
        cost += _cost(added, len(paths[index]))
        before = paths[index]
    yield _Unit(members, tokens, cost)


def _cost(tokens: int, path: int) -> float:
    """Of the last `tokens` of a path, in tokens without attention."""
    return tokens * (1 + (path - tokens / 2) / ATTENDED_PER_TOKEN)


@dataclass(frozen=True)
class RankRows:
    """What one rank does of a step. rows: its own; rollouts: the whole step's; surveyed: whether all rows are scored
    before the first one trains."""

    rows: Sequence[PackedRow]
    rollouts: StepRollouts
    surveyed: bool

    def plain(self) -> dict[str, Any]:
        """As `wire` takes it."""
        return {
            "rows": [vars(row) for row in self.rows],
            "rollouts": vars(self.rollouts),
            "surveyed": self.surveyed,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> RankRows:
        rows = [PackedRow(**row) for row in plain["rows"]]
        return cls(rows, StepRollouts(**plain["rollouts"]), plain["surveyed"])


def deal(rows: Sequence[PackedRow], ranks: int) -> list[list[PackedRow]]:
    """Each rank's rows, rank 0's first: the dearest row goes to the rank with the least work that has room.

    All have as many, since each forward of a sharded policy takes all ranks: where rows do not suffice, a rank gets
    padding, which trains nothing.
    """
    most = -(-len(rows) // ranks)
    hands: list[list[PackedRow]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for row in sorted(rows, key=lambda row: -row.cost):
        rank = min((rank for rank in range(ranks) if len(hands[rank]) < most), key=lambda rank: spent[rank])
        hands[rank].append(row)
        spent[rank] += row.cost
    return [hand + [padding_row()] * (most - len(hand)) for hand in hands]
