import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.inference.engine import Sampled, SampledSpan, TurnRequest
from slipstream.rollout_worker.inference.failures import (
    BadSample,
    RequestRejected,
    ServerFailed,
    ServerUnfit,
    UnknownWeights,
    error_of,
)
from slipstream.rollout_worker.inference.wire import (
    Asked,
    Logprob,
    Logprobs,
    SampledChoice,
    WeightVersion,
    join,
    sampled_of,
    sampling_params,
)
from tests.kit import config

END_OF_TURN = 2
ASKED = Asked(max_tokens=16, stop_token_ids=[END_OF_TURN], newest_version=5)


def choice(tokens=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3), versions=(("4", 0, 3),), finish_reason="stop"):
    return SampledChoice(
        index=0,
        token_ids=list(tokens),
        logprobs=None if logprobs is None else Logprobs([Logprob(value) for value in logprobs]),
        finish_reason=finish_reason,
        weight_versions=None if versions is None else [WeightVersion(*span) for span in versions],
    )


def test_a_choice_is_read_as_it_came():
    sampled = sampled_of(choice(versions=[("4", 0, 1), ("5", 1, 3)]), "a", ASKED)
    spans = [SampledSpan(4, 0, 1, "a"), SampledSpan(5, 1, 3, "a")]
    assert sampled == Sampled([5, 6, 7], [-0.1, -0.2, -0.3], spans, "stop")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "missing_logprobs"),
        ({"logprobs": (-0.1, -0.2)}, "missing_logprobs"),
        ({"logprobs": (-0.1, math.nan, -0.3)}, "bad_logprobs"),
        ({"logprobs": (-0.1, None, -0.3)}, "bad_logprobs"),
        ({"logprobs": (-0.1, -9999.0, -0.3)}, "bad_logprobs"),
        ({"logprobs": (-0.1, 0.5, -0.3)}, "bad_logprobs"),
        ({"versions": None}, "missing_versions"),
        ({"versions": []}, "missing_versions"),
        ({"versions": [("4", 0, 2)]}, "bad_versions"),
        ({"versions": [("4", 1, 3)]}, "bad_versions"),
        ({"versions": [("4", 0, 2), ("5", 1, 3)]}, "bad_versions"),
        ({"tokens": (), "logprobs": (), "versions": []}, "no_tokens"),
        ({"versions": [(str(2**40), 0, 3)]}, "bad_versions"),
        ({"tokens": (5, -1, 7)}, "token_id_negative"),
        ({"tokens": (5, 2**31, 7)}, "token_id_unknown"),
        ({"tokens": (5,) * 17, "logprobs": (-0.1,) * 17, "versions": [("4", 0, 17)]}, "too_many"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": "error"}, "finish_reason"),
    ],
)
def test_what_is_missing_or_wrong_is_never_filled_in(changes, reason):
    with pytest.raises(BadSample) as caught:
        sampled_of(choice(**changes), "a", ASKED)
    assert caught.value.reason == reason


def test_a_sure_token_may_be_a_rounding_above_zero():
    assert sampled_of(choice(logprobs=(1e-6, -0.2, -0.3)), "a", ASKED).logprobs[0] == 0.0


@pytest.mark.parametrize("label", ["default", "", "-1", "step-4", "4.0", "٤", "²", "1" * 19, "9" * 5000])
def test_a_label_that_is_no_version_is_told_apart(label):
    with pytest.raises(UnknownWeights, match=f"a: weights labelled {label[:80]!r}"):
        sampled_of(choice(versions=[(label, 0, 3)]), "a", ASKED)


@pytest.mark.parametrize(
    ("run_id", "label", "told"),
    [
        ("ours-1", "other-2:4", "a: version 4 of run other-2"),
        ("ours-1", "4", "a: weights labelled '4'"),
        ("", "other-2:4", "a: version 4 of run other-2"),
        ("ours-1", "ours-1:", "a: weights labelled 'ours-1:'"),
    ],
)
def test_i5_tokens_of_another_runs_weights_are_refused_and_that_run_is_named(run_id, label, told):
    """Both runs have a version 4."""
    with pytest.raises(UnknownWeights) as caught:
        sampled_of(choice(versions=[(label, 0, 3)]), "a", ASKED._replace(run_id=run_id))
    assert str(caught.value) == told


def test_i5_a_foreign_span_among_ours_spoils_the_sample():
    with pytest.raises(UnknownWeights, match="version 4 of run other-2"):
        sampled_of(choice(versions=[("ours-1:4", 0, 2), ("other-2:4", 2, 3)]), "a", ASKED._replace(run_id="ours-1"))


def test_tokens_of_our_own_run_have_their_version():
    spans = sampled_of(choice(versions=[("ours-1:4", 0, 3)]), "a", ASKED._replace(run_id="ours-1")).spans
    assert spans == [SampledSpan(4, 0, 3, "a")]


def test_samples_may_be_some_versions_ahead_of_the_registry():
    assert sampled_of(choice(versions=[("9", 0, 3)]), "a", ASKED).spans == [SampledSpan(9, 0, 3, "a")]


def test_a_choice_that_was_not_asked_for_is_refused():
    with pytest.raises(msgspec.ValidationError, match="index"):
        msgspec.json.decode(b'{"index": -1}', type=SampledChoice)


def test_an_abort_after_the_end_of_the_turn_is_no_abort():
    """Continued after its end, the turn would hold the next one too."""
    ended = choice(tokens=(5, 6, END_OF_TURN), finish_reason="abort")
    assert sampled_of(ended, "a", ASKED).finish_reason == "stop"


def test_an_abort_before_the_first_token_is_empty():
    assert sampled_of(choice((), (), [], "abort"), "a", ASKED) == Sampled()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 3), max_size=5)), min_size=1, max_size=4))
def test_parts_of_a_turn_join_without_gap_or_overlap(parts):
    """Each part has a server, and the versions of its tokens."""
    turn = Sampled()
    for server, versions in parts:
        spans = [SampledSpan(version, place, place + 1, server) for place, version in enumerate(versions)]
        turn.extend(Sampled(list(versions), [-0.1] * len(versions), spans, "abort"))
    flat = [(version, server) for server, versions in parts for version in versions]
    assert turn.token_ids == [version for version, _ in flat]
    assert [(span.version, span.server) for span in turn.spans for _ in range(span.start, span.end)] == flat
    assert all(a.end == b.start for a, b in zip(turn.spans, turn.spans[1:], strict=False))


def test_i5_parts_of_one_version_from_two_servers_stay_apart():
    turn = sampled_of(choice(finish_reason="abort"), "a", ASKED)
    turn.extend(sampled_of(choice(), "b", ASKED))
    turn.extend(sampled_of(choice(), "b", ASKED))
    assert turn.spans == [SampledSpan(4, 0, 3, "a"), SampledSpan(4, 3, 9, "b")]


def test_streamed_parts_join_to_the_whole():
    first = choice((5,), (-0.1,), None, None)
    last = choice((6, 7), (-0.2, -0.3))
    assert sampled_of(join(first, last), "a", ASKED) == sampled_of(choice(), "a", ASKED)


def sent(max_tokens=16, n=1, stream_interval=None, **rollout):
    """The sampling parameters as they are on the wire."""
    turn = TurnRequest("id", [5], max_tokens, config(rollout=rollout).rollout, [2], "cache", n)
    made = sampling_params(turn, stream_interval)
    return msgspec.json.decode(msgspec.json.encode(made))


PLAIN = {"max_tokens": 16, "temperature": 1.0, "stop_token_ids": [2], "n": 1, "logprobs": 0, "detokenize": False}


def test_a_request_holds_what_differs_from_vllm_s_defaults():
    assert sent() == PLAIN
    assert sent(n=4, stream_interval=9) == {**PLAIN, "n": 4, "stream_interval": 9}
    neutral = {"top_p": 1, "repetition_penalty": 1, "generation_kwargs": {"bad_words": [], "min_tokens": 0}}
    assert sent(**neutral) == PLAIN


def test_every_setting_reaches_the_request_under_vllm_s_name():
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    asked |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    kwargs = {"bad_words": ["um"], "logit_bias": {"7": -100.0}, "repetition_detection": {"min_count": 3}}
    expected = {**PLAIN, **asked, **kwargs, "logprobs": 14}
    assert sent(**asked, generation_kwargs=kwargs, accept_sampler_mismatch=True) == expected


def test_stop_strings_are_looked_for_in_a_text_with_special_tokens():
    """vLLM 0.32 refuses them without a text, and does not find </tool_call> where that is a special token."""
    text = {"detokenize": True, "skip_special_tokens": False}
    assert sent(stop=["</tool_call>"]) == {**PLAIN, **text, "stop": ["</tool_call>"]}


def test_min_tokens_never_exceeds_what_the_budget_leaves():
    """vLLM answers 400 to that."""
    kwargs = {"generation_kwargs": {"min_tokens": 20}, "accept_sampler_mismatch": True}
    assert [sent(max_tokens=left, **kwargs)["min_tokens"] for left in (64, 20, 3)] == [20, 20, 3]


def test_a_turn_that_was_ended_for_repeating_itself_was_cut_off():
    assert sampled_of(choice(finish_reason="repetition"), "a", ASKED).finish_reason == "length"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, RequestRejected) for status in (400, 413, 422)),
        *((status, ServerUnfit) for status in (401, 403, 404, 405)),
        *((status, ServerFailed) for status in (408, 425, 429, 500, 503)),
    ],
)
def test_classes_of_http_errors(status, kind):
    error = error_of(status, "the prompt is too long")
    assert type(error) is kind
    assert f"HTTP {status}: the prompt is too long" in str(error)


def of_mask(*tops: dict[int, float], tokens=(5, 6)) -> Sampled:
    """A choice of two tokens whose likely ones are told."""
    told = [[{"token_id": token, "logprob": logprob} for token, logprob in top.items()] for top in tops]
    entries = [
        Logprob(top.get(token, -1.0), msgspec.Raw(msgspec.json.encode(likely)))
        for token, top, likely in zip(tokens, tops, told, strict=True)
    ]
    versions = [WeightVersion("4", 0, len(tokens))]
    asked = ASKED._replace(mask=True)
    return sampled_of(SampledChoice(0, list(tokens), Logprobs(entries), "stop", versions), "a", asked)


def test_the_sampling_mask_is_what_has_a_probability():
    half = math.log(0.5)
    sampled = of_mask({5: half, 9: half, 3: -9999.0}, {6: 0.0, 1: -9999.0})
    assert (sampled.masks.ids.tolist(), sampled.masks.counts.tolist()) == ([5, 9, 6], [2, 1])
    sampled.extend(of_mask({5: 0.0}, {6: half, 7: half}))
    assert (sampled.masks.ids.tolist(), sampled.masks.counts.tolist()) == ([5, 9, 6, 5, 6, 7], [2, 1, 1, 2])


@pytest.mark.parametrize(
    "top",
    [{5: -3.0, 9: -3.0}, {9: 0.0}, {5: 0.0, 9: 0.0}, {5: -0.1, -1: -2.4}, {5: -0.1, 2**31: -2.4}],
    ids=["a part of it", "without the token", "too much", "negative", "beyond int32"],
)
def test_a_mask_that_is_not_the_distribution_is_refused(top: dict[int, float]):
    with pytest.raises(BadSample) as caught:
        of_mask(top, {6: 0.0})
    assert caught.value.reason == "bad_mask"
