"""A base in 4 or 8 bits. bitsandbytes needs a GPU: its layers are stood in for, and nothing here ran on one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from slipstream.learner.feed.packing import pack
from slipstream.learner.model import precision
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection, LoraSection, ModelSection
from tests.kit.learner import sample, step_rollouts

pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
STEP = 1 / 16


class Linear4bit(torch.nn.Linear):
    """As bitsandbytes' layer: its weight is bytes in one column that do not train, and whole where it computes."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        coarse = (linear.weight.detach() / STEP).round().clamp(-128, 127).to(torch.int8)
        self.weight = torch.nn.Parameter(coarse.reshape(-1, 1), requires_grad=False)

    def whole(self) -> torch.Tensor:
        return self.weight.reshape(self.out_features, self.in_features).float() * STEP

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.whole().to(x.dtype), self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Note what `from_pretrained` was asked for; it quantises as the stand-in does."""
    asked: dict[str, Any] = {}
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path: str, **arguments: Any) -> Any:
        asked.update({name: arguments.pop(name, None) for name in ("quantization_config", "device_map")})
        network = load(path, **arguments)
        if asked["quantization_config"] is not None:
            for module in list(network.model.layers.modules()):
                for name, child in module.named_children():
                    if isinstance(child, torch.nn.Linear):
                        setattr(module, name, Linear4bit(child))
        return network

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(precision, "check_quantisation", lambda model: None)
    monkeypatch.setattr(precision, "dequantised_weight", lambda layer: layer.whole())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return asked


def load(path: Path, **model: Any) -> Policy:
    section = ModelSection(path=str(path), **model)
    lora = LoraSection(r=4, target_modules=["q_proj", "up_proj"])
    return load_policy(str(path), section, Scoring(1.0, 16), LearnerSection(), lora=lora)


@pytest.mark.parametrize("model", [{"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}])
def test_transformers_is_asked_for_the_bits(model_path: Path, on_gpu: dict[str, Any], model: dict[str, Any]) -> None:
    load(model_path, **model)
    how = on_gpu["quantization_config"]
    assert isinstance(how, BitsAndBytesConfig)
    assert on_gpu["device_map"] == {"": 3}
    assert (how.load_in_4bit, how.load_in_8bit) == (model.get("load_in_4bit", False), model.get("load_in_8bit", False))
    if how.load_in_4bit:
        asked = (how.bnb_4bit_quant_type, how.bnb_4bit_use_double_quant, how.bnb_4bit_compute_dtype)
        assert asked == ("nf4", True, torch.float32)


def test_what_is_published_is_what_the_learner_computes_with(
    model_path: Path, tmp_path: Path, on_gpu: dict[str, Any]
) -> None:
    """Whole matrices under the checkpoint's names and shapes: those of the bits, with the adapter, wherever there is
    one."""
    policy = load(model_path, load_in_4bit=True)
    trainer = PolicyTrainer(policy, LearnerSection(learning_rate=1e-2), 64)
    samples = [sample(12, 3, i, rollout=i) for i in range(4)]
    frozen = {name: of.clone() for name, of in policy.named_parameters() if not of.requires_grad}
    for _ in range(2):
        trainer.step(pack(samples, 32), step_rollouts(samples))
    assert all(torch.equal(of, frozen[name]) for name, of in policy.named_parameters() if name in frozen)
    plain = load_policy(str(model_path), ModelSection(path=str(model_path)), Scoring(1.0, 16))
    expected = {name: of.shape for name, of in plain.named_weights().layout().items()}
    assert {name: of.shape for name, of in policy.named_weights().layout().items()} == expected
    assert {name: of.shape for name, of in policy.named_weights()} == expected
    policy.save(tmp_path / "model")
    assert "quantization_config" not in (tmp_path / "model" / "config.json").read_text()
    served = load_policy(str(tmp_path / "model"), ModelSection(path=str(tmp_path / "model")), Scoring(1.0, 16))
    ids = list(range(1, 30))
    torch.testing.assert_close(
        torch.from_numpy(served.score(ids)), torch.from_numpy(policy.score(ids)), atol=1e-4, rtol=1e-4
    )
    assert abs(policy.score(ids) - plain.score(ids)).max() > 1e-2, "or the bits were never used"


def test_without_a_gpu_it_is_refused_before_anything_is_loaded(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model.load_in_8bit = true needs a GPU.*leave it out"):
        load(model_path, load_in_8bit=True)


def test_without_bitsandbytes_it_is_refused_with_the_line_that_installs_it(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("slipstream.learner.model.precision.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.load_in_4bit = true needs bitsandbytes.*pip install bitsandbytes"):
        load(model_path, load_in_4bit=True)


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("bitsandbytes") is None,
    reason="needs a GPU and bitsandbytes: without them, only a stand-in is tested",
)
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_on_a_gpu_it_trains_and_is_published_as_it_computes(model_path: Path, tmp_path: Path, bits: str) -> None:
    policy = load(model_path, dtype="bfloat16", **{bits: True})
    samples = [sample(12, 3, i, rollout=i) for i in range(4)]
    PolicyTrainer(policy, LearnerSection(learning_rate=1e-2), 64).step(pack(samples, 32), step_rollouts(samples))
    policy.save(tmp_path / "model")
    model = ModelSection(path=str(tmp_path / "model"), dtype="bfloat16")
    ids = list(range(1, 30))
    served = load_policy(str(tmp_path / "model"), model, Scoring(1.0, 16)).score(ids)
    assert abs(served - policy.score(ids)).mean() < 0.2
