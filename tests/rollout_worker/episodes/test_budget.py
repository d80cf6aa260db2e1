from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.episodes.limits import EpisodeLimits
from tests.kit import config

COUNT = st.integers(1, 5000)


@given(COUNT, COUNT, COUNT, st.integers(0, 5000), st.integers(0, 5000))
def test_a_turn_never_exceeds_turn_episode_or_context(turn, episode, context, sampled, size):
    budget = EpisodeLimits(turn, episode, context, max_turns=8).turn(sampled, size)
    if budget.tokens > 0:
        assert budget.tokens <= turn
        assert sampled + budget.tokens <= episode
        assert size + budget.tokens <= context
    else:
        assert sampled >= episode or size >= context


@given(COUNT, COUNT, COUNT, st.integers(0, 5000), st.integers(0, 5000))
def test_an_episode_ends_as_context_only_where_the_context_is_the_limit(turn, episode, context, sampled, size):
    budget = EpisodeLimits(turn, episode, context, max_turns=8).turn(sampled, size)
    assert (budget.ends_as == "context") == (context - size < min(turn, episode - sampled))


def test_no_turn_limit_is_more_turns_than_an_episode_has_tokens():
    limits = EpisodeLimits.of(config(rollout={"max_turns": 0, "max_episode_tokens": 10**9}))
    assert limits.max_turns > limits.max_episode_tokens
    assert EpisodeLimits.of(config(rollout={"max_turns": 3})).max_turns == 3
