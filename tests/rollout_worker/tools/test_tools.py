import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import sys
import threading
import time
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ToolCall
from slipstream.rollout_worker.tools.arguments import Parameters
from slipstream.rollout_worker.tools.base import MAX_COUNTED, as_text
from slipstream.rollout_worker.tools.toolbox import ToolBox


def look_up(key: str, depth: int | None = None, kind: Literal["a", "b"] = "a") -> str:
    """Look a key up.

    Args:
        key: What to look up.
        depth: How deep.
        kind: Which one.
    """
    return f"{key}/{depth}/{kind}"


async def wait_for(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def fail(how: str) -> None:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "exit":
        sys.exit(3)
    if how == "stop":
        raise StopIteration
    raise RuntimeError(how)


async def fail_async(how: str) -> None:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "cancel":
        raise asyncio.CancelledError
    fail(how)


def numbers() -> dict[str, int]:
    """Give numbers."""
    return {"a": 1}


TOOLS = [look_up, wait_for, fail, fail_async, numbers]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"key": "x"}, "x/None/a"),
        ({"key": "x", "depth": None}, "x/None/a"),
        ({"key": "x", "depth": 3, "kind": "b"}, "x/3/b"),
    ],
)
async def test_a_call_with_good_arguments(arguments, answer):
    (result,) = await ToolBox(TOOLS).run([ToolCall("look_up", arguments)])
    assert result.message() == {"role": "tool", "name": "look_up", "content": answer}
    assert not result.failed


async def test_lists_and_dicts_are_answered_as_json():
    (result,) = await ToolBox(TOOLS).run([ToolCall("numbers", {})])
    assert result.content == '{"a": 1}'


@dataclasses.dataclass
class Point:
    x: int


class Model(BaseModel):
    y: float


class PIL:
    """Stands in for an image of the library of that name."""


PIL.__module__ = "PIL.Image"


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (None, "None"),
        (True, "True"),
        (7, "7"),
        ("text", "text"),
        ("a\ud800b", "a?b"),
        ([1, "two", None], '[1, "two", null]'),
        ({"a": {"b": (1, 2)}}, '{"a": {"b": [1, 2]}}'),
        ((1, 2), "[1, 2]"),
        (Point(3), '{"x": 3}'),
        (Model(y=1), '{"y": 1.0}'),
        ([Point(3), {"m": Model(y=1)}], '[{"x": 3}, {"m": {"y": 1.0}}]'),
        ({"at": datetime.date(2024, 2, 29), "of": {3}}, '{"at": "2024-02-29", "of": [3]}'),
        (np.float64(1.5), "1.5"),
        ({"n": np.int64(3), "v": np.array([1, 2])}, '{"n": 3, "v": [1, 2]}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
async def test_a_result_as_the_text_that_the_policy_reads(result, content):
    def tool():
        """Give it."""
        return result

    (answer,) = await ToolBox([tool]).run([ToolCall("tool", {})])
    assert (answer.content, answer.reason) == (content, None)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (b"text", "the tool returned bytes, and the policy reads text: decode it in the tool"),
        (PIL(), "the tool returned an image"),
        (
            [{"type": "text", "text": "one"}, {"type": "image", "image": "..."}],
            "the tool returned content of type 'image'",
        ),
    ],
)
async def test_a_result_that_is_not_text_fails_the_call_with_the_reason(result, error):
    def tool():
        """Give it."""
        return result

    (answer,) = await ToolBox([tool]).run([ToolCall("tool", {})])
    assert answer.reason == reasons.TOOL_RAISED
    assert error in json.loads(answer.content)["error"]


@pytest.mark.parametrize(
    ("call", "reason", "counted_as"),
    [
        (ToolCall("look_up", {"key": "x"}, "c1"), None, "look_up"),
        (ToolCall("nobody", {}, "c1"), reasons.TOOL_UNKNOWN, "unknown"),
        (MalformedCall("not JSON"), reasons.TOOL_MALFORMED, "unknown"),
        (ToolCall("look_up", {}, "c1"), reasons.TOOL_ARGUMENTS, "look_up"),
        (ToolCall("look_up", "what?", "c1"), reasons.TOOL_ARGUMENTS, "look_up"),
        (ToolCall("fail", {"how": "boom"}, "c1"), reasons.TOOL_RAISED, "fail"),
        (ToolCall("fail", {"how": "exit"}, "c1"), reasons.TOOL_RAISED, "fail"),
        (ToolCall("wait_for", {"seconds": 60}, "c1"), reasons.TIMEOUT, "wait_for"),
    ],
)
async def test_a_failure_has_a_reason_and_answers_its_call(call, reason, counted_as):
    (result,) = await ToolBox(TOOLS, timeout_s=0.1).run([call])
    assert (result.reason, result.failed, result.counted_as) == (reason, reason is not None, counted_as)
    assert result.message().get("tool_call_id") == getattr(call, "id", None)


async def test_what_the_policy_writes_as_names_and_ids_is_bounded():
    (result,) = await ToolBox(TOOLS).run([ToolCall("n\ud800" * 10_000, {}, "i\ud800" * 10_000)])
    assert all(len(text.encode("utf-8")) < 1000 for text in result.message().values())


@pytest.mark.parametrize(
    ("arguments", "coerced"),
    [({"key": "x", "depth": 3}, False), ({"key": "x", "depth": "3"}, True), ('key: "x", depth: 3', True)],
)
async def test_arguments_that_are_read_as_they_were_meant_are_counted(arguments, coerced):
    (result,) = await ToolBox(TOOLS).run([ToolCall("look_up", arguments)])
    assert (result.content, result.coerced) == ("x/3/a", coerced)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (ToolCall("nobody", {}), "there is no tool 'nobody'; the tools are: look_up, "),
        (ToolCall("look_up", {}), "'key' is a required property"),
        (ToolCall("look_up", {"key": 1}), "1 is not of type 'string'"),
        (ToolCall("look_up", {"key": "x", "depth": "deep"}), "depth"),
        (ToolCall("look_up", {"key": "x", "kind": "c"}), "'c' is not one of"),
        (ToolCall("look_up", {"key": "x", "other": 1}), "'other' was unexpected"),
        (ToolCall("wait_for", {"seconds": True}), "True is not of type 'number'"),
        (ToolCall("wait_for", {"seconds": 60}), "no answer within 0.5 s"),
        (ToolCall("fail", {"how": "boom"}), "RuntimeError: boom"),
        (ToolCall("fail", {"how": "exit"}), "SystemExit(3)"),
        (ToolCall("fail", {"how": "stop"}), "StopIteration"),
        (ToolCall("fail_async", {"how": "boom"}), "RuntimeError: boom"),
        (ToolCall("fail_async", {"how": "exit"}), "SystemExit(3)"),
        (ToolCall("fail_async", {"how": "cancel"}), "cancelled itself"),
        (MalformedCall("not JSON"), "not JSON"),
    ],
)
async def test_whatever_goes_wrong_becomes_a_tool_message(call, error):
    (result,) = await ToolBox(TOOLS, timeout_s=0.5).run([call])
    assert result.failed
    assert error in json.loads(result.content)["error"]


class Odd:
    """An object of the user's whose text fails, hangs, or stops the process."""

    def __init__(self, how):
        self.how = how

    def __str__(self):
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "exit":
            sys.exit(3)
        raise ValueError(self.how)

    __repr__ = __str__


def odd(how: str) -> object:
    """Give something odd.

    Args:
        how: In which way.
    """
    return Odd(how)


async def odd_async(how: str) -> object:
    """Give something odd.

    Args:
        how: In which way.
    """
    return [Odd(how)]


@pytest.mark.parametrize("tool", [odd, odd_async])
@pytest.mark.parametrize(
    ("how", "error"), [("raise", "ValueError: raise"), ("exit", "SystemExit(3)"), ("hang", "no answer within 0.2 s")]
)
async def test_i9_a_result_whose_text_fails_or_hangs_fails_the_call_and_blocks_nothing(tool, how, error):
    box = ToolBox([tool, look_up], timeout_s=0.2)
    bad, good = await box.run([ToolCall(tool.__name__, {"how": how}), ToolCall("look_up", {"key": "x"})])
    assert json.loads(bad.content)["error"] == error
    assert bad.error.where.startswith(f"{__file__}:")
    assert not good.failed


@pytest.mark.parametrize("call", [ToolCall("look_up", {"key": "a\ud800b"}), ToolCall("no\ud800body", {})])
async def test_i9_what_no_tokenizer_takes_is_replaced(call):
    """A lone surrogate, which the policy can sample as an escape in its JSON."""
    (result,) = await ToolBox(TOOLS).run([call])
    assert all(text.encode("utf-8") for text in result.message().values())


async def test_large_arguments_are_checked_beside_the_loop(monkeypatch):
    threads = []
    fit = Parameters.fit
    monkeypatch.setattr(
        Parameters,
        "fit",
        lambda self, given, as_text: (threads.append(threading.current_thread()), fit(self, given))[1],
    )
    box = ToolBox(TOOLS)
    for key in ("short", "long" * 1000):
        (result,) = await box.run([ToolCall("look_up", {"key": key})])
        assert result.content == f"{key}/None/a"
    small, large = threads
    assert small is threading.current_thread()
    assert large is not small


async def test_tools_beyond_a_number_are_counted_together():
    def named(number):
        def tool() -> int:
            """Give a number."""
            return number

        tool.__name__ = f"tool_{number}_{'x' * 100}"
        return tool

    tools = [named(number) for number in range(MAX_COUNTED + 10)]
    results = await ToolBox(tools).run([ToolCall(tool.__name__, {}) for tool in tools])
    assert [result.content for result in results] == [str(number) for number in range(MAX_COUNTED + 10)]
    names = {result.counted_as for result in results}
    assert (len(names), max(map(len, names))) == (MAX_COUNTED + 1, 64)


async def test_a_sync_tool_that_never_returns_is_bounded_and_takes_no_slot():
    release = threading.Event()

    def block() -> None:
        """Never return."""
        release.wait()

    box = ToolBox([block, look_up], timeout_s=0.5)
    started = time.monotonic()
    results = await box.run([ToolCall("block", {})] * 40)
    assert all(result.failed for result in results)
    assert time.monotonic() - started < 10, "40 calls of 0.5 s each, side by side"
    (result,) = await box.run([ToolCall("look_up", {"key": "x"})])
    assert not result.failed
    release.set()


async def test_an_async_tool_that_swallows_its_cancellation_is_bounded():
    over = asyncio.Event()

    async def stubborn() -> None:
        """End when it likes."""
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    (result,) = await ToolBox([stubborn], timeout_s=0.05).run([ToolCall("stubborn", {})])
    assert result.failed
    over.set()


async def test_the_calls_of_a_turn_run_side_by_side():
    barrier = threading.Barrier(3, timeout=5)

    def meet() -> str:
        """Wait for the others."""
        barrier.wait()
        return "met"

    results = await ToolBox([meet]).run([ToolCall("meet", {})] * 3)
    assert [result.content for result in results] == ["met"] * 3


def no_hints(a, b):
    """Multiply.

    Args:
        a: One.
        b: Two.
    """


def no_docstring(a: int) -> int:
    return a


def undescribed(a: int) -> int:
    """Give it back."""
    return a


class Named:
    def __init__(self, name):
        self.schema = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}

    async def call(self, arguments, timeout_s):
        return ""


BAD_NAMES = ("", "a b", "a\nb<|im_end|>", "größe", "t\ud800", "x" * 129, 7)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([no_hints], "'no_hints' cannot be described.*type hint"),
        ([no_docstring], "'no_docstring' cannot be described.*docstring"),
        ([undescribed], "'undescribed' cannot be described"),
        (["multiply"], "'multiply' cannot be made into a tool"),
        *(([Named(name)], r"cannot be a tool's name: models write 1 to 128") for name in BAD_NAMES),
        ([look_up, look_up], "two tools are named 'look_up'"),
    ],
)
def test_a_tool_without_a_schema_is_refused_with_a_remedy(tools, message):
    with pytest.raises(ConfigError, match=message):
        ToolBox(tools)


def test_i7_of_two_tools_of_one_name_both_are_told_with_file_and_line():
    def named_alike(query: str) -> str:
        """Look up.

        Args:
            query: What.
        """
        return query

    named_alike.__name__ = "look_up"
    lines = [function.__code__.co_firstlineno for function in (look_up, named_alike)]
    told = f"one from the function at {__file__}:{lines[0]}, one from the function at {__file__}:{lines[1]}; rename one"
    with pytest.raises(ConfigError, match=told):
        ToolBox([look_up, named_alike])


class Greedy(str):
    """A long text that tells when all of it is copied."""

    def encode(self, *arguments):
        raise AssertionError("encoded before it was cut")

    def __str__(self):
        raise AssertionError("copied before it was cut")


@pytest.mark.parametrize(
    "result", [Greedy("x" * 3_000_000), ["x" * 100] * 30_000, {"a": "\ud800" * 3_000_000}, {1: {2: itertools.repeat}}]
)
def test_i9_a_result_is_cut_before_it_is_copied(result):
    """Ten megabytes held the interpreter lock, and so the worker's loop."""
    text = as_text(result)
    assert type(text) is str
    assert len(text.encode()) < 1_100_000


def test_i9_of_a_long_list_no_more_is_written_than_is_kept():
    written = []

    class Entry:
        def __str__(self):
            raise AssertionError

        def tolist(self):
            written.append(1)
            return "x" * 1000

    assert as_text([Entry() for _ in range(5000)]).endswith("(the rest is left out)")
    assert len(written) < 1100


def test_i9_a_tool_that_cannot_be_shown_as_utf_8_is_refused_at_the_start():
    def lookup(word: str) -> str:
        """Look it up.

        Args:
            word: A word.
        """

    lookup.__doc__ = lookup.__doc__.replace("it up", "caf\udce9 up")
    with pytest.raises(ConfigError, match="UnicodeEncodeError"):
        ToolBox([lookup])
    lookup.__doc__, lookup.__name__ = lookup.__doc__.replace("\udce9", ""), "caf\udce9"
    with pytest.raises(ConfigError, match="cannot be a tool's name"):
        ToolBox([lookup])


async def test_what_a_generator_gives_is_read_whole():
    def lines(count: int):
        """Read lines.

        Args:
            count: How many.
        """
        for number in range(count):
            yield f"line {number}"

    def backwards(items: list[int]):
        """Reverse numbers.

        Args:
            items: The numbers.
        """
        return reversed(items)

    async def slowly(count: int):
        """Count.

        Args:
            count: Up to this.
        """
        for number in range(count):
            yield number

    calls = [("lines", {"count": 2}), ("backwards", {"items": [1, 2]}), ("slowly", {"count": 2}), ("endless", {})]
    tools = [lines, backwards, slowly, endless]
    results = await ToolBox(tools).run([ToolCall(name, arguments) for name, arguments in calls])
    assert [result.content for result in results[:3]] == ['["line 0", "line 1"]', "[2, 1]", "[0, 1]"]
    assert results[3].reason == reasons.TOOL_RAISED
    assert "more than 100000 items" in results[3].content


def endless():
    """Never end."""
    return itertools.count()


def test_a_prompt_that_is_none_is_left_to_the_check_of_prompts():
    for prompt in ("text", None, ["text", None], [{"role": "assistant", "tool_calls": [None, "x", {"function": "f"}]}]):
        assert ToolBox([look_up]).without_nulls(prompt) == prompt
