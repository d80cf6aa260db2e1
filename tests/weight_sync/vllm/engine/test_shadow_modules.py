"""Twins of modules whose weights vLLM has reloaded in place before, in the same process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from slipstream.weight_sync.vllm.engine.shadow_modules import pair_modules


class Layer(torch.nn.Module):
    """With its own loader, as vLLM's layers have: a method that knows its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)  # type: ignore[attr-defined]


def sent(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("layer.weight", torch.full((4, 4), value))]


def test_what_is_sent_to_a_twin_is_loaded_into_it_after_a_reload_of_the_live_model() -> None:
    model = Model()
    record_metadata_for_reloading(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(sent(1.0))
        finalize_layerwise_reload(model, None)
        shadow = pair_modules(model)[0].shadow
        initialize_layerwise_reload(shadow)
        for module in shadow.modules():
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            get_layerwise_info(module).kernel_tensors = None
        shadow.load_weights(sent(2.0))
    assert float(shadow.layer.weight[0, 0]) == 2.0
    assert float(model.layer.weight[0, 0]) == 1.0
