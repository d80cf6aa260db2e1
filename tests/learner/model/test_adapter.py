"""An adapter next to a base that stays: what it computes, what trains, and what is published of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from slipstream.learner.feed.packing import pack
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.reference import AdapterOff, load_reference
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection, LoraSection, ModelSection, RunConfig
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.kit.learner import gradients, sample, step_rollouts
from tests.kit.model import tiny_model
from tests.learner.families import MIXTURES, PADDED, TEXT, VISION

peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
IDS = list(range(1, 40))
SAMPLES = [sample(14, 4, seed=i, rollout=i) for i in range(4)]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
    "expression": {"target_modules": r".*\.(k_proj|gate_proj)"},
    "auto": {"target_modules": "auto"},
    "head": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["input_layernorm"], "init_lora_weights": "gaussian"},
}


def adapted(path: Path, dtype: str = "float32", learner: LearnerSection | None = None, **lora: Any) -> Policy:
    torch.manual_seed(3)
    model, section = ModelSection(path=str(path), dtype=dtype), LoraSection(**{"r": 4, **lora})
    return load_policy(str(path), model, Scoring(1.0, 16), learner or LearnerSection(), lora=section)


def plain(path: Path, dtype: str = "float32") -> Policy:
    model = ModelSection(path=str(path), dtype=dtype)
    return load_policy(str(path), model, Scoring(1.0, 16), LearnerSection(weights_dtype="model"))


def trained(policy: Policy, steps: int = 2, **settings: Any) -> Policy:
    """After steps that are long enough to see."""
    trainer = PolicyTrainer(policy, LearnerSection(learning_rate=1e-2, advantage="rloo", **settings), 64, _off(policy))
    for _ in range(steps):
        trainer.step(pack(SAMPLES, 64), step_rollouts(SAMPLES))
    return policy


def _off(policy: Policy) -> AdapterOff:
    assert policy.adapter is not None
    return AdapterOff(policy, policy.adapter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_first_the_policy_is_the_base_to_the_bit(model_path: Path, kind: str, dtype: str) -> None:
    assert np.array_equal(adapted(model_path, dtype, **KINDS[kind]).score(IDS), plain(model_path, dtype).score(IDS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_alone_trains_in_float32_and_the_base_stays(model_path: Path, kind: str, dtype: str) -> None:
    policy = adapted(model_path, dtype, **KINDS[kind])
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trained(policy)
    wanted = policy.precision.compute
    for name, weight in policy.named_parameters():
        assert weight.dtype is (torch.float32 if weight.requires_grad else wanted), name
        assert torch.equal(weight, before[name]) is not weight.requires_grad, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_is_what_peft_merges(model_path: Path, tmp_path: Path, kind: str) -> None:
    """Under the names, in the order and with the shapes of the model without an adapter."""
    policy = trained(adapted(model_path, **KINDS[kind]))
    assert policy.adapter is not None
    policy.adapter.save(tmp_path / "adapter")
    base = plain(model_path).model
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = dict(policy.named_weights())
    assert [(name, of.shape) for name, of in ours.items()] == [
        (name, of.shape) for name, of in plain(model_path).named_weights().layout().items()
    ]
    moved = 0
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6, msg=name)
        moved += not torch.equal(weight, tiny_model().state_dict()[name])
    assert moved, "or nothing is tested"


@pytest.mark.parametrize("kind", ["lora", "dora", "head"])
def test_servers_with_the_merged_weights_score_as_the_learner_does(model_path: Path, tmp_path: Path, kind: str) -> None:
    policy = trained(adapted(model_path, **KINDS[kind]))
    policy.save(tmp_path / "model")
    np.testing.assert_allclose(plain(tmp_path / "model").score(IDS), policy.score(IDS), atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "some"])
def test_the_gradient_is_that_of_pefts_own_forward(model_path: Path, tmp_path: Path, kind: str) -> None:
    """peft computes the same loss over the same tokens, each sequence alone by the model's eager attention; the rows of
    the policy hold several sequences."""
    policy = trained(adapted(model_path, **KINDS[kind]))
    assert policy.adapter is not None
    policy.adapter.save(tmp_path / "adapter")
    policy.zero_grad()
    for row in pack(SAMPLES, 32):
        policy(row).logprobs.sum().backward()
    network = plain(model_path).model
    network.set_attn_implementation("eager")
    theirs = peft.PeftModel.from_pretrained(network, tmp_path / "adapter", is_trainable=True)
    for of in SAMPLES:
        ids = torch.from_numpy(of.token_ids).long()
        logprobs = log_softmax(theirs(input_ids=ids[None]).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        chosen[torch.from_numpy(of.weights[1:]) > 0].sum().backward()
    expected = {name.removeprefix("base_model."): of for name, of in gradients(theirs).items()}
    found = gradients(policy)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * max(1.0, scale), rtol=1e-5, msg=name)


def test_weights_are_merged_one_at_a_time(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot never holds two merged matrices, and its layout holds none."""
    from slipstream.learner.model import export

    alive: list[torch.Tensor] = []
    most, merge = 0, export.merged_weight

    def watched(layer: Any, weight: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(of() is not None for of in alive))  # type: ignore[operator]
        whole = merge(layer, weight)
        alive.append(weakref.ref(whole))  # type: ignore[arg-type]
        return whole

    policy = trained(adapted(model_path))
    monkeypatch.setattr(export, "merged_weight", watched)
    probe = Probe([1, 2], np.zeros(1, dtype=np.float32))
    assert policy.named_weights().layout()
    assert not alive
    snapshot = Snapshot(1, policy.named_weights(), probe, torch.bfloat16)
    assert len(alive) == 14, "seven matrices in each of two layers"
    assert most <= 1
    held_bytes = snapshot.manifest.views(snapshot.flat)
    for name, weight in policy.named_weights():
        assert torch.equal(held_bytes[name], weight.bfloat16()), name


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.wide)], ids=str
)
def test_layers_that_are_run_otherwise_give_the_same_step(model_path: Path, settings: dict[str, Any]) -> None:
    """By plain gradients: AdamW would make whole steps of what rounding leaves of the first matrix's, which is 0 at
    first."""
    usual = trained(adapted(model_path), kl_coef=0.1, optim="sgd")
    other = trained(adapted(model_path, learner=LearnerSection(**settings)), kl_coef=0.1, optim="sgd")
    first = dict(adapted(model_path).named_weights())
    for (name, one), (_, same) in zip(usual.named_weights(), other.named_weights(), strict=True):
        torch.testing.assert_close(one, same, atol=1e-6, rtol=1e-5, msg=name)
        assert torch.equal(one, first[name]) is not name.endswith("_proj.weight"), name


def test_packing_cannot_change_the_step(model_path: Path) -> None:
    def step(budget: int) -> dict[str, torch.Tensor]:
        policy = adapted(model_path)
        trainer = PolicyTrainer(policy, LearnerSection(learning_rate=1e-3, optim="sgd"), 64)
        trainer.step(pack(SAMPLES, budget), step_rollouts(SAMPLES))
        return dict(policy.named_weights())

    one, several = step(512), step(16)
    for name, weight in one.items():
        torch.testing.assert_close(several[name], weight, atol=1e-6, rtol=1e-5, msg=name)


def test_the_reference_is_the_base_without_a_second_model(model_path: Path) -> None:
    config = RunConfig(
        model={"path": str(model_path)},
        task={"path": "task.py:task"},
        lora={"r": 4},
        learner={"kl_coef": 0.1, "advantage": "rloo"},
    )
    policy = adapted(model_path)
    reference = load_reference(config, Scoring(1.0, 16), policy)
    assert isinstance(reference, AdapterOff)
    trainer = PolicyTrainer(policy, config.learner.model_copy(update={"learning_rate": 1e-2}), 64, reference)
    (row,) = pack(SAMPLES, 64)
    base = plain(model_path)(row).logprobs
    figures = [trainer.step(pack(SAMPLES, 64), step_rollouts(SAMPLES)).objective["kl_reference"] for _ in range(3)]
    assert torch.equal(reference.logprobs(row), base)
    assert not torch.equal(policy(row).logprobs, base)
    assert figures[0] == pytest.approx(0, abs=1e-6)
    assert (figures[2] or 0) > 1e-4
    assert any(of.requires_grad for of in policy.parameters()), "the adapter is on again, and trains"
    assert "reference" not in trainer.state()
    with pytest.raises(ValueError, match=r"reference_sync_steps.*set it to 0"):
        reference.follow(policy, 0.5)


def test_decoupled_with_previous_weights_scores_under_the_adapter_before_the_last_step(model_path: Path) -> None:
    policy = adapted(model_path)
    section = LearnerSection(learning_rate=1e-2, advantage="rloo", correction="decoupled", proximal="last_step")
    trainer = PolicyTrainer(policy, section, 64)
    rows = pack(SAMPLES, 64)
    before = policy(rows[0]).logprobs.detach()
    trainer.step(rows, step_rollouts(SAMPLES))
    after = policy(rows[0]).logprobs.detach()
    previous = trainer.previous_weights
    assert previous is not None
    with previous.in_place():
        torch.testing.assert_close(policy(rows[0]).logprobs.detach(), before, atol=0, rtol=0)
    assert torch.equal(policy(rows[0]).logprobs.detach(), after)
    trainer.step(rows, step_rollouts(SAMPLES))


@pytest.mark.parametrize("name", [*TEXT, *MIXTURES, *VISION, *PADDED])
def test_every_family_takes_an_adapter_and_is_published_as_without(name: str, tmp_path: Path) -> None:
    make: Callable[[], Any] = {**TEXT, **MIXTURES, **VISION, **PADDED}[name]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    policy, base = adapted(tmp_path / "model"), plain(tmp_path / "model")
    ids = [i % 90 + 1 for i in range(20)]
    np.testing.assert_array_equal(policy.score(ids), base.score(ids))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert list(policy.named_weights().layout()) == list(base.named_weights().layout())
    policy.save(tmp_path / "merged")
    np.testing.assert_allclose(plain(tmp_path / "merged").score(ids), policy.score(ids), atol=2e-4)
    assert np.abs(policy.score(ids) - base.score(ids)).max() > 1e-3
    outside = [name for name, of in policy.named_parameters() if of.requires_grad and "visi" in name]
    assert not outside, "no row passes through it"


def test_a_layer_that_is_computed_past_its_adapter_is_refused(tmp_path: Path) -> None:
    PADDED["Mamba (a state)"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'computes dt_proj with .*set lora.exclude_modules = \["dt_proj"\]'):
        adapted(tmp_path, target_modules=["in_proj", "dt_proj"])
    adapted(tmp_path, target_modules=["in_proj", "dt_proj"], exclude_modules=["dt_proj"])


def test_a_mixture_s_routers_are_kept_even_with_an_adapter(tmp_path: Path) -> None:
    MIXTURES["Qwen3-MoE"]().save_pretrained(tmp_path)
    model, lora = ModelSection(path=str(tmp_path)), LoraSection(r=4)
    policy = load_policy(str(tmp_path), model, Scoring(1.0, 16, routing=True), LearnerSection(), lora=lora)
    trainer = PolicyTrainer(policy, LearnerSection(router_aux_loss_coef=0.1, learning_rate=1e-3), 64)
    figures = trainer.step(pack(SAMPLES, 64), step_rollouts(SAMPLES))
    assert (figures.objective["aux_loss"] or 0) > 0


@pytest.mark.parametrize(
    ("lora", "tied", "says"),
    [
        ({"target_modules": ["lm_head"]}, False, r"lm_head is the output layer.*modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, False, r"embed_tokens is a Embedding.*only linear layers"),
        (
            {"target_modules": ["nonsense"]},
            False,
            r'lora.target_modules = \["nonsense"\]: nothing in the model is called nonsense; .* are q_proj, k_proj',
        ),
        ({"modules_to_save": ["lm_head"]}, True, r"modules_to_save = \['lm_head'\].*shares its weight with"),
        ({"modules_to_save": ["embed_tokens"]}, True, r"embed_tokens shares its weight with lm_head"),
    ],
    ids=str,
)
def test_layers_that_cannot_have_an_adapter_are_refused(
    lora: dict[str, Any], tied: bool, says: str, tmp_path: Path
) -> None:
    tiny_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=says):
        adapted(tmp_path, **lora)


def test_a_missing_peft_is_told_with_the_line_that_installs_it(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.model.adapter.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora.r = 4 needs peft.*pip install 'slipstream-rl\[lora\]'"):
        adapted(model_path)


def test_what_is_published_alone_is_what_peft_would_load(model_path: Path, tmp_path: Path) -> None:
    policy = trained(adapted(model_path, rank_pattern={"q_proj": 2}))
    assert policy.adapter is not None
    alone = policy.adapter.alone()
    snapshot = Snapshot(1, alone, Probe([1, 2], np.zeros(1, np.float32)), torch.float32)
    assert snapshot.adapter is not None
    folder = tmp_path
    (folder / "adapter_model.safetensors").write_bytes(snapshot.adapter.file)
    (folder / "adapter_config.json").write_text(snapshot.adapter.config)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        theirs = log_softmax(loaded(torch.tensor([IDS])).logits[0, :-1], -1)
    theirs = theirs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(theirs, policy.score(IDS), atol=1e-5)
