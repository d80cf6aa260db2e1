"""A group that keeps every rule is valid; of any other the broken rule is named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.protocol import codec, reasons
from slipstream.protocol.images import Image, ImagePlace, PackedArray
from slipstream.protocol.messages import (
    Group,
    LeaseReply,
    Rollout,
    RoutedExperts,
    SamplingMask,
    Segment,
    Ticket,
    TurnEnd,
    VersionSpan,
)
from slipstream.rollout_queue.ledger import validation
from slipstream.rollout_queue.ledger.records import Refusal, TicketRecord
from tests.kit import group, segment
from tests.kit.messages import VOCABULARY, group_of_turns

RECORD = TicketRecord(index=3, attempt=1, serial=9, worker_id="w", version=4)
TICKET = Ticket("3.1", 3, 2, 0, 4, 60.0)
LEARNER_VERSION = 5
RULES = validation.Rules(2, LEARNER_VERSION, VOCABULARY, max_tokens=12)
PATTERN = (None, None, 4, 4, 4)


def in_segment(**changes: Any) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        group.rollouts[1].segments[0] = msgspec.structs.replace(group.rollouts[1].segments[0], **changes)

    return change


def in_rollout(**changes: Any) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        group.rollouts[0] = msgspec.structs.replace(group.rollouts[0], **changes)

    return change


def in_group(**changes: Any) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        for name, value in changes.items():
            setattr(group, name, value)

    return change


EMPTY = PackedArray("float32", [0], 0, b"")
IMAGE = Image("hash", 2, {"pixel_values": EMPTY})


def with_images(places: list[ImagePlace], tokens: int = 2, before: int = 0) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        group.images = [msgspec.structs.replace(IMAGE, tokens=tokens)]
        moved = [ImagePlace(place.image, place.start - before * (place.start > 0)) for place in places]
        in_segment(images=moved)(group)

    return change


def logprob(position: int, value: float) -> Callable[[Group], None]:
    values = segment(PATTERN).logprobs.copy()
    values[position] = value
    return in_segment(logprobs=values)


def spans(*triples: tuple[int, int, int], server: int = 0) -> Callable[[Group], None]:
    return in_segment(version_spans=[VersionSpan(*triple, server) for triple in triples])


def ids(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


# The segment that is changed: 2 prompt tokens, then 3 sampled ones of version 4.
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("ticket_mismatch", in_group(ticket_id="3.0")),
        ("ticket_mismatch", in_group(index=4)),
        ("ticket_mismatch", in_group(epoch=-1)),
        ("group_size", lambda g: g.rollouts.append(g.rollouts[0])),
        ("group_size", lambda g: g.rollouts.pop()),
        ("bad_image", in_segment(images=[ImagePlace(0, 0)])),
        ("bad_image", with_images([ImagePlace(1, 0)])),
        ("bad_image", with_images([ImagePlace(0, 1)])),
        ("bad_image", with_images([ImagePlace(0, 4)])),
        ("bad_image", with_images([ImagePlace(0, 0), ImagePlace(0, 1)], tokens=1, before=1)),
        ("bad_image", in_group(images=[IMAGE, IMAGE])),
        ("bad_image", in_group(images=[Image("huge", 1, {"a": PackedArray("float32", [2**15, 2**15], 0, b"")})])),
        ("too_many", in_group(images=[Image("h", 1, {str(n): EMPTY for n in range(17)})])),
        ("length_mismatch", in_segment(token_ids=ids(1, 2, 3, 4))),
        ("length_mismatch", in_segment(logprobs=np.zeros(6, dtype=np.float32))),
        ("token_id_negative", in_segment(token_ids=ids(1, 2, -3, 4, 5))),
        ("span_cover", spans((4, 2, 4))),
        ("span_cover", spans((4, 1, 5))),
        ("span_cover", spans((4, 2, 4), (4, 3, 5))),
        ("span_cover", spans((4, 4, 5), (4, 2, 4))),
        ("span_cover", spans((4, 2, 2**60))),
        ("span_cover", spans((4, -3, 5))),
        ("span_cover", spans()),
        ("span_version_unknown", spans((-1, 2, 5))),
        ("span_server_unknown", spans((4, 2, 5), server=1)),
        ("span_server_unknown", spans((4, 2, 5), server=-1)),
        ("span_server_unknown", in_group(server_names=[])),
        ("version_from_future", spans((4, 2, 4), (6, 4, 5))),
        ("logprob_missing", logprob(3, float("nan"))),
        ("logprob_positive", logprob(3, 1e-4)),
        ("logprob_not_finite", logprob(4, float("-inf"))),
        ("logprob_not_finite", logprob(0, float("nan"))),
        ("reward_not_finite", in_rollout(reward=float("nan"))),
        ("reward_not_finite", in_rollout(reward_components={"accuracy": float("inf")})),
        ("metric_not_finite", in_rollout(metrics={"turns": 2.0, "loss": float("nan")})),
        ("metric_not_finite", in_rollout(metrics={"loss": float("-inf")})),
        ("metric_not_finite", in_rollout(timings={"total": float("nan")})),
        ("token_id_unknown", in_segment(token_ids=ids(1, 2, 3, VOCABULARY, 5))),
        ("too_many", in_group(server_names=["vllm-0"] * 1025)),
        ("too_many", in_rollout(segments=[segment(PATTERN)] * 1025)),
        ("too_many", in_rollout(reward_components={str(number): 0.0 for number in range(257)})),
        ("too_many", in_rollout(metrics={str(number): 0.0 for number in range(257)})),
        ("too_many", in_rollout(extra={str(number): "" for number in range(257)})),
        ("too_large", in_rollout(extra={"gold": "x" * 4097})),
        ("too_large", in_rollout(extra={"x" * 257: ""})),
        ("too_many", in_rollout(timings={str(number): 0.0 for number in range(257)})),
        ("too_large", in_rollout(metrics={"m" * 257: 0.0})),
        ("too_large", in_group(server_names=["s" * 257])),
        ("too_large", in_group(worker_id="w" * 257)),
        ("reward_not_finite", in_rollout(reward=-1.1e30)),
        ("reward_not_finite", in_rollout(reward_components={"accuracy": 1e308})),
        ("metric_not_finite", in_rollout(metrics={"loss": 1e308})),
        ("reward_not_finite", in_group(reward_weights={"accuracy": float("nan")})),
        ("reward_not_finite", in_group(reward_weights={"accuracy": -1.1e30})),
        ("too_many", in_group(reward_weights={str(number): 0.0 for number in range(257)})),
        ("too_large", in_group(reward_weights={"m" * 257: 0.0})),
        ("segment_too_long", in_rollout(segments=[segment((None,) * 12 + (4,))])),
        ("worker_mismatch", in_group(worker_id="evil")),
        ("no_sampled_tokens", in_group(rollouts=[Rollout([segment((None, None))], 1.0, "stop")] * 2)),
    ],
)
def test_a_broken_group_is_rejected_with_its_reason(reason: str, change: Callable[[Group], None]) -> None:
    broken = group(TICKET)
    change(broken)
    with pytest.raises(Refusal) as refusal:
        validation.check_group(validation.decode(codec.encode(broken), 2), RECORD, RULES)
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    "change",
    [
        lambda g: None,
        logprob(2, 0.0),
        in_rollout(reward_components={"accuracy": None}),
        in_rollout(metrics={"turns": 2.0}),
        in_rollout(reward=1e30),
        in_rollout(segments=[segment((None,) * 11 + (4,) + (None,) * 100)]),
        in_group(server_names=["vllm-0", "vllm-1"]),
        in_group(reward_weights={"accuracy": -2.0, "style": 0.0}),
    ],
)
def test_a_sound_group_is_valid(change: Callable[[Group], None]) -> None:
    sound = group(TICKET, versions=(None, None, 4, 5, 5))
    change(sound)
    validation.check_group(validation.decode(codec.encode(sound), 2), RECORD, RULES)


def test_without_a_vocabulary_any_id_that_is_not_negative_passes() -> None:
    sound = group(TICKET)
    in_segment(token_ids=ids(1, 2, 3, 2**31 - 1, 5))(sound)
    validation.check_group(sound, RECORD, validation.Rules(2, LEARNER_VERSION))


def with_field(value: bytes) -> bytes:
    """A sound group in msgpack, with an unknown field."""
    fields = {name: getattr(group(TICKET), name) for name in Group.__struct_fields__}
    return codec.encode({**{n: of for n, of in fields.items() if of is not msgspec.UNSET}, "later": msgspec.Raw(value)})


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("too_deep", with_field(b"\x91" * 40 + b"\xc0")),
        ("too_deep", with_field(b"\x91" * 700 + b"\xc0")),
        ("too_deep", with_field(b"\x81\xc0" * 100_000 + b"\xc0")),
        ("too_many", with_field(b"\xdd\x00\x08\x00\x00" + b"\x90" * 2**19)),
        ("too_many", with_field(b"\xdd\x00\x00\x40\x00" + b"\x80" * 2**14)),
        ("decode", with_field(b"\xc0")),
        ("too_many", codec.encode({"rollouts": [{"segments": [{"token_ids": [[]] * 2**19}]}]})),
        ("too_many", with_field(b"\xdd\xff\xff\xff\xff")),
        ("decode", with_field(b"\xc6\xff\xff\xff\xff")),
    ],
)
def test_what_is_too_deep_or_too_much_is_refused_before_it_is_decoded(
    reason: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_MAX_ITEMS", 5000)  # tracing memory is slow
    validation.decode(codec.encode(group(TICKET)), 2)  # makes the decoder
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as refusal:
            validation.decode(body, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.value.reason == reason
    assert peak < 200_000


@pytest.mark.parametrize("size", [2, 16])
def test_a_group_may_hold_all_that_its_rollouts_may(size: int) -> None:
    """As many segments, figures and notes in every one as `check` allows: an episode may have opened so many."""
    names = [f"name {number}" for number in range(256)]
    full = Rollout(
        [segment(PATTERN)] * validation._MAX_SEGMENTS,
        1.0,
        finish_reason="stop",
        reward_components=dict.fromkeys(names, 1.0),
        metrics=dict.fromkeys(names, 1.0),
        timings=dict.fromkeys(names, 1.0),
        extra=dict.fromkeys(names, "text"),
    )
    sound = group(TICKET)
    in_group(rollouts=[full] * size, reward_weights=dict.fromkeys(names, 1.0), server_names=names)(sound)
    body = codec.encode(sound)
    validation.check_group(validation.decode(body, size), RECORD, msgspec.structs.replace(RULES, group_size=size))


@pytest.mark.parametrize(
    ("size", "values"),
    [
        (2, [[]] * 2**17),
        (1024, [[]] * 2**20),
        (2, [0] * 2**17),
        (1024, [0] * 2**20),
        (1024, {f"{number:x}": "" for number in range(2**19)}),
    ],
)
def test_the_widest_group_is_refused_before_it_is_decoded(
    size: int, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its group size. A body that has fewer bytes than it may have values is decoded at once."""
    body = codec.encode({"rollouts": [{"segments": [{"token_ids": values}]}]})
    monkeypatch.delattr(codec, "decode")
    with pytest.raises(Refusal, match=r"more than the .* values that are allowed") as refusal:
        validation.decode(body, size)
    assert refusal.value.reason == "too_many"


# What a field that nobody knows may hold: deep, wide, of every type of msgpack.
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
nested = st.builds(lambda value, deep: b"\x91" * deep + msgspec.msgpack.encode(value), anything, st.integers(0, 1200))


@settings(max_examples=200, deadline=None)
@given(nested | st.binary(max_size=30))
def test_what_passes_the_door_passes_the_learner(value: bytes) -> None:
    """The learner decodes it as it came, inside a lease, with most of Python's stack in use already."""
    body = with_field(value)
    try:
        validation.decode(body, 2)
    except Refusal:
        return
    reply = codec.encode(LeaseReply("l", [msgspec.Raw(body)] * 2, [0, 0], 60.0))

    def learner(frames: int) -> list[Group]:
        if frames:
            return learner(frames - 1)
        return [codec.decode(bytes(raw), Group) for raw in codec.decode(reply, LeaseReply).groups]

    for received in learner(500):
        validation.check_group(received, RECORD, RULES)


def test_another_schema_version_is_named_before_anything_else() -> None:
    with pytest.raises(Refusal) as refusal:
        validation.decode(codec.encode({"schema_version": 99, "whatever": 1}), 2)
    assert refusal.value.reason == "schema_version"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_i8_bytes_that_are_not_a_group_are_rejected(data: bytes) -> None:
    with pytest.raises(Refusal):
        validation.decode(data, 2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 13), st.integers(-1, 13)), max_size=4),
)
def test_i4_spans_are_valid_only_if_they_give_each_sampled_token_one_version(
    mask: list[bool], triples: list[tuple[int, int, int]]
) -> None:
    made = Segment(
        np.zeros(len(mask), dtype=np.int32),
        np.array(mask),
        np.zeros(len(mask), dtype=np.float32),
        [VersionSpan(*triple, 0) for triple in triples],
    )
    candidate = group(TICKET)
    candidate.rollouts[0].segments[0] = made
    in_order = all(a[2] <= b[1] for a, b in pairwise(triples))
    cover = [sum(start <= i < end for _, start, end in triples) for i in range(len(mask))]
    bounded = all(0 <= start < end <= len(mask) for _, start, end in triples)
    sound = (
        in_order and bounded and cover == [int(m) for m in mask] and all(v <= LEARNER_VERSION for v, _, _ in triples)
    )
    if sound:
        validation.check_group(candidate, RECORD, RULES)
        assert (made.token_versions() >= 0).tolist() == mask
    else:
        with pytest.raises(Refusal):
            validation.check_group(candidate, RECORD, RULES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids, counts: (ids, counts), None),
        (lambda ids, counts: (ids, counts[1:]), "where each has one at least"),
        (lambda ids, counts: (ids[1:], counts), "where each has one at least"),
        (lambda ids, counts: (ids, np.append(counts[:-2], [0, 2 * counts[-1]])), "where each has one at least"),
        (lambda ids, counts: (ids - 100, counts), "ids of a sampling mask are"),
        (lambda ids, counts: (ids + 10**6, counts), "ids of a sampling mask are"),
        (lambda ids, counts: (np.roll(ids, 1), counts), "is not, or not once"),
        (lambda ids, counts: (np.repeat(ids, 2), 2 * counts), "is not, or not once"),
    ],
)
def test_a_sampling_mask_holds_each_sampled_token_once(change: Any, words: str | None) -> None:
    candidate = group(TICKET)
    segment = candidate.rollouts[0].segments[0]
    sampled = segment.token_ids[segment.loss_mask]
    assert len(sampled) >= 2
    assert len(set(sampled.tolist())) > 1
    ids, counts = change(sampled, np.ones(len(sampled)))
    segment.sampling_mask = SamplingMask(ids.astype(np.int32), counts.astype(np.uint16))
    if words is None:
        validation.check_group(candidate, RECORD, RULES)
        return
    with pytest.raises(Refusal, match=words) as refusal:
        validation.check_group(candidate, RECORD, RULES)
    assert refusal.value.reason == reasons.MASK_COVER


@pytest.mark.parametrize(
    ("spans", "ids", "words"),
    [
        ([(0, 2), (2, 3)], 3 * 4, None),
        ([], 0, None),
        ([(0, 2), (1, 3)], 4 * 4, "overlap"),
        ([(1, 1)], 0, "are of none"),
        ([(-1, 1)], 2 * 4, "leave the"),
        ([(0, 9)], 9 * 4, "leave the"),
        ([(0, 2)], 2 * 4 - 1, "7 experts for 2 tokens, 2 layers and 2 choices"),
    ],
)
def test_recorded_experts_are_of_tokens_that_are_there(
    spans: list[tuple[int, int]], ids: int, words: str | None
) -> None:
    candidate = group(TICKET)
    segment = candidate.rollouts[0].segments[0]
    assert 3 <= len(segment.token_ids) < 9
    segment.experts = RoutedExperts(np.zeros(ids, np.uint8), 2, 2, spans)
    if words is None:
        validation.check_group(candidate, RECORD, RULES)
        return
    with pytest.raises(Refusal, match=words) as refusal:
        validation.check_group(candidate, RECORD, RULES)
    assert refusal.value.reason == reasons.EXPERTS_COVER


def turned(**changes: Any) -> Group:
    """A group of two rollouts of two turns in one segment, with rewards at them; `changes` are of the first rollout."""
    made = group_of_turns([1.0, -0.5], [0.0, 2.0], ticket=TICKET)
    in_rollout(**changes)(made)
    return made


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (None, {}),
        (None, {"turn_rewards": msgspec.UNSET, "reward": 7.0}),
        (None, {"turn_rewards": msgspec.UNSET, "turn_ends": msgspec.UNSET}),
        (None, {"turn_rewards": [1e30, -1e30], "reward": 0.0}),
        (None, {"turn_rewards": [0.1, 0.2], "reward": 0.3}),
        ("turn_cover", {"turn_ends": msgspec.UNSET}),
        ("turn_cover", {"turn_ends": []}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 6)]}),
        ("turn_cover", {"turns": 3}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 6), TurnEnd(0, 3)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 6), TurnEnd(0, 6)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 0), TurnEnd(0, 6)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 3), TurnEnd(0, 7)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 3), TurnEnd(1, 3)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 3), TurnEnd(-1, 6)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 4), TurnEnd(0, 6)]}),
        ("turn_cover", {"turn_ends": [TurnEnd(0, 2), TurnEnd(0, 3)]}),
        ("turn_cover", {"turn_rewards": [0.5]}),
        ("turn_cover", {"turn_rewards": [1.0, -0.5, 0.0]}),
        ("turn_cover", {"turn_rewards": [1.0, 0.5]}),
        ("turn_cover", {"reward": 0.6}),
        ("reward_not_finite", {"turn_rewards": [float("nan"), 0.5]}),
        ("reward_not_finite", {"turn_rewards": [float("inf"), 0.5]}),
        ("reward_not_finite", {"turn_rewards": [1e31, 0.5]}),
    ],
)
def test_rewards_at_turns_are_one_for_each_and_all_of_the_rollout_s(
    reason: str | None, changes: dict[str, Any]
) -> None:
    sent = validation.decode(codec.encode(turned(**changes)), 2)
    if reason is None:
        validation.check_group(sent, RECORD, RULES)
        return
    with pytest.raises(Refusal) as refusal:
        validation.check_group(sent, RECORD, RULES)
    assert refusal.value.reason == reason
    assert "rollout 0" in refusal.value.message


def test_turns_of_several_segments_come_in_the_order_of_sampling() -> None:
    segments = [segment((None, 4, None, 4)), segment((None, 4), seed=1)]
    ends = [TurnEnd(0, 2), TurnEnd(1, 2), TurnEnd(0, 4)]
    changes: dict[str, Any] = {"segments": segments, "turns": 3, "turn_rewards": [0.0, 0.5, 0.0], "reward": 0.5}
    validation.check_group(turned(turn_ends=ends, **changes), RECORD, RULES)
    changes |= {"turns": 2, "turn_rewards": [0.0, 0.5]}
    with pytest.raises(Refusal, match="1 sampled tokens of segment 1 are in no turn"):
        validation.check_group(turned(turn_ends=[TurnEnd(0, 2), TurnEnd(0, 4)], **changes), RECORD, RULES)


def test_a_group_without_turns_has_the_bytes_that_it_had() -> None:
    """The names of the fields are not in it, so that an older queue decodes it."""
    assert b"turn_" not in codec.encode(group(TICKET))
    assert b"turn_rewards" in codec.encode(turned())
