"""Copies one version of the weights, with the probe that proves it, so that the learner can continue.

A digest proves that the bytes arrived. Only log-probs prove that the server computes with them: on a CPU it computes
with packed copies, which a reload may miss. A probe shows only those rows of embedding and head that its tokens touch,
so each publication has another one, and together they touch all rows. An adapter alone travels as a safetensors file
and its configuration, under a name that includes their digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from safetensors.torch import save
from xxhash import xxh3_128_digest

from slipstream.protocol.versions import label_of, name_of
from slipstream.weight_sync.weights import device_copy
from slipstream.weight_sync.weights.checksum import checksum_of
from slipstream.weight_sync.weights.host_memory import HUGE, Reserve
from slipstream.weight_sync.weights.manifest import Manifest, Rows, check_distinct, unwrapped

LENGTH = 24
WORDS = 2**16

# The share of the bytes that each snapshot compares with the live weights, and its bounds: publications in a row take
# one part after another, so that together they compare everything.
CHECKED_SHARE, MIN_CHECKED_BYTES, MAX_CHECKED_BYTES = 1 / 128, 2**18, 2**24


class SnapshotDamaged(RuntimeError):
    """What was copied is not what the learner holds."""


@dataclass(frozen=True)
class AdapterPayload:
    """An adapter as it travels.

    Attributes:
        name: Run, version and digest, as `slipstream.protocol.versions.name_of` joins them.
        file: Content of `adapter_model.safetensors`.
        config: Content of `adapter_config.json`.
        digest: `adapter_digest` of both.
    """

    name: str
    file: bytes
    config: str
    digest: str

    @classmethod
    def of(
        cls, version: int, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], run_id: str = ""
    ) -> AdapterPayload:
        """Pack `tensors` by peft's names, contiguous and on the host, and the adapter's configuration."""
        file, text = save(dict(tensors)), json.dumps(config, sort_keys=True)
        digest = adapter_digest(file, text)
        return cls(name_of(version, digest, run_id), file, text, digest)


def adapter_digest(file: bytes, config: str) -> str:
    """Return the BLAKE3 over both, in hex."""
    return blake3(file).update(config.encode()).hexdigest()


# Takes the ids of one sequence of T tokens; returns the T - 1 log-probs, in nats at temperature 1, of its tokens after
# the first: log p(token_ids[i + 1] | token_ids[: i + 1]).
Score = Callable[[list[int]], "torch.Tensor | npt.NDArray[np.float32] | Sequence[float]"]
NamedWeights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def pairs(weights: NamedWeights) -> Iterable[tuple[str, torch.Tensor]]:
    """Return names and tensors of a mapping too. Raises `TypeError` for a module."""
    if isinstance(weights, torch.nn.Module):
        raise TypeError(f"publish() was given a module, {type(weights).__name__}: give it model.named_parameters()")
    return weights.items() if isinstance(weights, Mapping) else weights


@dataclass(frozen=True)
class Probe:
    """A token sequence, and the learner's log-probs of it under the weights that are published.

    Attributes:
        token_ids: T ids.
        logprobs: float32 [T-1] in nats, at temperature 1: logprobs[i] = log p(token_ids[i + 1] | token_ids[:i + 1]).
    """

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def taken(cls, token_ids: list[int], score: Score) -> Self:
        """Ask for the log-probs. Raises `ValueError` where `score` does not return T - 1 finite numbers."""
        with torch.no_grad():
            logprobs = torch.as_tensor(score(token_ids)).detach().float().cpu().numpy()
        wanted = len(token_ids) - 1
        if logprobs.shape != (wanted,) or not np.isfinite(logprobs).all():
            found = "numbers that are not finite" if logprobs.shape == (wanted,) else f"shape {logprobs.shape}"
            raise ValueError(
                f"score() returned {found} for {len(token_ids)} token ids: return the {wanted} log-probs of the tokens "
                f"after the first"
            )
        return cls(token_ids, logprobs)


def probe_token_ids(vocab_size: int, number: int = 0, seed: int = 0) -> list[int]:
    """Return the ids of publication `number`, the same at every call.

    They are windows over a permutation of the vocabulary, each beginning with the last id of the one before: `rounds`
    in a row hold every id both as an input and as a prediction. Then the vocabulary is permuted again.
    """
    windows = rounds(vocab_size)
    number, place = divmod(number, windows)
    ids = np.random.default_rng((seed, number)).permutation(vocab_size)
    chosen = (np.arange(LENGTH) + place * (LENGTH - 1)) % vocab_size
    return [int(token) for token in ids[chosen]]


def rounds(vocab_size: int) -> int:
    """Return the number of publications in a row that touch every id."""
    return max(1, -(-vocab_size // (LENGTH - 1)))


# Memory of this process's snapshots: one that is being published and one that is being filled.
_reserve = Reserve(most=2)


@runtime_checkable
class MadeOneByOne(Protocol):
    """Weights that are made one at a time, such as those with an adapter merged into them."""

    def layout(self) -> dict[str, torch.Tensor]:
        """Return tensors of the same names, shapes and types, with any content."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class AdapterWeights(Protocol):
    """An adapter's weights alone, by peft's names, with the content of its `adapter_config.json`."""

    adapter_config: Mapping[str, Any]


class Snapshot:
    """The weights of one policy version, or of its adapter alone, and the probe that proves them.

    The learner waits only for this part of a publication. On a CPU it takes little more than a copy of the bytes, on as
    many threads as torch has, if `buffer` was used before or its pages were prepared (`host_memory`); else one and a
    half to two times as long. On a GPU the learner waits for copies on the device alone, which cast to the type that is
    sent: they continue to the host during the next step.

    A copy that went wrong would pass the server's proof but for the few rows that a probe touches, since the digest is
    the copy's. So a part of the live weights is summed up where they are, while they are copied, and `check` compares.

    Attributes:
        manifest: The layout of `flat`.
        adapter_config: Configuration of the adapter; None if the weights are the model's.
    """

    def __init__(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        dtype: torch.dtype | None = None,
        buffer: torch.Tensor | None = None,
        run_id: str = "",
    ) -> None:
        """Copy the weights.

        Args:
            version: The policy version.
            weights: Names and tensors as in a checkpoint, on any device; names may hold what wraps the module. Those
                that are `MadeOneByOne` are held one at a time.
            probe: Proves the version.
            dtype: Type of floating-point tensors on the servers; None: their own.
            buffer: An earlier snapshot's `flat`, overwritten if it has the right size.
            run_id: Id of the run whose version it is.
        """
        self.adapter_config = weights.adapter_config if isinstance(weights, AdapterWeights) else None
        if isinstance(weights, MadeOneByOne):
            layout = weights.layout()
        else:
            layout = dict(weights)
            weights = layout.items()
        if self.adapter_config is None:
            check_distinct(layout)
        layout = {self._name(name): tensor for name, tensor in layout.items()}
        self.version = version
        self.run_id = run_id
        self.probe = probe
        self.manifest = Manifest.of(layout, dtype)
        self._copies = device_copy.copies_from(device := _device(layout))
        size = self.manifest.total_bytes()
        self._checked = self._part_to_check(size)
        self._sums: dict[str, torch.Tensor] = {}
        used = buffer is not None and len(buffer) == size
        self._flat = buffer if buffer is not None and used else _reserve.take(size, device)
        if self._copies is None:
            views = self.manifest.views(self._flat)
            for name, tensor in weights:
                views[self._name(name)].copy_(tensor.detach())
                self._sum_up(self._name(name), tensor)
        else:
            self._copy_from_device(self._copies, iter(weights))
        if not used:
            _expect(size, device)

    def _copy_from_device(self, copies: device_copy.DeviceCopies, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensor = torch.empty(0)
        for bucket in self.manifest.buckets(device_copy.BUCKET_BYTES):
            on_device = copies.empty(bucket.size)
            for name, view in bucket.manifest.views(on_device).items():
                if not bucket.first:
                    given, tensor = next(weights)
                    assert self._name(given) == name, "weights must come in the order of their layout"
                    self._sum_up(name, tensor)
                rows = tensor if bucket.shape is None else tensor[bucket.first : bucket.first + len(view)]
                view.copy_(rows.detach(), non_blocking=True)
            copies.to_host(on_device, self._flat[bucket.start : bucket.end])
        for given, _ in weights:  # to their end, as other ranks may still need this one to make theirs
            raise AssertionError(f"{given} is not in the layout of the weights")
        copies.end()

    def _part_to_check(self, size: int) -> dict[str, Rows]:
        """Choose the rows of this version's part, by tensor."""
        part = min(max(int(size * CHECKED_SHARE), MIN_CHECKED_BYTES), MAX_CHECKED_BYTES)
        first = self.version % max(1, -(-size // part)) * part
        return self.manifest.rows_between(first, first + part)

    def _sum_up(self, name: str, tensor: torch.Tensor) -> None:
        """Sum up what is to be checked of a live tensor, where it is and as it is sent. Does not wait for a device."""
        if (rows := self._checked.get(name)) is not None:
            sent = getattr(torch, self.manifest.dtypes[self.manifest.names.index(name)])
            self._sums[name] = checksum_of(tensor.detach()[rows].to(sent))

    def check(self) -> None:
        """Compare this version's part of `flat` with what the learner held. May be called from any thread.

        Raises:
            SnapshotDamaged: They differ.
        """
        views = self.manifest.views(self.flat)
        for name, live in self._sums.items():
            if not torch.equal(live.cpu(), checksum_of(views[name][self._checked[name]])):
                raise SnapshotDamaged(
                    f"the copy of version {self.version} differs from the learner's own weights in {name}: it was "
                    f"damaged on the way, and is not published; if that comes again, test this machine's memory"
                )

    @property
    def flat(self) -> torch.Tensor:
        """uint8 [manifest.total_bytes()] on the host. Waits until the bytes are there."""
        if self._copies is not None:
            self._copies.wait()
        return self._flat

    def _name(self, name: str) -> str:
        """Return the name that a checkpoint has; an adapter's file keeps peft's names."""
        return name if self.adapter_config is not None else unwrapped(name)

    @property
    def label(self) -> str:
        """Run and version, as servers report them with each sampled token."""
        return label_of(self.run_id, self.version)

    @cached_property
    def adapter(self) -> AdapterPayload | None:
        """The adapter as it travels, None if the weights are the model's."""
        if self.adapter_config is None:
            return None
        return AdapterPayload.of(self.version, self.manifest.views(self.flat), self.adapter_config, self.run_id)

    @cached_property
    def digest(self) -> bytes:
        """`digest_of(flat)`."""
        return digest_of(self.flat)

    @cached_property
    def words(self) -> torch.Tensor:
        """A copy of some words from everywhere in `flat`: int64 [at most 2 * `WORDS`]. They tell later how much another
        snapshot differs."""
        whole = self.flat[: len(self.flat) // 8 * 8].view(torch.int64)
        return whole[:: max(1, len(whole) // WORDS) | 1].clone()


def expect(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
    """Start to prepare memory for a first snapshot of such weights. Returns at once."""
    layout = weights.layout() if isinstance(weights, MadeOneByOne) else dict(weights)
    _expect(Manifest.of(layout, dtype).total_bytes(), _device(layout))


def _expect(size: int, device: torch.device) -> None:
    if size >= HUGE:
        _reserve.expect(size, device)


def _device(layout: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in layout.values()), torch.device("cpu"))


def digest_of(flat: torch.Tensor) -> bytes:
    """Return the XXH3-128 of a uint8 tensor on the host, 16 bytes. It finds damage; it does not prevent forgery."""
    return xxh3_128_digest(flat.numpy().data)
