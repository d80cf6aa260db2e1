"""Copies one version of the weights out of the learner's way, with the probe that proves it.

A digest proves that the bytes arrived. Only log-probs prove that the server computes with them: on a CPU vLLM computes
with packed copies, which a reload may miss. A probe shows only those rows of embedding and head that its tokens touch,
so each publication has another one, and together they touch all rows. An adapter alone travels as a safetensors file
and its configuration, under a name that includes their digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from safetensors.torch import save
from xxhash import xxh3_128_digest

from protocol.versions import label_of, name_of
from weight_sync.weights.flat_buffer import HUGE, Manifest, Reserve, check_distinct, unwrapped

LENGTH = 64
WORDS = 2**16


@dataclass(frozen=True)
class AdapterPayload:
    """file: the content of `adapter_model.safetensors`; config: that of `adapter_config.json`; digest: `digest_of`
    them."""

    name: str
    file: bytes
    config: str
    digest: str

    @classmethod
    def of(
        cls, version: int, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], run_id: str = ""
    ) -> AdapterPayload:
        """tensors: by peft's names, contiguous, on the host."""
        file, text = save(dict(tensors)), json.dumps(config, sort_keys=True)
        digest = adapter_digest(file, text)
        return cls(name_of(version, digest, run_id), file, text, digest)


def adapter_digest(file: bytes, config: str) -> str:
    """BLAKE3 over both, hexadecimal."""
    return blake3(file).update(config.encode()).hexdigest()


@dataclass(frozen=True)
class Probe:
    """token_ids: T ids. logprobs: float32 [T-1], where logprobs[i] = log p(token_ids[i + 1] | token_ids[:i + 1]) in
    nats, at temperature 1, by the weights that are published."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]


def probe_token_ids(vocab_size: int, number: int = 0, seed: int = 0, length: int = LENGTH) -> list[int]:
    """The `length` ids of publication `number`, the same at every call.

    Windows over a permutation of the vocabulary, each of which begins with the last id of the one before: `rounds` of
    them in a row hold each id both as an input and as one that is predicted. The next round is permuted anew.
    """
    windows = rounds(vocab_size, length)
    number, place = divmod(number, windows)
    ids = np.random.default_rng((seed, number)).permutation(vocab_size)
    chosen = (np.arange(length) + place * (length - 1)) % vocab_size
    return [int(token) for token in ids[chosen]]


def rounds(vocab_size: int, length: int = LENGTH) -> int:
    """Publications in a row that touch every id."""
    return max(1, -(-vocab_size // (length - 1)))


# Memory of this process's snapshots: one that is on its way to the servers, and one that is filled.
_reserve = Reserve(most=2)


@runtime_checkable
class MadeOneByOne(Protocol):
    """Weights of which some are made when they are asked for, such as those with an adapter merged into them."""

    def layout(self) -> dict[str, torch.Tensor]:
        """Tensors of the same names, shapes and types, whatever they hold."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class AdapterWeights(Protocol):
    """Weights that are an adapter's alone, by peft's names. adapter_config: the content of `adapter_config.json`."""

    adapter_config: Mapping[str, Any]


class Snapshot:
    """The weights of one policy version, or of its adapter alone, and the probe that proves them.

    adapter_config: None where they are the model's. flat: uint8 [manifest.total_bytes()] on the host. Making it is the
    only part of a publication that the learner waits for. It takes little more than a copy of the bytes, on as many
    threads as torch has, where `buffer` was used before or its pages were taken ahead (`flat_buffer`); else one and a
    half to two times as long.
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
        """weights: names and tensors as in a checkpoint, but for what wraps the module, on any device; those that are
        `MadeOneByOne` are held one at a time. dtype: the servers', for floating-point tensors; without it each has its
        own. buffer: an earlier snapshot's `flat`, overwritten if it has the size. run_id: of the run whose version
        it is."""
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
        size = self.manifest.total_bytes()
        used = buffer is not None and len(buffer) == size
        self.flat = buffer if buffer is not None and used else _reserve.take(size)
        views = self.manifest.views(self.flat)
        for name, tensor in weights:
            views[self._name(name)].copy_(tensor.detach())
        if not used:
            _expect(size)

    def _name(self, name: str) -> str:
        """As a checkpoint has it; an adapter's file keeps peft's names."""
        return name if self.adapter_config is not None else unwrapped(name)

    @property
    def label(self) -> str:
        """The run and the version, as vLLM reports them with each sampled token."""
        return label_of(self.run_id, self.version)

    @cached_property
    def adapter(self) -> AdapterPayload | None:
        """The adapter as it travels; None where the weights are the model's."""
        if self.adapter_config is None:
            return None
        return AdapterPayload.of(self.version, self.manifest.views(self.flat), self.adapter_config, self.run_id)

    @cached_property
    def digest(self) -> bytes:
        """`digest_of(flat)`."""
        return digest_of(self.flat)

    @cached_property
    def words(self) -> torch.Tensor:
        """Some of the weights, from everywhere in `flat`: int64 [at most 2 * `WORDS`], a copy. By these two snapshots
        are compared when one of them is gone."""
        whole = self.flat[: len(self.flat) // 8 * 8].view(torch.int64)
        return whole[:: max(1, len(whole) // WORDS) | 1].clone()


def expect(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
    """Have memory for a first snapshot of such weights ready soon; returns at once."""
    layout = weights.layout() if isinstance(weights, MadeOneByOne) else dict(weights)
    _expect(Manifest.of(layout, dtype).total_bytes())


def _expect(size: int) -> None:
    if size >= HUGE:
        _reserve.expect(size)


def digest_of(flat: torch.Tensor) -> bytes:
    """XXH3-128 of a uint8 tensor on the host: 16 bytes. It shows damage; it is no proof against who can forge it."""
    return xxh3_128_digest(flat.numpy().data)
