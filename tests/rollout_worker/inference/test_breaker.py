"""A server that fails in a row is left alone for a pause that grows, then tried by one request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.inference.failures import FAILURES, MAX_PAUSE_S, PAUSE_S, Breaker


def opened():
    breaker = Breaker()
    assert [breaker.failed() for _ in range(FAILURES)] == [None, None, PAUSE_S]
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker()
    for _ in range(10):
        assert [breaker.failed() for _ in range(FAILURES - 1)] == [None, None]
        breaker.succeeded()
    assert breaker.admits
    assert not opened().admits


def test_it_opens_at_once_where_every_request_would_fail_alike():
    breaker = Breaker()
    assert breaker.failed(for_all=True) == PAUSE_S
    assert not breaker.admits


def test_requests_that_break_with_the_others_begin_no_further_pause():
    breaker = opened()
    assert [breaker.failed() for _ in range(60)] == [None] * 60


def test_after_the_pause_one_request_tries_and_the_pause_doubles_with_each_that_fails():
    breaker, pauses = opened(), []
    for _ in range(8):
        breaker.pause_over()
        assert breaker.admits
        assert breaker.began()
        assert not breaker.admits, "the others wait for the trial"
        pauses.append(breaker.failed(trial=True))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


@pytest.mark.parametrize("trial", [True, False], ids=["the trial", "an older request"])
def test_a_success_closes_it_and_pauses_begin_anew(trial):
    breaker = opened()
    breaker.pause_over()
    if trial:
        breaker.began()
    breaker.succeeded()
    assert breaker.admits
    assert not breaker.began()
    assert [breaker.failed() for _ in range(FAILURES)][-1] == PAUSE_S


def test_a_trial_that_is_given_up_leaves_another_one_due():
    breaker = opened()
    breaker.pause_over()
    breaker.undecided(breaker.began())
    assert breaker.admits
    assert breaker.began()


@given(st.lists(st.sampled_from(["fail", "fail for all", "begin", "succeed", "give up", "pause over"]), max_size=60))
def test_it_is_never_shut_for_good(actions):
    """Whenever nothing may go to the server, a pause is running or a trial is out."""
    breaker, trial, pausing = Breaker(), False, False
    for action in actions:
        if action == "pause over" and pausing:
            breaker.pause_over()
            pausing = False
        elif action == "begin" and breaker.admits:
            trial = breaker.began() or trial
        elif action in ("fail", "fail for all"):
            pause = breaker.failed(action == "fail for all", trial)
            trial = False
            pausing = pausing or pause is not None
        elif action == "succeed":
            breaker.succeeded()
            trial = False
        elif action == "give up":
            breaker.undecided(trial)
            trial = False
        assert breaker.admits or pausing or trial
