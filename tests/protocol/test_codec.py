"""What is encoded comes back the same; what is not a message is a DecodeError, at a bounded cost."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
import types
import typing
from enum import StrEnum
from time import process_time
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from slipstream.protocol import codec, messages, status
from slipstream.protocol.images import Image, ImagePlace, pack
from slipstream.protocol.messages import (
    Group,
    LeaseReply,
    PolicyCommand,
    Rollout,
    RoutedExperts,
    RunPosition,
    SamplingMask,
    Segment,
    TeacherTop,
    VersionSpan,
)

CARRIES_ARRAYS = {RoutedExperts, SamplingMask, TeacherTop, Segment, Rollout, Group, LeaseReply, Image}
CONTROL = [
    kind
    for module in (messages, status)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in CARRIES_ARRAYS
]

integers = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a control message's field type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        (bounds,) = kind.__metadata__
        return st.integers(bounds.ge, bounds.le or 2**63 - 1)
    if origin is list:
        return st.lists(values_of(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values_of, inner))
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), values_of(inner[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, inner))
    if origin is Literal or issubclass(kind, StrEnum):
        return st.sampled_from(inner or list(kind))
    if issubclass(kind, msgspec.Struct):
        return st.builds(
            kind, **{name: values_of(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
        )
    return {int: integers, float: numbers, str: st.text(max_size=20), bool: st.booleans(), type(None): st.none()}[kind]


experts = st.builds(
    RoutedExperts,
    ids=arrays(np.uint8, 12) | arrays(np.uint16, 12),
    layers=st.integers(1, 8),
    top_k=st.integers(1, 8),
    spans=st.lists(st.tuples(integers, integers), max_size=3),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    length = draw(st.sampled_from((0, 1, 2, 31, 300)))
    return Segment(
        draw(arrays(np.int32, length)),
        draw(arrays(np.bool_, length)),
        draw(arrays(np.float32, length)),
        draw(st.lists(values_of(VersionSpan), max_size=3)),
        draw(st.none() | experts),
        draw(st.lists(st.builds(ImagePlace, st.integers(0, 9), st.integers(0, 300)), max_size=2)),
        draw(st.none() | st.builds(SamplingMask, arrays(np.int32, 5), arrays(np.uint16, 3))),
        draw(st.none() | arrays(np.float32, 3)),
        draw(st.none() | st.builds(TeacherTop, arrays(np.int32, 6), arrays(np.float32, 6), st.just(2))),
    )


rollouts = st.builds(
    Rollout,
    segments=st.lists(segments(), max_size=2),
    reward=st.floats(allow_nan=False),
    finish_reason=values_of(messages.FinishReason),
    reward_components=values_of(dict[str, float | None]),
    turns=integers,
    tool_calls=integers,
    tool_failures=integers,
    timings=values_of(dict[str, float]),
    metrics=values_of(dict[str, float]),
    messages=st.none() | st.binary(max_size=40),
)
groups = st.builds(
    Group,
    ticket_id=st.text(max_size=20),
    index=integers,
    epoch=integers,
    rollouts=st.lists(rollouts, max_size=2),
    worker_id=st.text(max_size=20),
    server_names=values_of(list[str]),
    started_at=numbers,
    finished_at=numbers,
    schema_version=integers,
    reward_weights=values_of(dict[str, float]),
    images=st.just(msgspec.UNSET) | st.just([Image("hash", 4, {"pixel_values": pack(np.zeros((2, 3), np.float32))})]),
)


def plain(value: Any) -> Any:
    """The content of a message as built-in values: arrays as native dtype name and bytes, so that NaN is equal."""
    if isinstance(value, np.ndarray):
        native = value.astype(value.dtype.newbyteorder("="))
        return native.dtype.name, native.shape, native.tobytes()
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return list(value) if isinstance(value, tuple) else value


def a_group(tokens: int = 5, size: int = 2) -> Group:
    segment = Segment(
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, dtype=np.bool_),
        np.full(tokens, -0.5, dtype=np.float32),
        [VersionSpan(3, 0, 2, 0), VersionSpan(4, 2, tokens, 0)],
    )
    rollout = Rollout([segment], 1.0, "stop", {"accuracy": 1.0}, messages=b'[{"role": "assistant", "content": "6"}]')
    return Group("ticket", 7, 0, [rollout] * size, "worker", ["vllm-0"], 1.0, 2.0)


@settings(max_examples=30, deadline=None)
@given(groups)
def test_groups_come_back_as_they_were(group: Group) -> None:
    assert plain(codec.decode(codec.encode(group), Group)) == plain(group)


@settings(max_examples=15, deadline=None)
@given(st.lists(groups, max_size=3))
def test_a_lease_hands_on_each_group_as_it_was_submitted(submitted: list[Group]) -> None:
    encoded = [codec.encode(group) for group in submitted]
    reply = LeaseReply("lease", [msgspec.Raw(data) for data in encoded], [1] * len(encoded), 60.0)
    received = codec.decode(codec.encode(reply), LeaseReply)
    assert [bytes(group) for group in received.groups] == encoded
    assert (received.lease_id, received.version_at_arrival) == ("lease", [1] * len(encoded))


@pytest.mark.parametrize("kind", CONTROL, ids=lambda kind: kind.__name__)
def test_control_messages_come_back_as_they_were(kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=15, deadline=None)
    @given(values_of(kind))
    def comes_back(message: msgspec.Struct) -> None:
        assert codec.decode_json(codec.encode_json(message), kind) == message

    comes_back()


@settings(max_examples=30, deadline=None)
@given(values_of(PolicyCommand))
def test_a_policy_command_comes_back_as_the_command_it_was(command: PolicyCommand) -> None:
    assert codec.decode_json(codec.encode_json(command), PolicyCommand) == command


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_arrive_little_endian_whatever_the_host(order: str) -> None:
    segment = Segment(
        np.array([1, 256, -2], dtype=f"{order}i4"),
        np.array([True, False, True]),
        np.array([-0.5, 0.0, -1.5], dtype=f"{order}f4"),
        [],
    )
    data = codec.encode(segment)
    assert struct.pack("<3i", 1, 256, -2) in data
    assert struct.pack("<3f", -0.5, 0.0, -1.5) in data
    received = codec.decode(data, Segment)
    assert received.token_ids.dtype.str == "<i4"
    assert received.token_ids.tolist() == [1, 256, -2]
    assert received.logprobs.tolist() == [-0.5, 0.0, -1.5]


def test_a_strided_array_is_sent_as_its_elements() -> None:
    every_other = np.arange(10, dtype=np.int32)[::2]
    segment = Segment(every_other, np.ones(5, dtype=np.bool_), np.zeros(5, dtype=np.float32), [])
    assert codec.decode(codec.encode(segment), Segment).token_ids.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("array", [np.zeros(2), np.zeros(2, dtype=np.int64), np.array([object()]), np.array(["a"])])
def test_arrays_outside_the_protocol_are_not_sent(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(TypeError, match="not part of the protocol"):
        codec.encode(array)


@pytest.mark.parametrize(
    "wrong", [np.zeros(2), np.zeros((2, 2), dtype=np.int32), np.zeros((), dtype=np.int32), np.zeros(2, dtype=np.uint32)]
)
def test_a_segment_takes_only_flat_arrays_of_its_dtypes(wrong: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="token_ids must be one-dimensional int32"):
        Segment(wrong, np.zeros(2, dtype=np.bool_), np.zeros(2, dtype=np.float32), [])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([Group, LeaseReply, Segment]))
def test_random_bytes_are_refused(data: bytes, kind: type[msgspec.Struct]) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode(data, kind)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_random_json_is_refused(data: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode_json(data, RunPosition)


def test_every_truncation_of_a_message_is_refused() -> None:
    group, policy = codec.encode(a_group()), codec.encode_json(RunPosition(1, 1, 9, 1, None, None, False))
    for end in range(len(group)):
        with pytest.raises(codec.DecodeError):
            codec.decode(group[:end], Group)
    for end in range(len(policy)):
        with pytest.raises(codec.DecodeError):
            codec.decode_json(policy[:end], RunPosition)


def test_a_message_with_any_bit_flipped_is_refused_or_still_a_message() -> None:
    data = codec.encode(a_group())
    refused = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            group = codec.decode(bytes(flipped), Group)
        except codec.DecodeError:
            refused += 1
        else:
            codec.encode(group)
    assert 0 < refused < 8 * len(data)


def array32(length: int) -> bytes:
    return b"\xdd" + struct.pack(">I", length)


def map32(length: int) -> bytes:
    return b"\xdf" + struct.pack(">I", length)


ROLLOUTS = b"\x81\xa8rollouts"
MESSAGES = ROLLOUTS + b"\x91\x81\xa8messages"
TOKEN_IDS = ROLLOUTS + b"\x91\x81\xa8segments\x91\x81\xa9token_ids"
SPANS = ROLLOUTS + b"\x91\x81\xa8segments\x91\x81\xadversion_spans"
MANY = 2**16


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(data, id=name)
        for name, data in {
            "empty": b"",
            "array of 2**32 - 1": ROLLOUTS + array32(2**32 - 1) + b"\x80" * 10,
            "map of 2**32 - 1": TOKEN_IDS + map32(2**32 - 1) + b"\x00" * 10,
            "bytes of 2**32 - 1": TOKEN_IDS + b"\x93\xa3<i4\x01\xc6" + struct.pack(">I", 2**32 - 1),
            "text of 2**32 - 1": MESSAGES + b"\x91\xdb" + struct.pack(">I", 2**32 - 1),
            "extension of 2**32 - 1": TOKEN_IDS + b"\xc9" + struct.pack(">I", 2**32 - 1) + b"\x01",
            "nested arrays": TOKEN_IDS + b"\x91" * MANY,
            "nested maps": MESSAGES + b"\x91" + b"\x81\xa1a" * MANY,
            "nested keys": TOKEN_IDS + b"\x81" * MANY,
            "many empty maps": MESSAGES + array32(MANY) + b"\x80" * MANY,
            "many empty arrays": TOKEN_IDS + b"\x93" + array32(MANY) + b"\x90" * MANY + b"\x00\x00",
            "many maps of one": MESSAGES + array32(MANY) + b"\x81\xa0\x90" * MANY,
            "many spans": SPANS + array32(MANY) + b"\x93\x00\x00\x00" * MANY,
            "a long unknown finish reason": ROLLOUTS
            + b"\x91\x81\xadfinish_reason\xdb"
            + struct.pack(">I", MANY)
            + b"x" * MANY,
            "bad timestamp": TOKEN_IDS + b"\xc7\x0c\xff" + b"\xff" * 12,
        }.items()
    ],
)
def test_hostile_bytes_are_refused_at_a_bounded_cost(data: bytes) -> None:
    started = process_time()
    tracemalloc.start()
    try:
        with pytest.raises(codec.DecodeError) as refusal:
            codec.decode(data, Group)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data) + 200_000
    assert len(str(refusal.value)) < 500
    assert process_time() - started < 5


def of_msgpack(value: Any, depth: int = 0) -> codec.Shape:
    """The shape of a plain value."""
    if isinstance(value, dict):
        parts = [of_msgpack(part, depth + 1) for item in value.items() for part in item]
    elif isinstance(value, list):
        parts = [of_msgpack(part, depth + 1) for part in value]
    else:
        return codec.Shape(1, 0, depth)
    return codec.Shape(
        1 + sum(part.items for part in parts),
        1 + sum(part.containers for part in parts),
        max([depth + 1, *(part.depth for part in parts)]),
    )


LOOSE = codec.Shape(items=10**6, containers=10**6, depth=100)

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.sampled_from([list(range(20)), {i: i for i in range(20)}])
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=100, deadline=None)
@given(plain_values)
@example([b"x" * 70_000, "x" * 70_000, [0] * 70_000, {i: i for i in range(70_000)}])
def test_the_shape_of_msgpack_is_what_was_encoded(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert codec.shape(data, LOOSE) == of_msgpack(value)
    if len(data) < 500:
        for end in range(len(data)):
            with pytest.raises(codec.DecodeError, match="ends within a value"):
                codec.shape(data[:end], LOOSE)


def test_a_shape_is_read_no_further_than_its_bounds() -> None:
    deep, wide = b"\x91" * 10**6, b"\xdd\x00\x0f\xff\xff" + b"\x90" * 10**6
    assert codec.shape(deep, codec.Shape(10**9, 10**9, 32)) == (34, 33, 33)
    assert codec.shape(wide, codec.Shape(1000, 10**9, 32)) == (1 + 0xFFFFF, 1, 1)
    assert codec.shape(wide, codec.Shape(10**9, 100, 32)) == (101, 101, 2)


def test_a_real_group_takes_about_its_own_size_to_decode() -> None:
    data = codec.encode(a_group(tokens=20_000, size=4))
    tracemalloc.start()
    try:
        group = codec.decode(data, Group)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert group.sampled_tokens == 80_000
    assert peak < 2 * len(data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b'{"version": 1e999999}'])
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode_json(data, RunPosition)


@pytest.mark.parametrize(
    "wire",
    [
        ["<i4", 2, b"\0" * 4],
        ["<i4", 1, b"\0" * 5],
        ["<i4", -1, b""],
        ["<i4", 2**63, b"\0" * 8],
        ["<i4", 1.0, b"\0" * 4],
        ["<i4", True, b"\0" * 4],
        ["<i4", None, b""],
        ["<i4", 1, "\0\0\0\0"],
        ["<i4", 1],
        ["<i4", 1, b"\0" * 4, 0],
        ["<f4", 1, b"\0" * 4],
        ["|b1", 4, b"\0" * 4],
        [">i4", 1, b"\0" * 4],
        ["<i8", 1, b"\0" * 8],
        ["|O", 1, b"\0" * 8],
        [4, 1, b"\0" * 4],
        [["<i4"], 1, b"\0" * 4],
        {"dtype": "<i4"},
        "text",
        b"\0" * 4,
        7,
        None,
    ],
)
def test_arrays_of_wrong_dtype_or_length_are_refused(wire: object) -> None:
    empty = {"loss_mask": ["|b1", 0, b""], "logprobs": ["<f4", 0, b""], "version_spans": []}
    with pytest.raises(codec.DecodeError):
        codec.decode(msgspec.msgpack.encode({"token_ids": wire, **empty}), Segment)


def test_a_mask_of_other_bytes_than_0_and_1_is_refused() -> None:
    wire = {
        "token_ids": ["<i4", 0, b""],
        "loss_mask": ["|b1", 3, b"\1\2\1"],
        "logprobs": ["<f4", 0, b""],
        "version_spans": [],
    }
    with pytest.raises(codec.DecodeError, match="other than 0 and 1"):
        codec.decode(msgspec.msgpack.encode(wire), Segment)


def test_invalid_utf8_is_refused() -> None:
    data = codec.encode(a_group())
    assert data.count(b"ticket\xa5") == 1  # the id's text, followed by the next key
    with pytest.raises(codec.DecodeError):
        codec.decode(data.replace(b"ticket\xa5", b"tick\xff\xfe\xa5"), Group)
    with pytest.raises(codec.DecodeError):
        codec.decode_json(b'{"reason": "\xff\xfe", "message": ""}', messages.ErrorBody)


def test_a_missing_field_of_a_group_is_refused_and_so_is_an_unknown_one() -> None:
    """It is kept as it came: what nobody reads must not be kept. A newer peer's has another schema version."""
    fields = msgspec.msgpack.decode(codec.encode(a_group()))
    with pytest.raises(codec.DecodeError, match="unknown field `new`"):
        codec.decode(msgspec.msgpack.encode({**fields, "new": 1}), Group)
    del fields["ticket_id"]
    with pytest.raises(codec.DecodeError, match="ticket_id"):
        codec.decode(msgspec.msgpack.encode(fields), Group)


FIRST_DECODE_ON_EIGHT_THREADS = """
import sys, threading
import numpy as np
from slipstream.protocol import codec
from slipstream.protocol.messages import Group, Rollout, Segment, VersionSpan

sys.setswitchinterval(1e-6)
ids = np.arange(5, dtype=np.int32)
segment = Segment(ids, np.ones(5, bool), -np.ones(5, np.float32), [VersionSpan(1, 0, 5, 0)])
data = codec.encode(Group("a", 0, 0, [Rollout([segment], 1.0, "stop")], "w", ["s"], 0, 1))
barrier = threading.Barrier(8)

def decode():
    barrier.wait()
    for _ in range(20):
        codec.decode(data, Group)

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_groups_that_arrive_together_do_not_crash_the_process() -> None:
    """In its own process, ten times: without the lock most of them die of a segmentation fault."""
    runs = [subprocess.Popen([sys.executable, "-c", FIRST_DECODE_ON_EIGHT_THREADS]) for _ in range(10)]
    assert [run.wait() for run in runs] == [0] * 10


def test_a_group_from_before_weights_were_sent_still_decodes() -> None:
    """As a store may hold it: its reward functions weigh 1."""
    sent = msgspec.msgpack.decode(codec.encode(a_group()))
    del sent["reward_weights"]
    assert codec.decode(msgspec.msgpack.encode(sent), Group).reward_weights == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model","type":"NotFoundError","param":null,"code":404}}', "no such model"),
        (b'{"error":"busy"}', "busy"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":[{"loc":["body"],"msg":"missing"}]}', "an error without a message"),
        (b"[1]", "an error without a message"),
        (b"502 Bad Gateway", "502 Bad Gateway"),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_message_of_an_error_is_never_json(body: bytes, message: str) -> None:
    assert codec.error_message(body) == message
