"""All rows are looked at before a start: those that no reward could be written for are refused, others are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.data.columns import MAX_ROWS, Findings, check_rows, prompt_fault
from slipstream.rollout_worker.data.rows import Stream, Table, spread

ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


def check(rows: list[Any], clock: Any = lambda: 0.0) -> Findings:
    return check_rows(Table(rows), clock)


def test_rows_that_are_alike_pass() -> None:
    rows = [{"prompt": ASKED, "answer": number} for number in range(5000)]
    assert check(rows) == Findings(5000, {})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "answer": 1}] * 7 + [{"prompt": "a"}], "row 7 has no column 'answer', which row 0 has"),
        ([{"prompt": "a"}] * 7 + [{"prompt": "a", "answer": 1}], "row 0 has no column 'answer', which row 7 has"),
        ([{"prompt": "a"}] * 1500 + [{"question": "a"}], "row 1500 has no column 'prompt', which row 0 has"),
        ([{"prompt": ASKED}, {"prompt": "a"}], "the prompt of row 1 is text, and those before it are messages"),
    ],
)
def test_rows_that_differ_are_refused_with_their_number(rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(rows)


SURROGATE = "its prompt has '\\ud800', half a character, which no tokenizer takes: fix the text"
RING: list[Any] = []
RING.append(RING)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (None, "its prompt is None, not text or a list of messages"),
        ("", "its prompt is empty"),
        ([], "its prompt is empty"),
        (["a"], "message 0 of its prompt is 'a', not a mapping with 'role' and 'content'"),
        ([*ASKED, {"role": "user"}], "message 1 of its prompt has no 'content', it has ['role']"),
        ([{"content": "a"}], "message 0 of its prompt has no 'role', it has ['content']"),
        ([{"from": "human", "value": "a"}], "'from' and 'value' are to be 'role' and 'content'"),
        ("a\ud800", SURROGATE),
        ([{"role": "user", "content": [{"type": "text", "text": "é\ud800"}]}], SURROGATE),
        ([{"role": "user", "content": RING}], "its prompt is nested too deeply"),
        ("a text \U0001f600", None),
        ([{"role": "assistant", "tool_calls": []}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], None),
    ],
)
def test_why_a_prompt_cannot_be_used(prompt: Any, why: str | None) -> None:
    found = prompt_fault(prompt)
    assert found == why or (why is not None and found is not None and found.endswith(why))


class Rows(list[Any]):
    """Rows of which some cannot be read."""

    reads = 0

    def __getitem__(self, number: Any) -> Any:
        self.reads += 1
        if isinstance(number, int) and super().__getitem__(number) is None:
            raise SystemExit("gone")
        return super().__getitem__(number)


def test_i9_rows_that_cannot_be_read_or_used_are_named_and_end_nothing() -> None:
    found = check(Rows([{"prompt": "a"}, None, ["b"], {"prompt": ""}, {"prompt": "c"}]))
    assert found == Findings(
        5,
        {
            1: "SystemExit: gone",
            2: "TypeError: it is a list, not a mapping of columns",
            3: "its prompt is empty",
        },
    )


class Batches(Rows):
    """Rows that can be read several at once."""

    batches = 0

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        self.batches += 1
        return [self[number] for number in numbers]


def test_rows_are_read_in_batches_where_they_can_be_and_else_one_by_one() -> None:
    rows = Batches([{"prompt": "a"}] * 3000)
    assert check(rows) == Findings(3000, {})
    assert rows.batches == 4, "one of the first 1,000, three of all"
    assert check(Batches([{"prompt": "a"}, None, {"prompt": "b"}])) == Findings(3, {1: "SystemExit: gone"})


def test_of_rows_that_take_long_to_read_a_part_is_looked_at() -> None:
    """1,000 rows in 2 s: 5,000 in 10 s."""
    rows = Rows([{"prompt": "a"}] * 20_000)
    assert check(rows, lambda: 0.002 * rows.reads).looked_at == 5000
    slow = Rows([{"prompt": "a"}] * 20_000)
    assert check(slow, lambda: 0.1 * slow.reads).looked_at == 1000


def test_of_very_many_rows_those_at_equal_distances_are_looked_at() -> None:
    numbers = spread(3 * MAX_ROWS, MAX_ROWS)
    assert (numbers[0], numbers[-1], len(set(numbers))) == (0, 3 * MAX_ROWS - 1, MAX_ROWS)
    assert spread(3, 64) == [0, 1, 2]


def test_of_a_stream_the_first_rows_are_looked_at() -> None:
    def rows(epoch: int) -> Iterator[dict[str, str]]:
        while True:
            yield {"prompt": "a"}

    assert check_rows(Stream(rows)).looked_at == 64


def test_a_stream_that_ends_early_is_looked_at_whole() -> None:
    assert check_rows(Stream(lambda epoch: iter([{"prompt": "a"}, {"prompt": ""}]))) == Findings(
        2, {1: "its prompt is empty"}
    )
