"""Every architecture that transformers knows: trained exactly, in which layout, or refused with a reason."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from slipstream.learner.feed.packing import pack_row
from slipstream.learner.model.build import load_policy
from slipstream.protocol.config import ConfigError, ModelSection
from tests.learner.architectures import RESULTS, NotTiny, tiny
from tests.learner.families import LONGEST
from tests.learner.model.test_model_families import SCORING, alone, exact, samples

# Compared in float32, as their layers do not compute in another type.
SINGLE = {"recurrent_gemma", "xglm", "xlstm"}


def judge(model_type: str, folder: Path) -> tuple[str, str]:
    """Return the layout in which the architecture trains, or "refused", and the words of the refusal.

    Raises:
        NotTiny: No small model of it can be made.
        AssertionError: It would train on wrong log-probs or gradients.
    """
    torch.manual_seed(0)
    tiny(model_type).save_pretrained(folder)
    try:
        policy = load_policy(str(folder), ModelSection(path=str(folder)), SCORING, longest=LONGEST)
    except ConfigError as refusal:
        return "refused", str(refusal)
    network = policy.model if model_type in SINGLE else policy.model.double()
    with suppress(ValueError, AttributeError):  # the grouped product of experts has no float64
        network.set_experts_implementation("eager")
    reference = exact(network) if model_type not in SINGLE else deepcopy(network)
    items = samples()
    row = pack_row(items, branches=policy.layout == "trie")
    scores = policy(row).logprobs
    expected = torch.cat([alone(reference, item.token_ids) for item in items])
    in_order = torch.cat([scores[row.rollout == item.rollout] for item in items])
    wide = 20 if model_type in SINGLE else 1
    torch.testing.assert_close(in_order.double(), expected.double(), atol=2e-4 * wide, rtol=0)
    in_order.sum().backward()
    expected.sum().backward()
    for (name, ours), theirs in zip(network.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        elif theirs.grad.any():
            assert ours.grad is not None, name
            apart = float((ours.grad - theirs.grad).abs().max() / (theirs.grad.abs().max() + 1e-3))
            assert apart < 2e-4 * wide, f"{name}: its gradient is {apart:.1e} off"
    return policy.layout, ""


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", RESULTS)
def test_it_trains_exactly_or_is_refused_with_a_reason(model_type: str, tmp_path: Path) -> None:
    expected = RESULTS[model_type]
    try:
        found, why = judge(model_type, tmp_path)
    except NotTiny:
        found, why = "not built", ""
    assert (found, why) if found != expected else found == expected
    if found == "refused":
        assert why.startswith("model.path")
