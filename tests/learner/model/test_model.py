from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from slipstream.learner.feed.packing import pack_row
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ConfigError, ModelSection
from tests.kit import VOCABULARY
from tests.kit.learner import sample

SCORING = Scoring(1.0, 16)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_score_is_the_model_s_own_log_softmax(make_policy: Callable[..., Policy], model_path: Path) -> None:
    ids = [5, 1, 60, 33, 7, 7, 2]
    logits = AutoModelForCausalLM.from_pretrained(model_path)(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    actual = make_policy(temperature=0.5).score(ids)
    assert actual.shape == (6,)
    torch.testing.assert_close(torch.from_numpy(actual), expected.detach(), atol=1e-5, rtol=1e-5)


def test_forward_applies_the_sampler_s_temperature(make_policy: Callable[..., Policy]) -> None:
    row = pack_row([sample(9, 2, 0)])
    cool, warm = make_policy(temperature=0.5)(row), make_policy(temperature=2.0)(row)
    assert (cool.entropy < warm.entropy).all()


def test_weights_have_checkpoint_names_and_no_gradient(make_policy: Callable[..., Policy]) -> None:
    weights = dict(make_policy().named_weights())
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"} <= set(weights)
    assert not any(weight.requires_grad for weight in weights.values())


def test_a_model_that_computes_its_logits_in_a_way_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.05)).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    assert load_policy(model.path, model, SCORING).logit_scale == 0.05
    forward = CohereForCausalLM.forward

    def squared(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        output.logits = (20 * output.logits).square()
        return output

    monkeypatch.setattr(CohereForCausalLM, "forward", squared)
    with pytest.raises(ConfigError, match=r"CohereForCausalLM computes its logits in a way"):
        load_policy(model.path, model, SCORING)


def test_softcapped_logits_are_understood_and_softcapped_attention_is_computed_padded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, final_logit_softcapping=0.5, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    load_policy(str(tmp_path), ModelSection(path=str(tmp_path), attention="eager"), SCORING)
    policy = load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING)
    assert policy.layout == "padded"
    assert "does not support softcap" in policy.layout_note


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING)


def test_an_unknown_attention_is_named(model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.attention = nonsense"):
        load_policy(str(model_path), ModelSection(path=str(model_path), attention="nonsense"), SCORING)
