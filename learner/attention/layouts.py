"""How a row of several sequences goes through the network, so that none sees another: the layout.

- `trie`: tokens that sequences share stand there once, and attention follows each sequence's own path. It needs layers
  in which attention alone mixes positions.
- `packed`: sequences stand end to end, and the layers are told where each begins. What keeps them apart are kernels:
  flash-linear-attention and causal-conv1d for linear attention and convolutions.
- `padded`: a batch of whole sequences of similar length, as every causal model takes it.

Each computes the same; they differ in what they cost. The check at the start (`learner.model.build`) takes the first
one that is exact for the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from slipstream.learner.attention import packed, paths
from slipstream.learner.feed.packing import PACKED_ATTENTION, PackedRow

Layout = Literal["trie", "packed", "padded"]

# Attention of a batch of whole sequences: the best exact one that a network has.
BATCH_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class States:
    """Outputs of a network for a row of T tokens.

    Attributes:
        hidden: [T, h].
        router_logits: For each layer that is a mixture, [T, experts]; None where it was not asked for.
    """

    hidden: torch.Tensor
    router_logits: list[torch.Tensor] | None


def possible(wanted: str, attention: str) -> list[Layout]:
    """List the layouts to try, best first.

    Args:
        wanted: `learner.layout`.
        attention: `model.attention`.
    """
    every: list[Layout] = ["trie", "packed", "padded"] if attention == PACKED_ATTENTION else ["packed", "padded"]
    return [layout for layout in every if wanted in ("auto", layout)]


# Gives routers the experts of the tokens at these places of a row, int64 [n]; of all its tokens where it is None.
Choosing = Callable[[torch.Tensor | None], AbstractContextManager[None]]


def _own_choice(_: torch.Tensor | None) -> AbstractContextManager[None]:
    return nullcontext()


def states(
    tower: Any,
    row: PackedRow,
    layout: Layout,
    attention: str,
    one_batch: bool,
    choosing: Choosing = _own_choice,
    **more: Any,
) -> States:
    """Run the tower over a row.

    Args:
        attention: Name of the network's attention.
        one_batch: Whether a padded row is one batch, however different its sequences' lengths are: where ranks hold
            parts of the weights, each row takes one forward pass of each rank.
        choosing: What the routers of a mixture choose.
        **more: Further arguments of the tower.
    """
    if layout == "padded":
        return _padded(tower, row, one_batch, choosing, **more)
    with choosing(None):
        output = tower(**arguments(row, layout, attention), **more)
    logits = getattr(output, "router_logits", None)
    return States(output.last_hidden_state[0], None if logits is None else [layer.flatten(0, -2) for layer in logits])


def arguments(row: PackedRow, layout: Layout, attention: str) -> dict[str, Any]:
    """Return what a model is given of a row; in the layout `padded`, of a row of one sequence."""
    if layout == "padded":
        return {"input_ids": row.input_ids, "use_cache": False}
    given = {"input_ids": row.input_ids, "position_ids": row.position_ids, "use_cache": False}
    given |= packed.model_arguments(attention, row)
    return given | packed.sequence_bounds(row) | {"seq_idx": _sequence_numbers(row)} if layout == "packed" else given


def attentions(layout: Layout) -> Sequence[str | None]:
    """Return the ways to compute attention in a layout, the fastest first; None for what the model chooses itself."""
    return (None, "eager") if layout == "padded" else (None,)


def set_batch_attention(network: Any, names: Sequence[str] = BATCH_ATTENTION) -> str:
    """Give a network its own best attention for whole sequences, and return its name."""
    for name in names:
        try:
            network.set_attn_implementation(name)
        except (ValueError, ImportError):
            continue
        if network.config._attn_implementation == name:
            return name
    return str(network.config._attn_implementation)


def _sequence_numbers(row: PackedRow) -> torch.Tensor:
    """Return the number of each token's sequence, int32 [1, T]: layers with a state take it next to the bounds."""
    lengths = torch.tensor(row.starts).diff()
    numbers = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
    return paths.sent(numbers[None], row.input_ids.device)


def _padded(tower: Any, row: PackedRow, one_batch: bool, choosing: Choosing, **more: Any) -> States:
    """Run the tower over whole sequences. The model counts positions for itself."""
    plan = sequences(row, one_batch)
    # Only a check has a token beyond the end of its sequence.
    far = row.longest > plan.batches[0].length and takes_positions(tower)

    def run(batch: paths.PathBatch) -> Any:
        shape = batch.count, batch.length
        inputs = {"input_ids": row.input_ids[0].index_select(0, batch.tokens).view(shape)}
        if far:
            inputs["position_ids"] = row.position_ids[0].index_select(0, batch.tokens).view(shape)
        return tower(**inputs, use_cache=False, **more)

    return in_batches(plan, choosing, run)


def sequences(row: PackedRow, one_batch: bool) -> paths.Paths:
    """Put the row's sequences into batches of similar length; into one if `one_batch`.

    Padding stands on the right, where no token of a causal model sees it.
    """
    return paths.layout(row.starts, row.reach, row.input_ids.device, 0.0 if one_batch else paths.MIN_SHARE)


def in_batches(plan: paths.Paths, choosing: Choosing, run: Callable[[paths.PathBatch], Any]) -> States:
    """Run a row's sequences. `run`: returns the network's output for a batch."""
    hidden, routed = [], []
    for batch in plan.batches:
        with choosing(batch.tokens):
            output = run(batch)
        hidden.append(output.last_hidden_state.flatten(0, 1))
        routed.append(getattr(output, "router_logits", None))
    found = torch.cat(hidden).index_select(0, plan.first)
    if any(logits is None for logits in routed):
        return States(found, None)
    layers = [torch.cat([logits.flatten(0, -2) for logits in layer]) for layer in zip(*routed, strict=True)]
    return States(found, [layer.index_select(0, plan.first) for layer in layers])


class UpToOutput:
    """A whole model without its output layer: its hidden states are what that layer would be given."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forward = model.forward

    def __call__(self, **inputs: Any) -> Any:
        layer, given = self._model.get_output_embeddings(), list[torch.Tensor]()

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            given.append(hidden)
            return hidden[..., :1]

        before = vars(layer).get("forward")
        layer.forward = keep
        try:
            output = self._model(**inputs)
        finally:
            if before is None:
                del layer.forward
            else:
                layer.forward = before
        return SimpleNamespace(last_hidden_state=given[0], router_logits=getattr(output, "router_logits", None))


def takes_positions(tower: Any) -> bool:
    """Tell whether the tower is told each token's position; else it counts for itself."""
    return "position_ids" in inspect.signature(tower.forward).parameters
