"""Masters in float32, compute in bfloat16, servers in the servers' type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.packing import Sample, pack, pack_row
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.precision import Precision, changed_share, find_rounding_warning
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection, ModelSection
from slipstream.protocol.messages import RunPosition
from slipstream.weight_sync.weights import snapshot as snapshot_module
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.kit import config
from tests.kit.learner import sample, step_rollouts
from tests.kit.memory import LiveBytes

Make = Callable[..., Policy]
STEPS = 3


@pytest.fixture(scope="module")
def make(model_path: Path) -> Make:
    def made(dtype: str = "bfloat16", path: Path = model_path, **learner: object) -> Policy:
        model = ModelSection(path=str(path), dtype=dtype)  # type: ignore[arg-type]
        return load_policy(str(path), model, Scoring(1.0, 16), LearnerSection(**learner))  # type: ignore[arg-type]

    return made


def samples(step: int) -> list[Sample]:
    return [sample(12, 3, 10 * step + i, rollout=i) for i in range(4)]


def moved(policy: Policy, learning_rate: float) -> dict[str, torch.Tensor]:
    """Return what a few steps add to each weight."""
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    trainer = PolicyTrainer(policy, LearnerSection(learning_rate=learning_rate), 64)
    for step in range(STEPS):
        trainer.step(pack(samples(step), 32), step_rollouts(samples(step)))
    return {name: weight - before[name] for name, weight in trainer.policy.named_weights()}


def share(moves: dict[str, torch.Tensor]) -> float:
    """Return the share of the weights that moved."""
    return float(torch.cat([move.flatten() != 0 for move in moves.values()]).float().mean())


def test_masters_move_in_small_steps_as_float32_does_and_pure_bfloat16_does_not(make: Make) -> None:
    whole, masters, pure = (moved(policy, 1e-6) for policy in (make("float32"), make(), make(weights_dtype="model")))
    assert abs(share(masters) - share(whole)) < 0.01
    assert share(whole) > 0.9
    assert share(pure) < 0.1
    total, expected = (torch.cat([move.flatten() for move in moves.values()]) for moves in (masters, whole))
    assert torch.cosine_similarity(total, expected, dim=0) > 0.95
    assert 0.9 < float(total.norm() / expected.norm()) < 1.1


def test_masters_learn(make: Make) -> None:
    """A rewarded token grows likelier, as in float32."""
    gained = {}
    for dtype in ("float32", "bfloat16"):
        policy, batch = make(dtype), samples(0)
        rewarded = int(np.argmax(step_rollouts(batch).rewards))
        row = pack_row([batch[rewarded]])
        with torch.no_grad():
            before = float(policy(row).logprobs.sum())
        trainer = PolicyTrainer(policy, LearnerSection(learning_rate=1e-3), 64)
        for _ in range(10):
            trainer.step(pack(batch, 32), step_rollouts(batch))
        with torch.no_grad():
            gained[dtype] = float(policy(row).logprobs.sum()) - before
    assert gained["float32"] > 1
    assert gained["bfloat16"] == pytest.approx(gained["float32"], rel=0.2)


def test_gradients_are_float32_and_near_those_of_float32(make: Make) -> None:
    row = pack_row(samples(0))
    gradients = []
    for dtype in ("float32", "bfloat16"):
        policy = make(dtype)
        policy(row).logprobs.sum().backward()
        gradients.append({name: weight.grad for name, weight in policy.model.named_parameters()})
    for name, wanted in gradients[0].items():
        actual = gradients[1][name]
        assert wanted is not None
        assert actual is not None
        assert actual.dtype == torch.float32
        assert float((actual - wanted).norm() / wanted.norm()) < 0.1, name


def test_what_is_published_is_the_masters_rounded_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MIN_CHECKED_BYTES", 1)  # whole rows are checked, of a tensor
    policy = make()
    probe = Probe([1, 2, 3], policy.score([1, 2, 3]))
    with LiveBytes() as live:
        snapshot = Snapshot(1, policy.named_weights(), probe, torch.bfloat16)
    weights = dict(policy.named_weights())
    for name, view in snapshot.manifest.views(snapshot.flat).items():
        assert view.dtype == torch.bfloat16
        assert torch.equal(view, weights[name].to(torch.bfloat16)), name
    # No second copy next to the buffer that is sent, and what is checked of it.
    assert live.peak <= snapshot.manifest.total_bytes() + 4096


def test_the_probe_is_near_what_bfloat16_weights_give(make: Make) -> None:
    """As near as these are to float32: the rounding of logits is most of both."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 64, 64)]
    rounded = make(weights_dtype="model")
    exact = make("float32")
    exact.model.load_state_dict({name: weight.float() for name, weight in rounded.model.state_dict().items()})
    probe, served, wanted = (policy.score(ids) for policy in (make(), rounded, exact))
    assert np.abs(probe - served).max() < 0.1  # what weight_sync.probe_tolerance allows
    assert np.abs(probe - served).mean() < 2 * np.abs(served - wanted).mean()
    assert np.abs(probe - wanted).mean() < 2 * np.abs(served - wanted).mean()


def test_a_checkpoint_holds_the_masters_and_names_the_servers_type(
    make: Make, model_path: Path, tmp_path: Path
) -> None:
    trainer = PolicyTrainer(make(), LearnerSection(learning_rate=1e-6), 64)
    trainer.step(pack(samples(0), 32), step_rollouts(samples(0)))
    sources = Sources(ModelSection(path=str(model_path)))
    saved = checkpoint.save(tmp_path, CheckpointInfo(1, 1), trainer, sources, keep=1)

    assert json.loads((saved.model_path / "config.json").read_text())["dtype"] == "bfloat16"
    resumed = PolicyTrainer(make(path=saved.model_path), LearnerSection(learning_rate=1e-6), 64)
    checkpoint.restore(saved, resumed)
    assert resumed.policy.precision == trainer.policy.precision
    for one in (trainer, resumed):
        one.step(pack(samples(1), 32), step_rollouts(samples(1)))
    expected = dict(trainer.policy.named_weights())
    for name, weight in resumed.policy.named_weights():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name

    # Who loads it as vLLM does gets what is published.
    served = AutoModelForCausalLM.from_pretrained(saved.model_path)
    assert served.dtype == torch.bfloat16


def test_float16_is_for_servers_only(make: Make) -> None:
    policy = make("float16")
    assert policy.precision == Precision(torch.float32, torch.float32, torch.float16)
    assert policy(pack_row(samples(0))).logprobs.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"weights_dtype = model with model.dtype = float16: gradients would underflow"
    ):
        config(model={"dtype": "float16"}, learner={"weights_dtype": "model"})


def test_pure_bfloat16_is_warned_of_with_the_share_of_weights_that_a_step_changes() -> None:
    weights = {"a": torch.full((30_000,), 2.0, dtype=torch.bfloat16), "b": torch.zeros(10_000, dtype=torch.bfloat16)}
    assert changed_share(weights.items(), 1e-6) == 0.25  # 0 + 1e-6 is its own number; 2 + 1e-6 is 2
    assert changed_share(weights.items(), 0.1) == 1.0
    pure = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    text = find_rounding_warning(pure, weights.items, 1e-6)
    assert text is not None
    assert "a step changes 25.00% of them" in text
    assert find_rounding_warning(Precision(), weights.items, 1e-6) is None


@pytest.mark.parametrize("then", [{"learner.weights_dtype": "model"}, {}])
def test_a_resume_names_a_changed_type_of_weights(then: dict[str, str]) -> None:
    """A checkpoint that names none was stepped on in model.dtype."""
    now = config(model={"dtype": "bfloat16"})
    made_with = {**start.settings(now), **then}
    if not then:
        del made_with["learner.weights_dtype"]
    found = Checkpoint(Path("step-000003"), CheckpointInfo(3, 3, made_with))
    said = start.introduction(now, found, RunPosition(3, 3, 9, 1, None, None, False))
    assert said[1].endswith("used from here on: learner.weights_dtype = float32 (was model)")


def test_a_resume_in_float32_has_nothing_to_say_of_it() -> None:
    now = config()
    made_with = {name: value for name, value in start.settings(now).items() if name != "learner.weights_dtype"}
    found = Checkpoint(Path("step-000003"), CheckpointInfo(3, 3, made_with))
    assert len(start.introduction(now, found, RunPosition(3, 3, 9, 1, None, None, False))) == 1
