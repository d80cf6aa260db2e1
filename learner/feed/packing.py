"""Packs sequences into rows of at most `token_budget` tokens, without padding, and deals the rows to the ranks.

Packing must not change what is learnt. Tokens that sequences share stand in a row once, but each sequence attends to
its own tokens only (`learner.feed.trie`), and the loss is a sum over tokens with one normaliser for the step. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.learner.feed import trie
from slipstream.learner.feed.images import RowImage
from slipstream.protocol.messages import Segment

PACKED_ATTENTION = "varlen_sdpa"

# Attending to this many tokens costs as much as a token's matrix products: 6 times the hidden size in a model whose
# feed-forward layer is 3 times as wide, here 1,024. It only has to tell long paths from short ones.
ATTENDED_PER_TOKEN = 6144


@dataclass(frozen=True)
class SampledFrom:
    """The ids that each of T tokens was sampled from (`slipstream.protocol.messages.SamplingMask`).

    Attributes:
        ids: int32 [M], by token.
        counts: int64 [T], how many of them each token has; 0 for one that was not sampled.
    """

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, segment: Segment) -> Self | None:
        mask = segment.sampling_mask
        if mask is None:
            return None
        counts = np.zeros(len(segment.token_ids), dtype=np.int64)
        counts[segment.loss_mask] = mask.counts
        return cls(mask.ids, counts)

    def at(self, tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the ids of some tokens, and how many each of them has."""
        counts = self.counts[tokens]
        first = (np.cumsum(self.counts) - self.counts)[tokens]
        begins = np.cumsum(counts) - counts
        return self.ids[np.arange(counts.sum()) + np.repeat(first - begins, counts)].astype(np.int64), counts


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on.

    Attributes:
        token_ids: int32 [T].
        behaviour: float32 [T], log-probs under the policy that sampled.
        weights: float32 [T], 1 where a token trains; 0 for the first token and where it was not sampled.
        staleness: int32 [T], versions between sampling and training.
        fresh: bool [T], whether the version that trains sampled the token, and all of its turn before it.
        rollout: Number of its rollout in the step.
        group: A number that samples with a common prompt share.
        servers: int32 [T], which of the step's servers sampled each token; None where it does not matter.
        experts: int16 [T, layers, top_k], those that its server chose in each layer that is a mixture, -1 where they
            are not known; None if they are for no token.
        images: By number; in `token_ids`, -1 - k stands for each token of image k.
        mask: Ids that each token was sampled from; None if all could be sampled.
        teacher: float32 [T], log-probs under the teacher where a token was sampled; None without a teacher.
        teacher_ids: int64 [T, k], likeliest ids of the teacher in each place, and `teacher_top`: float32 [T, k], their
            log-probs; None without `teacher.top_k`.
        turns: int64 [T], number of each token's turn in the step; None where advantages are of whole rollouts.
    """

    token_ids: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    staleness: npt.NDArray[np.int32]
    fresh: npt.NDArray[np.bool_]
    rollout: int
    group: int = 0
    servers: npt.NDArray[np.int32] | None = None
    experts: npt.NDArray[np.int16] | None = None
    images: Mapping[int, RowImage] = field(default_factory=dict)
    mask: SampledFrom | None = None
    teacher: npt.NDArray[np.float32] | None = None
    teacher_ids: npt.NDArray[np.int64] | None = None
    teacher_top: npt.NDArray[np.float32] | None = None
    turns: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def forwarded(self) -> npt.NDArray[np.int32]:
        """The tokens that must be computed, int32. The last token is only predicted, and tokens after the last one with
        weight do not matter, as attention is causal."""
        return self.token_ids[: int(self.weights.nonzero()[0][-1])]


@dataclass(frozen=True)
class PackedRow:
    """Several sequences as a trie in depth-first order, and the tokens with weight in them.

    The pairs to be scored, U of them, are those of a token and the token before it, each once; with sampling masks each
    token's own. N tokens train.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T].
        starts: n + 1 indices: where each of the trie's n nodes begins, and T.
        reach: n indices: where the descendants of each node end.
        copies: int64 [T], how many of the sequences have the token.
        longest: Tokens of the longest sequence.
        raw_tokens: T if nothing were shared.
        positions: int64 [U], index in the row of the token before, whose output predicts.
        targets: int64 [U], the predicted id.
        scored: int64 [N], the pair of each token that trains.
        behaviour: float32 [N], as in `Sample`.
        staleness: int32 [N], as in `Sample`.
        fresh: bool [N], as in `Sample`.
        rollout: int64 [N], number of its rollout in the step.
        server: int32 [N], its index in the step's `StepRollouts.servers`.
        experts: int16 [T, layers, top_k], as in `Sample`; of a token that sequences share, the first known ones.
        images: By number; in `input_ids`, -1 - k stands for each token of image k.
        teacher: float32 [N], as in `Sample`; None without a teacher.
        teacher_ids: int64 [U, k], as in `Sample`; `teacher_top`: float32 [N, k], likewise.
        mask_pairs, mask_ids: int64 [M], pair and id of everything that could be sampled in a pair's place; None if all
            could be in every place.
        turn: int64 [N], number of its turn in the step; None where advantages are of whole rollouts.
        supervised: Of a row of demonstrations, the weight of each of its tokens' -log p in the step's loss; None for
            rollouts.
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
    experts: torch.Tensor | None = None
    images: dict[int, RowImage] = field(default_factory=dict)
    teacher: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    mask_pairs: torch.Tensor | None = None
    mask_ids: torch.Tensor | None = None
    turn: torch.Tensor | None = None
    supervised: float | None = None

    @property
    def credited(self) -> torch.Tensor:
        """What each token shares its advantage with, int64 [N]: the number of its turn, or of its rollout."""
        return self.rollout if self.turn is None else self.turn

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def cost(self) -> float:
        """Cost of its tokens, in tokens without attention. The row must be on the host."""
        return self.tokens + float(self.position_ids.sum()) / ATTENDED_PER_TOKEN

    @property
    def is_padding(self) -> bool:
        """Whether the row has no sample and only fills up a rank's share (`padding_row`)."""
        return self.raw_tokens == 0

    def to(self, device: torch.device) -> Self:
        """Copy the row to a device. If the row is pinned, nothing waits for the copy."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """Copy the row to page-locked memory, from which a GPU copies by itself."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        images = {
            number: RowImage(image.tokens, {name: change(value) for name, value in image.inputs.items()})
            for number, image in self.images.items()
        }
        return replace(self, **changed_tensors(self, change), images=images)


def changed_tensors(of: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the changed tensors among the fields of a dataclass, by name."""
    return {name: change(value) for name, value in vars(of).items() if isinstance(value, torch.Tensor)}


def pack(samples: Sequence[Sample], token_budget: int, branches: bool = True, ranks: int = 1) -> list[PackedRow]:
    """Pack samples into rows.

    Samples of one group stand in one row. If they need more than a row, neighbours in the trie stand together.

    Args:
        token_budget: Maximum number of tokens of a row.
        branches: False for attention that knows whole sequences only.
        ranks: Ranks that share the rows; each gets as many, if there are groups enough.

    Returns:
        Rows that hold every sample once.

    Raises:
        ValueError: A sample is longer than `token_budget`.
    """
    by_group = groupby(sorted(samples, key=attrgetter("group")), key=attrgetter("group"))
    units = [unit for _, group in by_group for unit in _units(list(group), token_budget, branches)]
    lengths = [unit.tokens for unit in units]
    bins = assign(lengths, token_budget)
    bins += [[] for _ in range(-len(bins) % ranks)]
    bins = [row for row in even(bins, lengths, [unit.cost for unit in units], token_budget) if row]
    return [pack_row([sample for i in members for sample in units[i].samples], branches) for members in bins]


@dataclass(frozen=True)
class _Unit:
    """Samples that stand in one row.

    Attributes:
        tokens: Number of tokens that they take in the row.
        cost: In tokens without attention.
    """

    samples: list[Sample]
    tokens: int
    cost: float


def _units(samples: Sequence[Sample], token_budget: int, branches: bool) -> Iterator[_Unit]:
    """Cut a group's samples between sorted neighbours where they need more than a row; each part repeats the path."""
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
    """Return the cost of the last `tokens` of a path, in tokens without attention."""
    return tokens * (1 + (path - tokens / 2) / ATTENDED_PER_TOKEN)


def assign(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Assign lengths to rows by best-fit decreasing.

    Best fit rather than first fit, because it keeps large gaps whole; at most 11/9 of the fewest rows, plus one.

    Returns:
        Indices of `lengths` by row, each row's longest first.
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
    """Even the rows out: as many rows as `bins`, of about equal cost.

    The unit of highest cost goes first, to the row that costs least so far and has room (Graham, 1969). Even rows need
    less memory than a full one next to one that is nearly empty, and ranks do not wait for each other.

    Returns:
        Indices by row; `bins` as they are where the units do not fit in this way.
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
    """Make one row of samples."""
    paths = trie.build([sample.forwarded for sample in samples], branches)
    positions, targets, entries, teacher, top = [], [], [], [], []
    for index, places in zip(paths.order, paths.places, strict=True):
        sample = samples[index]
        (trained,) = sample.weights.nonzero()
        positions.append(places[trained - 1])
        targets.append(sample.token_ids[trained].astype(np.int64))
        if sample.teacher is not None:
            teacher.append(sample.teacher[trained])
        if sample.teacher_ids is not None and sample.teacher_top is not None:
            top.append((sample.teacher_ids[trained], sample.teacher_top[trained]))
        entries.append(
            (
                sample.behaviour[trained],
                sample.staleness[trained],
                sample.fresh[trained],
                np.full(len(trained), sample.rollout, dtype=np.int64),
                np.zeros(len(trained), dtype=np.int32) if sample.servers is None else sample.servers[trained],
            )
        )
    pairs = np.concatenate(positions) << 32 | np.concatenate(targets)
    masks = _masks([samples[index] for index in paths.order])
    first = scored = np.arange(len(pairs))
    if masks is None and not top:  # both belong to one token of one sequence
        pairs, first, scored = np.unique(pairs, return_index=True, return_inverse=True)
    teacher_ids, teacher_top = (np.concatenate(column) for column in zip(*top, strict=True)) if top else (None, None)
    behaviour, staleness, fresh, rollout, server = (np.concatenate(column) for column in zip(*entries, strict=True))
    turns = [sample.turns[sample.weights.nonzero()] for i in paths.order if (sample := samples[i]).turns is not None]
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
        experts=_experts(samples, paths),
        images={number: image for sample in samples for number, image in sample.images.items()},
        teacher=torch.from_numpy(np.concatenate(teacher)) if teacher else None,
        teacher_ids=None if teacher_ids is None else torch.from_numpy(teacher_ids[first]),
        teacher_top=None if teacher_top is None else torch.from_numpy(teacher_top),
        mask_pairs=None if masks is None else torch.from_numpy(masks[0]),
        mask_ids=None if masks is None else torch.from_numpy(masks[1]),
        turn=torch.from_numpy(np.concatenate(turns)) if turns else None,
    )


def _masks(samples: Sequence[Sample]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Return a row's `mask_pairs` and `mask_ids`; the pairs are the tokens that train, in the order of `samples`. A
    sample without a mask has no entry."""
    if all(sample.mask is None for sample in samples):
        return None
    begin, pairs, ids = 0, [], []
    for sample in samples:
        (trained,) = sample.weights.nonzero()
        if sample.mask is not None:
            left, counts = sample.mask.at(trained)
            pairs.append(np.repeat(np.arange(begin, begin + len(trained)), counts))
            ids.append(left)
        begin += len(trained)
    return np.concatenate(pairs), np.concatenate(ids)


def _experts(samples: Sequence[Sample], paths: trie.Trie) -> torch.Tensor | None:
    """Return the experts of a row's tokens, int16 [T, layers, top_k]; None if they are known for none."""
    known = next((sample.experts for sample in samples if sample.experts is not None), None)
    if known is None:
        return None
    found = np.full((paths.tokens, *known.shape[1:]), -1, dtype=np.int16)
    for index, places in zip(paths.order, paths.places, strict=True):
        experts = samples[index].experts
        if experts is not None:
            missing = found[places, 0, 0] < 0
            found[places[missing]] = experts[: len(places)][missing]
    return torch.from_numpy(found)


def padding_row() -> PackedRow:
    """Make a row of one token that trains nothing and counts for nothing."""
    ids, ones = np.zeros(2, dtype=np.int32), np.array([0.0, 1.0], dtype=np.float32)
    nothing = np.zeros(2, dtype=np.float32)
    row = pack_row([Sample(ids, nothing, ones, ids, ids.astype(np.bool_), rollout=0)])
    return replace(row, raw_tokens=0, copies=torch.zeros_like(row.copies))


@dataclass(frozen=True)
class RankRows:
    """One rank's part of a step.

    Attributes:
        rows: The rank's own.
        rollouts: The whole step's.
        surveyed: Whether all rows are scored before the first one trains.
    """

    rows: Sequence[PackedRow]
    rollouts: StepRollouts
    surveyed: bool

    def plain(self) -> dict[str, Any]:
        """Return it as plain values and tensors, which the ranks send each other."""
        turns = self.rollouts.turns
        return {
            "rows": [vars(row) for row in self.rows],
            "rollouts": {**vars(self.rollouts), "turns": None if turns is None else vars(turns)},
            "surveyed": self.surveyed,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> RankRows:
        """Read what `plain` returned."""
        rows = [
            PackedRow(**{**row, "images": {number: RowImage(*image) for number, image in row["images"].items()}})
            for row in plain["rows"]
        ]
        turns = plain["rollouts"]["turns"]
        rollouts = {**plain["rollouts"], "turns": None if turns is None else StepTurns(**turns)}
        return cls(rows, StepRollouts(**rollouts), plain["surveyed"])


def deal(rows: Sequence[PackedRow], ranks: int) -> list[list[PackedRow]]:
    """Deal the rows to the ranks: the row of highest cost first, to the rank with the least work that has room. Rows of
    demonstrations come after those of rollouts, so that rank 0 has one of these.

    All ranks get as many rows, since each forward pass of a sharded policy takes all of them. Where rows do not
    suffice, a rank gets padding.

    Returns:
        The rows of each rank, rank 0's first.
    """
    most = -(-len(rows) // ranks)
    hands: list[list[PackedRow]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for row in sorted(rows, key=lambda row: (row.supervised is not None, -row.cost)):
        rank = min((rank for rank in range(ranks) if len(hands[rank]) < most), key=lambda rank: spent[rank])
        hands[rank].append(row)
        spent[rank] += row.cost
    return [hand + [padding_row()] * (most - len(hand)) for hand in hands]
