"""Weights on their way into a shadow: loaded bucket by bucket, as they arrive from the learner's ranks.

vLLM's layerwise reload keeps what it is given for a layer until all of the layer has come. The memory of a bucket is
filled again before that, so what a bucket brought is loaded when the bucket ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _layerwise_process
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from slipstream.weight_sync.transports.receiver import Share, Weights
from slipstream.weight_sync.vllm.engine.shadow_modules import Pair
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.parts import Joiner, Part, joined


class MustBeWhole(Exception):
    """No shadow can be built of the model, and what has arrived is gone: the next update is kept whole."""


class Arrivals:
    """The shares of one update. Iterate over it once.

    Attributes:
        stand_ins: Tensors without memory, with the names, shapes and types of all that arrives.
        kept: Whether all memory is good until the next update.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        synchronise: Callable[[], None] = lambda: None,
        in_one: Collection[str] = (),
    ) -> None:
        """Take shares over.

        Args:
            synchronise: Waits until what was launched on this thread's stream is done.
            in_one: `kind_of` tensors that are not handed on in parts, besides those of experts and all but matrices.

        Raises:
            ValueError: Two shares have the same tensor.
        """
        self.kept = all(share.kept for share in shares)
        self.synchronise = synchronise
        self._shares = shares
        self._in_one = in_one
        self._seen: Weights = {}
        self.stand_ins: Weights = {}
        for share in shares:
            tensors = share.manifest.stand_ins()
            if twice := self.stand_ins.keys() & tensors.keys():
                raise ValueError(f"{len(twice)} tensors were sent twice, among them {min(twice)}")
            self.stand_ins |= tensors

    @classmethod
    def of(cls, weights: Weights) -> Arrivals:
        """Make arrivals of weights that are all there."""
        return cls([Share(Manifest.of(weights), iter([weights]), kept=True)])

    def __iter__(self) -> Iterator[Weights]:
        """Yield parts of the weights, from all shares in turn. The memory of a part is good until the next one is asked
        for, and what was launched on it is done by then."""
        running = [self._put_together(share.pieces) for share in self._shares]
        while running:
            for pieces in list(running):
                piece = next(pieces, None)
                if piece is None:
                    running.remove(pieces)
                    continue
                if self.kept:
                    self._seen |= piece
                yield piece
                self.synchronise()

    def whole(self) -> Weights:
        """Return all weights, copied where their memory is filled again. What has been read must be `kept`."""
        whole = dict(self._seen)
        for name, tensor in joined(self._own(piece) for piece in self):
            whole[name] = tensor
        return whole

    def _own(self, piece: Weights) -> Weights:
        """Copy what is whole, unless it is kept; parts are copied when they are joined."""
        if self.kept:
            return piece
        return {name: tensor if isinstance(tensor, Part) else tensor.clone() for name, tensor in piece.items()}

    def _needs_all(self, name: str, tensor: Part) -> bool:
        # vLLM's loaders of experts add and exchange dimensions.
        return tensor.dim() != 2 or ".experts." in name or kind_of(name) in self._in_one

    def _put_together(self, pieces: Iterator[Weights]) -> Iterator[Weights]:
        """Pass pieces on, and tensors that a loader needs all of as soon as they are whole."""
        joiner = Joiner()
        for piece in pieces:
            (name, tensor), *_ = [*piece.items(), ("", None)]
            if not isinstance(tensor, Part) or not self._needs_all(name, tensor):
                yield piece
            elif (whole := joiner.add(name, tensor)) is not None:
                yield {name: whole}
            else:
                self.synchronise()


def kind_of(name: str) -> str:
    """Return a tensor's name without the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Reading:
    """Iterates over arrivals for a loader of the shadows, and knows which tensor was read last.

    Attributes:
        broke: The error that ended the arrivals, if one did.
    """

    def __init__(
        self, arrivals: Arrivals, pairs: Iterable[Pair], passing: Callable[[str, torch.Tensor], None] | None = None
    ) -> None:
        """Read `arrivals` into the shadows of `pairs`. `passing` is called with each tensor before it is loaded."""
        self.broke: Exception | None = None
        self._arrivals = arrivals
        self._pairs = [pair for pair in pairs if not is_deferred_attention_layer(pair.shadow)]
        self._passing = passing
        self._at: str | None = None
        # Rows that have come of tensors that are not whole yet.
        self._rows: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pieces = iter(self._arrivals)
        while (piece := self._next(pieces)) is not None:
            for name, tensor in piece.items():
                self._at = name
                self._count(name, tensor)
                if self._passing is not None:
                    self._passing(name, tensor)
                yield name, tensor
            if not self._arrivals.kept:
                self._load_what_waits()

    def _next(self, pieces: Iterator[Weights]) -> Weights | None:
        try:
            return next(pieces, None)
        except Exception as error:
            self.broke = error
            raise

    def _count(self, name: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, Part):
            self._rows[name] = self._rows.get(name, 0) + len(tensor.held)
            if self._rows[name] == len(tensor):
                del self._rows[name]

    @property
    def at(self) -> str:
        """Name of the tensor that was read last, "" before the first."""
        return self._at or ""

    def _load_what_waits(self) -> None:
        """Load what vLLM has kept for layers that are not complete."""
        for pair in self._pairs:
            info, layer = pair.info, pair.shadow
            if not info.can_load() or not info.loaded_weights:
                continue
            materialize_layer(layer, info)
            for name, arguments in info.loaded_weights:
                parameter = getattr(layer, name)
                arguments.arguments["param"] = parameter
                _get_original_loader(parameter)(*arguments.args, **arguments.kwargs)
            names = {name for name, _ in info.loaded_weights}
            info.loaded_weights.clear()
            # A padded vocabulary never counts as complete.
            whole = names == layer._parameters.keys() and not self._rows
            if isinstance(layer, VocabParallelEmbedding) and whole:
                _layerwise_process(layer, info)

    def place(self, pairs: list[Pair]) -> str:
        """Describe the tensor that was read last: its shape, and that of the model's parameter of this name if any."""
        if self._at is None:
            return "the first tensor"
        shapes = {
            f"{pair.name}.{name}".lstrip("."): tensor.shape
            for pair in pairs
            for name, tensor in pair.info.restore_metadata[0].items()
        }
        wanted = shapes.get(self._at)
        there = f" into {list(wanted)}" if wanted is not None else ""
        return f"{self._at} {list(self._arrivals.stand_ins[self._at].shape)}{there}"
