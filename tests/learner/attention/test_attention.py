from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    masking_utils,
)

from slipstream.learner.attention import paths
from slipstream.learner.attention.packed import RowLayout, varlen_sdpa
from slipstream.learner.feed import trie
from slipstream.learner.feed.packing import PackedRow, Sample, pack_row
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ConfigError, ModelSection
from tests.kit.learner import sample
from tests.kit.messages import VOCABULARY
from tests.kit.tries import Sequences, Tensors, assert_same, dense, inputs, sequences, visible

CPU = torch.device("cpu")


def row_of(*sequences: list[int]) -> PackedRow:
    """A row in which each sequence trains its last token."""
    samples = []
    for tokens in sequences:
        ids = np.array([*tokens, 0], dtype=np.int32)
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[-1] = 1.0
        samples.append(Sample(ids, weights, weights, np.zeros_like(ids), weights > 0, 0))
    return pack_row(samples)


@settings(deadline=None, max_examples=40)
@given(sequences(), st.sampled_from([(4, 4), (4, 2)]), st.sampled_from([None, 1, 2, 5, 100]))
def test_gathered_paths_are_the_dense_mask_with_any_window(
    given_: Sequences, heads: tuple[int, int], window: int | None
) -> None:
    """This path runs where the trie cannot: outputs and gradients agree, and a window counts along each path."""
    built = trie.build(given_)
    tensors = inputs(built.tokens, heads)
    gathered = paths.along_paths(*tensors, paths.layout(built.starts.tolist(), built.reach.tolist(), CPU), None, window)
    assert_same(gathered, dense(tensors, visible(built, window)), tensors, tensors, 5e-14)


def test_model_output_equals_eager_attention(make_policy: Callable[..., Policy]) -> None:
    samples = [sample(length, 1, seed, rollout=seed) for seed, length in enumerate([17, 16, 9, 2])]
    row = pack_row(samples)
    packed = make_policy()(row).logprobs
    eager = make_policy("eager")
    apart = torch.cat([eager(pack_row([samples[i]])).logprobs for i in row.rollout.unique_consecutive()])
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_transformers_builds_no_mask_for_it(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()

    def no_mask(*_: object, **__: object) -> None:
        raise AssertionError("a mask was built")

    for name in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, no_mask)
    policy(pack_row([sample(6, 2, 0), sample(5, 2, 1)]))


def attended(row: PackedRow, tensors: Tensors, **arguments: Any) -> torch.Tensor:
    """[T, H, D], called as transformers does."""
    module = arguments.pop("module", torch.nn.Module())
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
    out, _ = varlen_sdpa(module, query, key, value, None, row_layout=RowLayout(row), **arguments)
    return out[0]


@pytest.mark.parametrize("window", [None, 3, 8, 9])
def test_a_window_holds_along_each_path(window: int | None) -> None:
    row = row_of([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 8, 7])
    built = trie.build(
        [np.array(ids, dtype=np.int32) for ids in ([*range(1, 10)], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 8, 7])]
    )
    tensors = inputs(row.tokens, (4, 2))
    assert_same(
        attended(row, tensors, sliding_window=window), dense(tensors, visible(built, window)), tensors, tensors, 5e-14
    )


def test_layers_with_and_without_a_window_are_those_of_eager_attention(tmp_path: Path) -> None:
    """A model that mixes them, on a row whose sequences share a prompt and are longer than the window."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    assert_as_eager(tmp_path)


def assert_as_eager(path: Path) -> None:
    """Two sequences in one row, with a common prompt, score as each does alone under transformers' own attention."""
    first, second = [5, 1, 6, 3, 7, 7, 2, 9, 11, 4, 8, 10], [5, 1, 6, 3, 7, 7, 2, 9, 3, 3]
    samples = [whole(ids, rollout) for rollout, ids in enumerate((first, second))]
    row = pack_row(samples)
    packed, eager = load(path, "varlen_sdpa")(row), load(path, "eager")
    for rollout, item in enumerate(samples):
        apart = eager(pack_row([item])).logprobs
        torch.testing.assert_close(packed.logprobs[row.rollout == rollout], apart, atol=2e-5, rtol=1e-5)


def whole(ids: list[int], rollout: int) -> Sample:
    """Every token but the first trains."""
    weights = np.ones(len(ids), dtype=np.float32)
    weights[0] = 0.0
    tokens = np.array(ids, dtype=np.int32)
    return Sample(tokens, -weights, weights, np.zeros_like(tokens), weights > 0, rollout)


def load(path: Path, implementation: str) -> Policy:
    return load_policy(str(path), ModelSection(path=str(path), attention=implementation), Scoring(1.0, 16))


def test_a_window_that_a_model_masks_outside_attention_is_its_config_s() -> None:
    """Qwen2-MoE says which layers have one; PhiMoE does not, and would silently see all tokens."""
    row = row_of([*range(1, 10)], [1, 2, 3, 4, 9, 9])
    built = trie.build([np.array(ids, dtype=np.int32) for ids in ([*range(1, 10)], [1, 2, 3, 4, 9, 9])])
    tensors = inputs(row.tokens, (4, 2))
    module = torch.nn.Module()
    config = SimpleNamespace(sliding_window=3, layer_types=["full_attention", "sliding_attention"])
    module.config = config  # type: ignore[assignment]
    for layer, window in ((0, None), (1, 3)):
        module.layer_idx = layer  # type: ignore[assignment]
        torch.testing.assert_close(attended(row, tensors, module=module), dense(tensors, visible(built, window)))
    config.layer_types = None
    with pytest.raises(ConfigError, match=r"sliding window of 3 tokens, but does not name the layers"):
        attended(row, tensors, module=module)
    config.max_position_embeddings = 3
    attended(row, tensors, module=module)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gemma3"])
def test_models_that_mix_windows_are_those_of_eager_attention(tmp_path: Path, kind: str) -> None:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 6,
        "initializer_range": 0.3,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    torch.manual_seed(0)
    if kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=8, query_pre_attn_scalar=8))
    else:
        experts = {"moe_intermediate_size": 32, "num_experts": 2, "num_experts_per_tok": 2}
        more = {"shared_expert_intermediate_size": 32, "use_sliding_window": True}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **experts, **more))
    model.save_pretrained(tmp_path)
    assert_as_eager(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softcap": 30.0}, "does not support softcap"),
        ({"s_aux": torch.zeros(4)}, "does not support s_aux"),
        ({"is_causal": False}, "is causal, and a layer of this model is not"),
    ],
)
def test_attention_that_it_would_compute_wrongly_is_refused(arguments: dict[str, Any], message: str) -> None:
    row = row_of([1, 2, 3])
    with pytest.raises(ConfigError, match=message):
        attended(row, inputs(3, (4, 2)), **arguments)


def test_a_model_with_sinks_is_trained_padded(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=None,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    policy = load(tmp_path, "varlen_sdpa")
    assert (policy.layout, policy.attention) == ("padded", "eager")
    assert policy.layout_note == "learner.layout: padded, since GptOssForCausalLM takes no attention but its own"


def test_values_may_be_narrower_than_keys() -> None:
    row = row_of([1, 2, 3, 4], [1, 2, 5])
    built = trie.build([np.array(ids, dtype=np.int32) for ids in ([1, 2, 3, 4], [1, 2, 5])])
    query, key, value = inputs(row.tokens, (4, 2))
    narrow = value[..., :5].detach().requires_grad_()
    tensors = [query, key, narrow]
    assert_same(attended(row, tensors), dense(tensors, visible(built)), tensors, tensors, 5e-14)


def test_under_autocast_all_three_are_16_bits() -> None:
    """Norms and rotary embeddings leave queries and keys in float32 next to values in bfloat16."""
    row = row_of([1, 2, 3, 4], [1, 2, 5])
    query, key, value = inputs(row.tokens, (4, 2), dtype=torch.float32)
    tensors = [query, key, value.to(torch.bfloat16)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attended(row, tensors)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), tensors)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32, torch.bfloat16]
