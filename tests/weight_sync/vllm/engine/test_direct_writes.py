"""Models whose own loaders copy into parameters, past the parameters' loaders: a reload takes what they copy, and names
what got nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.weight_sync.vllm.engine.reload import Reload

WEIGHTS = ("mixed.data", "mixed.plain", "mixed.loaded", "own.weight")


class Layer(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False))


class Model(torch.nn.Module):
    """Loads one parameter as each kind of loader does it, GPT-OSS's among them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.own = Layer("data", "plain", "loaded"), Layer("weight")
        # A loader for experts one by one, which the model does not use for whole tensors.
        self.mixed.plain.weight_loader = lambda param, loaded_weight, expert_id: None  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            if name.endswith((".data", ".weight")):
                parameters[name].data.copy_(tensor.narrow(0, 0, 2))
            elif name.endswith(".plain"):
                parameters[name].copy_(tensor.t().contiguous())
            else:
                getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)


def weights(factor: float) -> dict[str, torch.Tensor]:
    shapes = {"mixed.data": (4, 3), "mixed.plain": (3, 2)}
    return {
        name: torch.arange(12.0)[: torch.Size(shapes.get(name, (2, 3))).numel()].view(shapes.get(name, (2, 3))) * factor
        for name in WEIGHTS
    }


@torch.no_grad()
def test_what_a_model_copies_by_itself_arrives_at_each_reload() -> None:
    model, expected = Model(), Model()
    record_metadata_for_reloading(model)
    held = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for factor in (1.0, 2.0):
        sent = weights(factor)
        expected.load_weights(sent.items())
        Reload(model, None, sent).exchange()  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name
            assert parameter.data_ptr() == held[name], "captured graphs hold it"


@pytest.mark.parametrize("left_out", WEIGHTS)
def test_a_parameter_that_got_nothing_is_named_at_once(left_out: str) -> None:
    model = Model()
    record_metadata_for_reloading(model)
    sent = {name: tensor for name, tensor in weights(1.0).items() if name != left_out}
    with pytest.raises(ValueError, match=f"1 parameters of .* were not sent whole, among them {left_out}: it holds"):
        Reload(model, None, sent).exchange()  # type: ignore[arg-type]
