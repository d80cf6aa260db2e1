"""What is trained of each family of models, what is published of it, and what is refused at the start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import BertConfig, BertLMHeadModel, DogeConfig, DogeForCausalLM, Phi3Config, Phi3ForCausalLM

from slipstream.learner.feed.packing import Sample, pack_row
from slipstream.learner.model.build import check_packing, load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from tests.kit.model import SIZES
from tests.learner.families import LONGEST, MIXTURES, PADDED, REFUSED, TEXT, VISION, VOCABULARY

SCORING = Scoring(1.0, 16)
LENGTHS = (70, 12, 45, 20)


def loaded(make: Callable[[], Any], folder: Path, longest: int | None = LONGEST) -> Policy:
    torch.manual_seed(0)
    make().save_pretrained(folder)
    return load_policy(str(folder), ModelSection(path=str(folder)), SCORING, longest=longest)


def samples() -> list[Sample]:
    """Sequences of several lengths; the first two share their first ten tokens."""
    random = np.random.default_rng(1)
    ids = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    ids[1][:10] = ids[0][:10]
    return [
        Sample(each, np.zeros(len(each), np.float32), trains.astype(np.float32), 0 * each, trains, i)
        for i, each in enumerate(ids)
        for trains in [np.arange(len(each)) > 0]
    ]


def exact(network: Any) -> Any:
    """A copy that computes in float64, through eager attention."""
    copied = deepcopy(network).double()
    with suppress(ValueError, AttributeError, ImportError):
        copied.set_attn_implementation("eager")
    with suppress(ValueError, AttributeError):
        copied.set_experts_implementation("eager")  # the grouped product has no float64
    return copied


def alone(network: Any, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    """Log-probs of a sequence by itself, by the model's own logits, [T - 1]."""
    inputs = torch.from_numpy(ids).long()[None]
    logits = network(input_ids=inputs, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, inputs[0, 1:, None])[:, 0]


@pytest.mark.parametrize("name", [*TEXT, *MIXTURES, *VISION])
def test_a_packed_row_has_the_log_probs_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    policy = loaded({**TEXT, **MIXTURES, **VISION}[name], tmp_path)
    items = samples()
    row = pack_row(items)
    with torch.no_grad():
        scores = policy(row).logprobs
        reference = exact(policy.model)
        expected = [alone(reference, item.token_ids) for item in items]
    for i in range(len(items)):
        torch.testing.assert_close(scores[row.rollout == i].double(), expected[i], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", PADDED)
def test_where_layers_mix_positions_sequences_are_a_batch(name: str, tmp_path: Path) -> None:
    policy = loaded(PADDED[name], tmp_path)
    assert policy.layout == "padded"
    assert policy.layout_note.startswith("learner.layout: padded, since ")
    items = samples()
    row = pack_row(items, branches=False)
    with torch.no_grad():
        expected = [alone(exact(policy.model), item.token_ids) for item in items]
    for one_batch in (False, True):
        policy.one_batch = one_batch
        with torch.no_grad():
            scores = policy(row).logprobs
        for i in range(len(items)):
            torch.testing.assert_close(scores[row.rollout == i].double(), expected[i], atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", ["trie", "packed", "padded"])
def test_every_layout_of_a_model_has_the_same_gradients(layout: str, tmp_path: Path) -> None:
    reference = exact(loaded(TEXT["Qwen3"], tmp_path).model)
    model = ModelSection(path=str(tmp_path))
    policy = load_policy(model.path, model, SCORING, LearnerSection(layout=layout), longest=LONGEST)
    assert (policy.layout, policy.layout_note) == (layout, "")
    items = samples()
    policy.model.double()
    policy(pack_row(items, branches=layout == "trie")).logprobs.sum().backward()
    for item in items:
        alone(reference, item.token_ids).sum().backward()
    for ours, theirs in zip(policy.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_a_layout_that_a_model_cannot_have_is_refused(tmp_path: Path) -> None:
    PADDED["LFM2 (convolutions)"]().save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    with pytest.raises(ConfigError, match="conv"):
        load_policy(model.path, model, SCORING, LearnerSection(layout="trie"), longest=LONGEST)


def test_a_mixing_that_untrained_weights_hardly_show_is_found(tmp_path: Path) -> None:
    """All scores of such a model are nearly alike, and so are those of a row whose sequences are mixed."""
    torch.manual_seed(0)
    network = PADDED["LFM2 (convolutions)"]()
    for parameter in network.parameters():
        parameter.data.mul_(0.5)
    network.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING, longest=LONGEST)
    assert policy.layout == "padded"


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertLMHeadModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no causal language model"):
        load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING, longest=LONGEST)


def test_the_logits_of_a_model_are_scaled_as_it_scales_them(tmp_path: Path) -> None:
    assert loaded(TEXT["Granite (scales its logits)"], tmp_path).logit_scale == 1 / 3


@pytest.mark.parametrize("name", [*TEXT, *MIXTURES])
def test_what_is_published_is_what_a_checkpoint_holds(name: str, tmp_path: Path) -> None:
    policy = loaded({**TEXT, **MIXTURES}[name], tmp_path)
    published = list(policy.named_weights())
    held = load_file(tmp_path / "model.safetensors")
    assert sorted(name for name, _ in published) == sorted(held)
    for name, tensor in published:
        assert torch.equal(tensor, held[name])
        assert not tensor.requires_grad


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_published_follows_the_weights(name: str, tmp_path: Path) -> None:
    policy = loaded(MIXTURES[name], tmp_path)
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    names = {name for name, _ in policy.model.named_parameters()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    after = dict(policy.named_weights())
    experts = [name for name in before if "experts." in name and name not in names]
    assert len(experts) >= 12
    assert all(torch.equal(after[name], before[name] + 1.0) for name in experts)


@pytest.mark.parametrize("name", VISION)
def test_of_a_model_that_sees_the_text_tower_trains_and_is_published(name: str, tmp_path: Path) -> None:
    policy = loaded(VISION[name], tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    published = dict(policy.named_weights())
    assert set(published) < set(held)
    assert all(torch.equal(tensor, held[name]) for name, tensor in published.items())
    assert not any("vis" in name or "multi_modal" in name for name in published)
    left = [name for name in held if name not in published]
    assert all("vis" in name or "multi_modal" in name for name in left)
    policy(pack_row(samples())).logprobs.sum().backward()
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_learner_would_get_wrong_is_refused(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        loaded(make, tmp_path)


@pytest.mark.parametrize("name", ["Phi-MoE, LongRoPE above its bound", "Llama, dynamic RoPE above its bound"])
def test_the_remedy_of_a_length_works(name: str, tmp_path: Path) -> None:
    loaded(REFUSED[name][0], tmp_path, longest=32)


def test_longrope_takes_the_factors_that_servers_take(tmp_path: Path) -> None:
    """vLLM takes the long ones for every sequence if its context is longer than the original, and else none."""
    policy = loaded(TEXT["Phi-3, LongRoPE"], tmp_path)
    facts = policy.model.config.to_dict()
    rope = facts["rope_parameters"]
    facts["rope_parameters"] = {**rope, "short_factor": rope["long_factor"]}
    always = Phi3ForCausalLM(Phi3Config.from_dict(facts))
    always.load_state_dict(policy.model.state_dict())
    short, long = samples()[1], samples()[0]
    for item in (short, long):
        ours = torch.from_numpy(policy.score(item.token_ids.tolist())).double()
        torch.testing.assert_close(ours, alone(exact(always), item.token_ids), atol=2e-4, rtol=0)

    within = load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING, longest=32)
    expected = alone(exact(Phi3ForCausalLM.from_pretrained(tmp_path)), short.token_ids)
    ours = torch.from_numpy(within.score(short.token_ids.tolist())).double()
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
    assert (expected - alone(exact(always), short.token_ids)).abs().max() > 0.01


def test_weights_that_a_checkpoint_does_not_hold_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TEXT["Llama"]()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight \[48, 32\] \(not there\)"):
        load_policy(str(tmp_path), ModelSection(path=str(tmp_path)), SCORING)


def test_whatever_mixes_the_sequences_of_a_row_is_found(tmp_path: Path) -> None:
    """As a capacity of experts does, or a norm over the row; no type of layer tells of it."""
    policy = loaded(TEXT["Llama"], tmp_path)
    check_packing(policy, LONGEST)
    handle = policy.model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out - out.mean(1, keepdim=True))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM scores a (sequence|token)"):
        check_packing(policy, LONGEST)
    handle.remove()
    check_packing(policy, LONGEST)
    assert policy.model.config._attn_implementation == "varlen_sdpa"


def test_a_mixing_that_reaches_far_is_found_too(tmp_path: Path) -> None:
    """No sequence of the first, short row reaches back so far."""
    policy = loaded(TEXT["Llama"], tmp_path)
    mlp = policy.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _, __, out: out + torch.nn.functional.pad(out, (0, 0, 64, 0))[:, :-64])
    check_packing(policy, None)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM scores a"):
        check_packing(policy, 300)


def test_a_window_that_begins_beyond_the_short_sequences_is_found_in_a_full_row(tmp_path: Path) -> None:
    """Such as a window that is built into the mask, or experts of a fixed capacity."""
    policy = loaded(TEXT["Llama"], tmp_path)
    mlp = policy.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _, __, out: out + torch.nn.functional.pad(out, (0, 0, 400, 0))[:, :-400])
    check_packing(policy, 1000)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM scores a (sequence of|token)"):
        check_packing(policy, 1000, 2048)


def test_sixteen_bits_do_not_hide_layers_that_mix(tmp_path: Path) -> None:
    """Weights that were never trained mix sequences by less than bfloat16 rounds off."""
    torch.manual_seed(0)
    PADDED["LFM2 (convolutions)"]().bfloat16().save_pretrained(tmp_path)
    for kept in ("float32", "model"):
        model = ModelSection(path=str(tmp_path), dtype="bfloat16")
        policy = load_policy(str(tmp_path), model, SCORING, LearnerSection(weights_dtype=kept), LONGEST)
        assert policy.layout == "padded"
        assert policy.precision.compute is torch.bfloat16
        assert {weight.dtype for weight in policy.parameters()} == {policy.precision.weights}


@pytest.mark.parametrize(
    "logits",
    [lambda x: 30 * (x / 30).tanh(), lambda x: x + 0.01 * torch.arange(x.shape[-1]) / 32],
    ids=["a soft cap of no known name", "its own bias"],
)
def test_logits_that_differ_little_from_the_output_layers_are_refused(
    logits: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    policy = loaded(TEXT["Llama"], tmp_path)
    whole = policy.model.forward

    def forward(*args: Any, **named: Any) -> Any:
        found = whole(*args, **named)
        found.logits = logits(found.logits)
        return found

    policy.model.forward = forward
    with pytest.raises(ConfigError, match="computes its logits in a way that the learner does not know"):
        policy.check_logits()


def test_a_scale_that_is_nearly_one_is_found(tmp_path: Path) -> None:
    policy = loaded(TEXT["Llama"], tmp_path)
    whole = policy.model.forward

    def forward(*args: Any, **named: Any) -> Any:
        found = whole(*args, **named)
        found.logits = found.logits * 1.01
        return found

    policy.model.forward = forward
    policy.check_logits()
    assert policy.logit_scale == pytest.approx(1.01, rel=1e-4)


def test_a_table_of_positions_that_ends_below_the_servers_context_is_named(tmp_path: Path) -> None:
    for kind in ("Opt", "BioGpt"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind.replace('Opt', 'OPT')}Config")(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            **({"word_embed_proj_dim": 32} if kind == "Opt" else {}),
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        path = str(tmp_path / kind)
        with pytest.raises(ConfigError, match=r"its table of positions ends at 128, and vllm\.max_model_len = 1000"):
            load_policy(path, ModelSection(path=path), SCORING, longest=1000)
        load_policy(path, ModelSection(path=path), SCORING, longest=128)


def test_attention_that_picks_tokens_by_scores_that_look_ahead_is_refused_above_its_window(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep_window_size = 64 .* vllm\.max_model_len = 100: lower it to 64"):
        loaded(lambda: DogeForCausalLM(DogeConfig(**SIZES, keep_window_size=64)), tmp_path)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-MoE", "Gemma 3"])
def test_rounding_to_16_bits_is_not_taken_for_mixing(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    {**TEXT, **MIXTURES}[name]().save_pretrained(tmp_path)
    load_policy(str(tmp_path), ModelSection(path=str(tmp_path), dtype="bfloat16"), SCORING, longest=LONGEST)
