"""How the model's layers are run changes nothing of what they compute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.learner.feed.packing import PackedRow, pack_row
from slipstream.learner.model import loading
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from tests.kit.learner import sample
from tests.kit.memory import LiveBytes
from tests.kit.model import tiny_model


def load(path: Path, dtype: str = "float32", **learner: Any) -> Policy:
    model = ModelSection(path=str(path), dtype=dtype)  # type: ignore[arg-type]
    return load_policy(str(path), model, Scoring(1.0, 16), LearnerSection(**learner))


def row(length: int = 40) -> PackedRow:
    """Two samples that share a prompt, and one of its own."""
    first = sample(length, 10, 0)
    second = sample(length - 5, 10, 1)
    second.token_ids[:10] = first.token_ids[:10]
    return pack_row([first, second, sample(length // 2, 3, 2)])


def run(policy: Policy, of: PackedRow) -> tuple[torch.Tensor, list[torch.Tensor]]:
    scores = policy(of)
    scores.logprobs.sum().backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    policy.zero_grad()
    return scores.logprobs.detach(), gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_computed_again_give_the_same_bits(model_path: Path, dtype: str) -> None:
    logprobs, gradients = run(load(model_path, dtype), row())
    again, recomputed = run(load(model_path, dtype, gradient_checkpointing=True), row())
    assert torch.equal(logprobs, again)
    assert len(gradients) == len(recomputed) > 0
    assert all(torch.equal(one, other) for one, other in zip(gradients, recomputed, strict=True))


def test_layers_that_are_computed_again_keep_dropout_off(tmp_path: Path) -> None:
    tiny_model(attention_dropout=0.5).save_pretrained(tmp_path)
    policy = load(tmp_path, gradient_checkpointing=True)
    assert not any(module.training for module in policy.model.modules())
    assert torch.equal(run(policy, row())[0], run(policy, row())[0])


def test_checkpointing_keeps_less_for_the_backward(tmp_path: Path) -> None:
    """The model has eight layers, whose activations are kept one layer at a time."""
    tiny_model(num_hidden_layers=8).save_pretrained(tmp_path)
    peaks = []
    for checkpointing in (False, True):
        policy = load(tmp_path, gradient_checkpointing=checkpointing)
        run(policy, row(512))
        with LiveBytes() as live:
            run(policy, row(512))
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 3


def test_a_checkpoint_of_such_a_model_loads(model_path: Path, tmp_path: Path) -> None:
    policy = load(model_path, gradient_checkpointing=True)
    policy.save(tmp_path)
    assert torch.equal(run(load(tmp_path), row())[0], run(policy, row())[0])


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.gradient_checkpointing = true: Linear has no layers"):
        loading.checkpoint_layers(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"learner.compile = true: Linear has no layers"):
        loading.compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.wide  # a minute of compiling
@pytest.mark.timeout(900)  # the first time that a machine compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile takes a C++ compiler, and there is no g++")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_compiled_layers_give_the_same_logprobs_for_rows_of_any_length(
    model_path: Path, gradient_checkpointing: bool
) -> None:
    plain = load(model_path)
    compiled = load(model_path, compile=True, gradient_checkpointing=gradient_checkpointing)
    for length in (40, 60, 25):
        expected, gradients = run(plain, row(length))
        actual, others = run(compiled, row(length))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


def test_a_machine_that_cannot_compile_says_so_at_the_start(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> Any:
        def run(*_: Any, **__: Any) -> None:
            raise RuntimeError("No working C++ compiler found")

        return run

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.raises(ConfigError, match=r"learner.compile = true: .*No working C\+\+ compiler.*install a C\+\+"):
        load(model_path, compile=True)
