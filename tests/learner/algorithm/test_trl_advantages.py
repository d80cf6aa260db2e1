"""Advantages and normalisers against TRL's own code on the same batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import advantages
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.step_data import StepRollouts, Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens
from tests.kit.trl import trl_advantages, trl_function, trl_loss

SIZE = 4
WEIGHTS = np.array([1.0, -0.5, 2.0])
# None where it is NaN; a group whose every rollout has a number, as groups have that reach the learner.
COMPONENTS = st.lists(
    st.lists(st.sampled_from([float("nan"), -1.0, 0.0, 0.3, 1.0, 7.5]), min_size=3, max_size=3).filter(
        lambda row: not np.isnan(row).all()
    ),
    min_size=SIZE,
    max_size=5 * SIZE,
).map(lambda rows: np.array(rows[: len(rows) // SIZE * SIZE]))


def step(components: np.ndarray, clip: tuple[float, float] | None = None) -> StepRollouts:
    """Groups of `SIZE` of these components, [S, 3]."""
    rewards = np.nansum(components * WEIGHTS, axis=1)
    count = len(rewards)
    return StepRollouts(
        rewards if clip is None else rewards.clip(*clip),
        np.arange(count) // SIZE,
        np.full(count, 3),
        components,
        WEIGHTS,
    )


def ours(rollouts: StepRollouts, advantage: str, **settings: Any) -> np.ndarray:
    return advantages.build(LearnerSection(advantage=advantage, **settings))(rollouts)


@pytest.mark.parametrize(
    ("advantage", "trainer", "of_trl"),
    [
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"scale_rewards": "none"}),
        ("batch", "grpo", {"scale_rewards": "batch"}),
        ("gdpo", "grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("rloo", "rloo", {}),
    ],
)
@settings(deadline=None, max_examples=50)
@given(components=COMPONENTS)
def test_advantages_are_trl_s(advantage: str, trainer: str, of_trl: dict[str, Any], components: np.ndarray) -> None:
    rewards = torch.from_numpy(components)
    expected = trl_advantages(trainer, rewards, SIZE, reward_weights=torch.from_numpy(WEIGHTS), **of_trl)
    np.testing.assert_allclose(ours(step(components), advantage), expected.numpy(), atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=50)
@given(components=COMPONENTS)
def test_rloo_with_clipped_rewards_and_normalised_advantages_is_trl_s(components: np.ndarray) -> None:
    rewards = torch.from_numpy(components)
    of_trl = {"reward_clip_range": (-1.0, 2.0), "normalize_advantages": True}
    expected = trl_advantages("rloo", rewards, SIZE, reward_weights=torch.from_numpy(WEIGHTS), **of_trl)
    actual = ours(step(components, clip=(-1.0, 2.0)), "rloo", normalise_advantages=True)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=50)
@given(components=COMPONENTS)
def test_async_grpo_is_trl_s(components: np.ndarray) -> None:
    """One group is compared, as TRL sums its rewards without weights."""
    components = components[:SIZE]
    trl = SimpleNamespace(
        reward_funcs=[lambda column=column, **_: column.tolist() for column in components.T],
        _env_reward_types=[],
        _provides_rollout_reward=False,
        reward_func_names=["a", "b", "c"],
    )
    one_each = [[SimpleNamespace(input_ids=[0], completion_mask=[1], old_log_probs=[0.0])]] * SIZE
    group = SimpleNamespace(
        prompts=[None] * SIZE,
        completions=[None] * SIZE,
        completions_ids=[None] * SIZE,
        reward_kwargs={},
        env_rewards=[None] * SIZE,
        tool_call_counts=[0] * SIZE,
        tool_failure_counts=[0] * SIZE,
        completions_sequences=one_each,
        model_version=0,
        group_id=0,
    )
    score = trl_function("experimental/async_grpo/async_rollout_worker.py", "_score_group")
    expected = [sample.advantage for sample in asyncio.run(score(trl, group))]
    rewards = StepRollouts.of(np.nansum(components, axis=1), np.zeros(SIZE, dtype=np.int64), np.full(SIZE, 3))
    np.testing.assert_allclose(ours(rewards, "async_grpo"), expected, atol=1e-5, rtol=1e-5)


def row_of(
    mask: torch.Tensor, behaviour: torch.Tensor, logprobs: torch.Tensor, advantages: np.ndarray, weights: np.ndarray
) -> Tokens:
    """TRL's batch, [S, T], as ours: the tokens that train, bool `mask`, each with what is its rollout's, [S]."""
    rollout, _ = mask.nonzero(as_tuple=True)
    of = rollout.numpy()
    given = {"behaviour": behaviour[mask], "logprobs": logprobs.detach()[mask], "rollout": rollout}
    return tokens(np.ones(len(of)), advantages[of], weights[of], **given)


# Rows of sampled tokens (1), tool tokens (0), and padding (.): three rollouts and one without a token that trains.
MASKS = ["110011..", "1.......", "........", "01111110"]


@pytest.mark.parametrize(
    ("normaliser", "loss_type"),
    [("tokens", "dapo"), ("tokens", "bnpo"), ("sequences", "grpo"), ("constant", "dr_grpo"), ("rollouts", "luspo")],
)
@pytest.mark.parametrize("masks", [MASKS, ["........", "110.....", "........", "........"]])
def test_a_normaliser_is_trl_s(normaliser: str, loss_type: str, masks: list[str]) -> None:
    """Tool tokens masked out, and a rollout that trains nothing, as one that was cut off: it counts as a rollout."""
    random = np.random.default_rng(0)
    shape = (len(masks), len(masks[0]))
    drift = torch.from_numpy(random.normal(0, 0.05, shape)).float()
    behaviour = torch.from_numpy(random.normal(-2, 0.5, shape)).float()
    advantages = torch.from_numpy(random.normal(size=shape[0])).float()
    logprobs = (behaviour + drift).requires_grad_()
    padding = torch.tensor([[cell != "." for cell in row] for row in masks]).int()
    sampled = torch.tensor([[cell == "1" for cell in row] for row in masks])
    inputs = {
        "completion_mask": padding,
        "tool_mask": sampled.int(),
        "advantages": advantages,
        "old_per_token_logps": behaviour,
    }
    expected = trl_loss("grpo", inputs, logprobs, loss_type=loss_type)
    expected.backward()
    assert logprobs.grad is not None

    section = LearnerSection(normaliser=normaliser, clip_low=0.2, clip_high=0.2)
    algorithm = Algorithm(section, longest=shape[1])
    rollouts = StepRollouts.of(advantages.numpy(), np.zeros(shape[0], dtype=np.int64), sampled.sum(1).numpy())
    row = row_of(sampled, behaviour, logprobs, advantages.numpy(), algorithm.weights(rollouts))
    loss = algorithm(row).losses.sum()
    loss.backward()
    assert row.logprobs.grad is not None
    torch.testing.assert_close(loss, expected, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(row.logprobs.grad, logprobs.grad[sampled], atol=1e-7, rtol=1e-5)
    assert not logprobs.grad[~sampled].any()


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_the_preset_rloo_is_trl_s_trainer(spread: float) -> None:
    """This includes clipped rollouts. TRL has no `delta`; here no ratio is beyond it."""
    random = np.random.default_rng(1)
    mask = torch.tensor([[cell != "." for cell in row] for row in ["11111...", "1.......", "11111111", "111....."]])
    behaviour = torch.from_numpy(random.normal(-2, 0.5, mask.shape)).float()
    logprobs = (behaviour + torch.from_numpy(random.normal(0, spread, mask.shape)).float()).requires_grad_()
    rewards = torch.tensor([[0.0], [1.0], [1.0], [0.3]])
    rloo = trl_advantages("rloo", rewards, SIZE)
    inputs = {"completion_mask": mask.int(), "advantages": rloo, "old_logps": (behaviour * mask).sum(1)}
    expected = trl_loss("rloo", inputs, logprobs)
    expected.backward()
    assert logprobs.grad is not None

    algorithm = Algorithm(LearnerSection(algorithm="rloo"), longest=64)
    step = StepRollouts.of(rewards[:, 0].double().numpy(), np.zeros(SIZE, dtype=np.int64), mask.sum(1).numpy())
    of_rollouts = algorithm.advantages(step)
    np.testing.assert_allclose(of_rollouts, rloo, rtol=1e-6)
    row = row_of(mask, behaviour, logprobs, of_rollouts, algorithm.weights(step))
    loss = algorithm(row).losses.sum()
    loss.backward()
    assert row.logprobs.grad is not None
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(row.logprobs.grad, logprobs.grad[mask], atol=1e-7, rtol=1e-5)
    clipped = int((logprobs.grad[mask] == 0).sum())
    assert (clipped > 0) == (spread > 0.1)
