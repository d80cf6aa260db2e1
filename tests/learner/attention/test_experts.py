"""Routers that are given their choice: exactly their own scores where it is theirs, in every layout, for every shape of
router that transformers has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from slipstream.learner.feed.packing import PackedRow, Sample, pack_row
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from tests.learner.architectures import tiny
from tests.learner.families import _DEEPSEEK, _LATENT, _SIZES, LONGEST, MIXTURES, TEXT
from tests.learner.model.test_model_families import samples

_GROUPS: dict[str, Any] = {**_DEEPSEEK, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
GROUPED: dict[str, Callable[[], Any]] = {
    "DeepSeek-V3, groups": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**{**_SIZES, **_LATENT}, **_GROUPS)),
    "DeepSeek-V2, groups": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**{**_SIZES, **_LATENT}, **_GROUPS, topk_method="group_limited_greedy")
    ),
}
# Each has a router of another shape.
KINDS = [
    "afmoe",
    "ernie4_5_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "lfm2_moe",
    "llama4_text",
    "minimax_m2",
    "nemotron_h",
]
REFUSED = {
    "doge": "no layer chooses experts by torch.topk",
    "jetmoe": "layer 0 chooses experts more than once",
    "phimoe": "no layer chooses experts by torch.topk",
}


def policy_of(network: Any, folder: Path, **learner: Any) -> Policy:
    network.save_pretrained(folder)
    section, model = LearnerSection(**learner), ModelSection(path=str(folder))
    return load_policy(str(folder), model, Scoring(1.0, 16, replay=True), section, longest=LONGEST)


def recorded(policy: Policy, items: list[Sample]) -> list[Sample]:
    """The samples with the experts that the policy chooses for each sequence alone."""
    assert policy.replay is not None
    found = []
    for item in items:
        with policy.replay.watching() as chosen:
            policy.score(item.token_ids.tolist())
        experts = torch.stack(chosen, 1).numpy().astype(np.int16)
        unknown = np.full((len(item) - len(experts), *experts.shape[1:]), -1, np.int16)
        found.append(replace(item, experts=np.concatenate([experts, unknown])))
    return found


def row_of(policy: Policy, items: list[Sample]) -> PackedRow:
    return pack_row(items, branches=policy.layout == "trie")


@pytest.mark.parametrize("name", [*MIXTURES, *GROUPED, *KINDS])
def test_its_own_choice_gives_its_own_scores_and_others_do_not(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = {**MIXTURES, **GROUPED}[name]() if name not in KINDS else tiny(name)
    policy = policy_of(network, tmp_path)
    assert policy.routed_layers is not None
    items = samples()
    plain = policy(row_of(policy, items)).logprobs.detach()
    row = row_of(policy, recorded(policy, items))
    assert row.experts is not None
    assert row.experts.shape == (row.tokens, len(policy.routed_layers.layers), policy.routed_layers.top_k)
    torch.testing.assert_close(policy(row).logprobs, plain, atol=1e-6, rtol=0)
    others = (row.experts + 1) % policy.routed_layers.experts
    with policy.replay.watching() as chosen:  # type: ignore[union-attr]
        away = policy(replace(row, experts=others)).logprobs.detach()
    assert float((away - plain).abs().max()) > 1e-6
    if policy.layout == "trie":  # else the watch sees the last batch alone
        assert torch.equal(torch.stack(chosen, 1).short(), others)
    unknown = torch.full_like(row.experts, -1)
    assert torch.equal(policy(replace(row, experts=unknown)).logprobs, plain)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_the_given_experts_in_every_layout(
    layout: str, checkpointed: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = MIXTURES["Qwen3-MoE"]()
    expected = policy_of(network, tmp_path / "trie", layout="trie")
    items = recorded(expected, samples())
    items = [replace(item, experts=np.where(item.experts < 0, -1, (item.experts + 1) % 4)) for item in items]
    policy = policy_of(network, tmp_path / layout, layout=layout, gradient_checkpointing=checkpointed)
    scores = []
    for each in (expected, policy):
        row = row_of(each, items)
        logprobs = each(row).logprobs
        scores.append(torch.cat([logprobs[row.rollout == item.rollout] for item in items]))
        scores[-1].square().sum().backward()
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=0)
    for (name, ours), theirs in zip(policy.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)
        assert "gate.weight" not in name or (ours.grad is not None and ours.grad.any())


def test_tokens_that_sequences_share_have_the_first_known_experts(tmp_path: Path) -> None:
    ids = np.array([5, 6, 7, 8], np.int32)
    weights = np.array([0, 0, 0, 1], np.float32)

    def sample(last: int, value: int | None, rollout: int) -> Sample:
        experts = None if value is None else np.full((4, 1, 2), value, np.int16)
        if experts is not None:
            experts[0] = -1
        token_ids = np.array([*ids[:3], last], np.int32)
        return Sample(token_ids, 0 * weights, weights, 0 * ids, weights > 0, rollout, experts=experts)

    row = pack_row([sample(8, None, 0), sample(9, 2, 1), sample(10, 3, 2)])
    assert row.experts is not None
    assert row.experts[:, 0, 0].tolist() == [-1, 2, 2]
    assert pack_row([sample(8, None, 0)]).experts is None


@pytest.mark.parametrize("name", [*REFUSED, "Qwen3"])
def test_a_model_whose_routers_cannot_be_given_their_choice_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = TEXT[name]() if name in TEXT else tiny(name)
    with pytest.raises(ConfigError) as refusal:
        policy_of(network, tmp_path)
    text = str(refusal.value)
    assert text.startswith("learner.router_replay = true: ")
    assert REFUSED.get(name, "no layer chooses experts") in text
    assert text.endswith("set learner.router_replay = false")
    assert "\n" not in text
