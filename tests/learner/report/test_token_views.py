"""The tokens of a rollout as people see them: what sampled each, what the learner thinks of it, whether it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from slipstream.learner.feed.step_draft import Batch, Draft, LeasedGroup
from slipstream.learner.model.policy import Policy
from slipstream.learner.report import token_views
from slipstream.learner.report.token_views import with_tokens
from slipstream.learner.training.base import Scores
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.messages import Group, Rollout
from slipstream.protocol.rollouts import RolloutView
from tests.kit import LEARNER, config, group, segment
from tests.kit.messages import group_of_turns

PATTERN = (None, None, 0, 0, None, 1, 1, 1)


def texts(token_ids: object) -> list[str]:
    return [f"<{token}>" for token in token_ids]  # type: ignore[attr-defined]


def finished(groups: list[Group], version: int = 1, **queue: object) -> Batch:
    learner = {"groups_per_step": len(groups), "sample_rollouts": 4}
    draft = Draft(config(LEARNER, learner=learner, queue={"max_staleness": 2, **queue}), 1, version, "1-1")
    assert draft.add([LeasedGroup(of, version) for of in groups]) == {}
    return draft.finish()


def two_segments(ticket: str) -> Group:
    """A group in whose rollouts the context was rewritten once."""
    made = group(ticket, [0.0, 1.0], index=int(ticket[0]))
    rollouts = []
    for number, reward in enumerate((0.0, 1.0)):
        segments = [segment(PATTERN, seed=10 * number + part + 100 * made.index) for part in range(2)]
        for of in segments:
            noise = np.random.default_rng(int(of.token_ids.sum())).uniform(-1, 0, len(PATTERN))
            of.logprobs[of.loss_mask] += noise[of.loss_mask].astype(np.float32)
        rollouts.append(Rollout(segments, reward, "stop"))
    return msgspec.structs.replace(made, rollouts=rollouts)


@pytest.mark.parametrize("budget", [400, 20])
def test_each_token_has_the_log_prob_that_the_learner_gave_it_in_the_step(
    make_policy: Callable[..., Policy], budget: int
) -> None:
    settings = {"groups_per_step": 2, "sample_rollouts": 4, "token_budget": budget, "learning_rate": 0.01}
    run = config(LEARNER, learner=settings, queue={"max_staleness": 2}, vllm={"max_model_len": 20})
    draft = Draft(run, 1, 1, "1-1")
    groups = [two_segments("0.0"), two_segments("1.0")]
    assert draft.add([LeasedGroup(of, 1) for of in groups]) == {}
    batch = draft.finish()
    policy = copy.deepcopy(make_policy())
    trainer = PolicyTrainer(policy, run.learner, longest=64)
    before = {
        of.ticket_id: [[trainer.score(s.token_ids.tolist()) for s in r.segments] for r in of.rollouts] for of in groups
    }
    trainer.step(batch.rows, batch.rollouts)
    shown = with_tokens(batch, trainer.scores_of([of.rollout for of in batch.sampled]), texts)
    assert len(shown) == 4
    for view in shown:
        rollout = next(of for of in groups if of.ticket_id == view.ticket_id).rollouts[view.number]
        scored = before[view.ticket_id][view.number]
        tokens = iter(view.tokens or [])
        for of, learner in zip(rollout.segments, scored, strict=True):
            for place, version in enumerate(PATTERN):
                token = next(tokens)
                assert (token.text, token.version) == (f"<{of.token_ids[place]}>", version)
                assert token.trained == (version is not None)
                if version is None:
                    assert (token.logprob, token.learner_logprob) == (None, None)
                else:
                    assert token.logprob == pytest.approx(of.logprobs[place], abs=1e-4)
                    assert token.learner_logprob == pytest.approx(learner[place - 1], abs=1e-3)
        assert next(tokens, None) is None


def test_tokens_that_are_too_old_are_shown_as_not_trained_and_unknown_scores_are_left_out() -> None:
    batch = finished([two_segments("0.0")], version=3)
    for view in with_tokens(batch, {}, texts):
        assert [token.trained for token in view.tokens or []] == [0, 0, 0, 0, 0, 1, 1, 1] * 2
        assert {token.learner_logprob for token in view.tokens or []} == {None}


def test_scores_of_other_tokens_are_not_taken_for_a_segment_s() -> None:
    batch = finished([two_segments("0.0")])
    wrong = Scores(np.full(10, -9.0, np.float32), np.zeros(10, np.float32))
    for view in with_tokens(batch, {of.rollout: wrong for of in batch.sampled}, texts):
        assert {token.learner_logprob for token in view.tokens or []} == {None}


def test_a_long_rollout_shows_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_views, "MAX_TOKENS", 6)
    (view, _) = with_tokens(finished([two_segments("0.0")]), {}, texts)
    assert [token.text for token in view.tokens or []][3] == " … 10 more tokens … "
    assert len(view.tokens or []) == 7


def test_of_a_long_prompt_the_end_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_views, "MAX_PROMPT", 1)
    (view, _) = with_tokens(finished([two_segments("0.0")]), {}, texts)
    tokens = view.tokens or []
    assert [token.text for token in tokens[:9:8]] == [" … 1 more tokens … "] * 2
    assert [token.version for token in tokens[:8]] == [None, *PATTERN[1:]]


def test_a_view_with_tokens_comes_back_from_its_line() -> None:
    (view, _) = with_tokens(finished([two_segments("0.0")]), {}, texts)
    assert msgspec.json.decode(msgspec.json.encode(view), type=RolloutView) == view
    assert msgspec.json.decode(msgspec.json.encode(view))["tokens"][2][1] == 0


def test_a_token_has_the_advantage_of_its_turn_where_turns_have_their_own() -> None:
    run = config(LEARNER, learner={"groups_per_step": 1, "credit": "turn", "advantage": "dr_grpo"})
    draft = Draft(run, 1, 1, "1-1")
    draft.add([LeasedGroup(group_of_turns([0.0, 1.0], [2.0, 0.0]), 1)])
    best, worst = with_tokens(draft.finish(), {}, texts)
    for shown, advantages in ((best, [0.5, -0.5]), (worst, [-0.5, 0.5])):
        assert shown.tokens is not None
        assert [of.advantage for of in shown.tokens] == [
            value for advantage in advantages for value in (None, advantage, advantage)
        ]
