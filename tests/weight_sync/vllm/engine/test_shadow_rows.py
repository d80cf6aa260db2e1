"""What the shadow's embedding and head hold, against what arrived: the probe does not touch most of their rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from slipstream.weight_sync.vllm.engine.arrivals import Arrivals, Reading
from slipstream.weight_sync.vllm.engine.shadow_checks import RowSums, check_width
from slipstream.weight_sync.vllm.engine.shadow_modules import Pair

NAME = "model.embed_tokens"


def pair(held: torch.Tensor, live: Any = None) -> Pair:
    return Pair(NAME, live or object.__new__(VocabParallelEmbedding), SimpleNamespace(weight=held))


def check_rows(pairs: list[Pair], weights: dict[str, torch.Tensor]) -> None:
    rows = RowSums(pairs)
    for name, tensor in weights.items():
        rows.note(name, tensor)
    rows.check_held()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_were_exchanged_on_the_way_into_the_shadow_are_refused_and_named(dtype: torch.dtype) -> None:
    sent = torch.randn(64, 8).to(dtype)
    padded = torch.cat([sent, torch.zeros(64, 8, dtype=dtype)])
    check_rows([pair(sent.clone())], {f"{NAME}.weight": sent})
    check_rows([pair(padded)], {f"{NAME}.weight": sent})
    padded[[7, 40]] = padded[[40, 7]]
    with pytest.raises(ValueError, match=rf"{NAME}: 2 rows are not those that arrived, among them row 7"):
        check_rows([pair(padded)], {f"{NAME}.weight": sent})


def test_a_loader_that_changes_every_row_and_what_cannot_be_compared_are_taken_as_they_are() -> None:
    sent = torch.randn(64, 8)
    check_rows([pair(sent * 2)], {f"{NAME}.weight": sent})
    check_rows([pair(torch.empty(0))], {f"{NAME}.weight": sent})
    check_rows([pair(sent * 2, live=torch.nn.Linear(8, 64))], {f"{NAME}.weight": sent})
    check_rows([pair(sent.clone())], {"another.weight": sent})


def test_rows_that_are_no_numbers_are_no_difference() -> None:
    sent = torch.randn(64, 8)
    sent[3, 2] = torch.nan
    check_rows([pair(sent.clone())], {f"{NAME}.weight": sent})


def embedding(rows: int, width: int) -> Any:
    table = object.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(table)
    table.org_vocab_size, table.embedding_dim = rows, width
    return table


@pytest.mark.parametrize("shape", [(64, 16), (72, 8)])
def test_a_model_of_another_width_or_vocabulary_is_refused_by_tensor_shapes_and_remedy(
    shape: tuple[int, int],
) -> None:
    model = torch.nn.Module()
    model.add_module("embed_tokens", embedding(64, 8))
    check_width(model, "small", {"embed_tokens.weight": torch.zeros(64, 8)})
    came = rf"embed_tokens\.weight came as \[{shape[0]}, {shape[1]}\], and this server's model has \[64, 8\]"
    with pytest.raises(ValueError, match=rf"{came}: this server runs small, and the learner trains another model"):
        check_width(model, "small", {"embed_tokens.weight": torch.zeros(*shape)})


def test_the_tensor_at_which_a_loader_gave_up_is_named_with_both_shapes() -> None:
    layer = torch.nn.Linear(8, 4)
    record_metadata_for_reloading(layer)
    reading = Reading(Arrivals.of({"fc.weight": torch.zeros(4, 9), "fc.bias": torch.zeros(4)}), [])
    next(iter(reading))
    assert reading.place([Pair("fc", layer, layer)]) == "fc.weight [4, 9] into [4, 8]"
