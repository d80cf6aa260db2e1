"""The arithmetic of a step, as torch counts what the model does; no GPU is here, so its peak is a stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from slipstream.learner.feed.packing import pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.training import flops
from slipstream.learner.training.flops import Meter, Work, peak_of
from tests.kit.learner import sample


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy()


def test_products_with_weights_are_those_that_torch_counts(policy: Policy) -> None:
    rows = pack([sample(30, 5, 0), sample(20, 5, 1, rollout=1)], 64)
    (row,) = rows
    with FlopCounterMode(display=False) as counter:
        policy(row).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    products = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    work = Work.of(policy)
    ours = row.tokens * work.per_token + len(row.positions) * work.per_scored
    # The output layer's products may be computed twice, and the embedding's backward is none.
    assert ours == pytest.approx(products, rel=0.25)
    assert work.per_token == 6 * sum(
        weight.numel()
        for name, weight in policy.model.named_parameters()
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name
    )


def test_attention_is_causal_and_along_each_path(policy: Policy) -> None:
    """Four products of a channel each way for every pair: q k and p v, forward once and backward twice."""
    (row,) = pack([sample(30, 5, 0)], 64)
    work = Work.of(policy)
    without = row.tokens * work.per_token + len(row.positions) * work.per_scored
    config = policy.model.config
    channels = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size)
    pairs = row.tokens * (row.tokens + 1) / 2
    assert work.of_rows([row]) - without == 12 * channels * config.num_hidden_layers * pairs
    windowed = Work(0, 0, 1, full_layers=1, window_layers=2, window=3)
    assert windowed.of_rows([row]) == pairs + 2 * (1 + 2 + 3 * (row.tokens - 2))


@pytest.mark.parametrize(
    ("kind", "layers", "share"),
    [
        ("qwen3", (8, 0), 1),
        ("qwen3_next", (2, 0), 10 / 512),
        ("granitemoehybrid", (2, 0), 2 / 8),
        ("falcon_h1", (8, 0), 1),
        ("gpt_oss", (4, 4), 4 / 128),
        ("ernie4_5_moe", (8, 0), 6 / 64),
        ("hunyuan_v1_moe", (8, 0), 1),
        ("mixtral", (8, 0), 2 / 8),
    ],
)
def test_layers_without_attention_and_experts_that_are_not_asked_do_not_count(
    kind: str, layers: tuple[int, int], share: float
) -> None:
    types = {"layer_types": 2 * ["mamba", "mamba", "mamba", "attention"]} if kind == "granitemoehybrid" else {}
    config = AutoConfig.for_model(kind, num_hidden_layers=8, **types)
    assert (flops.attending_layers(config), flops.share_of_experts(config)) == (layers, share)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H1000", None),
    ],
)
def test_a_device_is_known_by_what_it_calls_itself(name: str, tera: float | None) -> None:
    assert peak_of(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_without_a_known_peak_there_is_no_figure(policy: Policy) -> None:
    meter = Meter(policy, torch.device("cpu"))
    rows = pack([sample(30, 5, 0)], 64)
    assert (meter.flops(rows), meter.metrics(meter.flops(rows), 1.0)) == (0.0, {})


def test_the_share_of_a_stand_in_for_a_gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "peak", lambda device, compute: 1e9)
    meter = Meter(policy, torch.device("cpu"))
    rows = pack([sample(30, 5, 0)], 64)
    assert meter.metrics(meter.flops(rows), 2.0) == {"mfu": pytest.approx(Work.of(policy).of_rows(rows) / 2e9)}


def test_in_float32_no_peak_is_known() -> None:
    assert flops.peak(torch.device("cuda"), torch.float32) is None
