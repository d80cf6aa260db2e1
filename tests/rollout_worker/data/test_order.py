"""Which row a ticket is for: by shuffling, as given, chosen by the queue, and of which part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.protocol.mix import MIX_CYCLE, Mix
from slipstream.rollout_worker.data.order import RowOrder, check_order, order_of
from slipstream.rollout_worker.data.rows import Stream, Table
from slipstream.rollout_worker.task.rewards import build_rewards
from tests.kit import WORKER, config
from tests.kit.worker import fake, roll, row, task

PARTS = ["math"] * 3 + ["code"] * 5 + ["math", "chat"]
ROWS = [{"prompt": f"question {number}", "part": part} for number, part in enumerate(PARTS)]
SHARES = {"math": 0.75, "code": 0.25, "chat": 0.0}


def section(**settings: Any) -> TaskSection:
    return config(task=settings).task


@pytest.mark.parametrize("order", ["shuffled", "as_given"])
def test_each_part_has_its_share_and_every_row_of_it_comes_once_in_its_epoch(order: str) -> None:
    of = RowOrder(Table(ROWS), order, SHARES, "part")
    numbers = [of.place_of(index, 3).number for index in range(MIX_CYCLE)]
    assert Counter(PARTS[number] for number in numbers) == {"math": 750, "code": 250}
    for part, size in (("math", 4), ("code", 5)):
        of_part = [number for number in numbers if PARTS[number] == part]
        all_of_it = [number for number, name in enumerate(PARTS) if name == part]
        epochs = [of_part[first : first + size] for first in range(0, len(of_part) - size, size)]
        assert all(sorted(epoch) == all_of_it for epoch in epochs)
        assert any(epoch != all_of_it for epoch in epochs) == (order == "shuffled")
    assert of.place_of(25, 3).epoch == 2, "an epoch is as many groups as there are rows"
    assert of.row_for(25, 3).columns == ROWS[of.place_of(25, 3).number]


def test_parts_are_spread_evenly_and_continue_over_the_cycle() -> None:
    mix = Mix({"a": 0.5, "b": 0.5})
    assert [mix.place(index) for index in range(4)] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert mix.place(MIX_CYCLE) == ("a", MIX_CYCLE // 2)
    thirds = Mix({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert sorted(Counter(thirds.place(index).part for index in range(MIX_CYCLE)).values()) == [333, 333, 334]
    rare = Mix({"a": 0.999, "b": 0.001})
    assert Counter(rare.place(index).part for index in range(3 * MIX_CYCLE))["b"] == 3


def test_the_row_that_the_queue_chose_counts_over_the_parts_by_name() -> None:
    of = RowOrder(Table(ROWS), "learnable", SHARES, "part")
    assert of.parts == {"chat": 1, "code": 5, "math": 4}
    assert [of.place_of(0, 0, chosen).number for chosen in range(10)] == [9, 3, 4, 5, 6, 7, 0, 1, 2, 8]
    plain = RowOrder(Table(ROWS), "learnable", {}, "part")
    assert plain.place_of(25, 0, 7) == (2, 7)
    for chosen in (None, 10):
        with pytest.raises(ValueError, match="start the queue, too"):
            plain.place_of(0, 0, chosen)


def test_a_data_set_of_the_library_is_read_by_columns() -> None:
    datasets = pytest.importorskip("datasets")
    of = RowOrder(Table(datasets.Dataset.from_list(ROWS)), "as_given", SHARES, "part")
    assert of.parts == {"chat": 1, "code": 5, "math": 4}


def broken() -> Table:
    class Broken(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            raise OSError("the disk is gone")

    return Table(Broken(ROWS))


@pytest.mark.parametrize(
    ("rows", "settings", "text"),
    [
        (lambda: Stream(lambda _: iter(ROWS)), {"order": "learnable"}, r'"learnable": the data set is an iterable'),
        (lambda: Stream(lambda _: iter(ROWS)), {"mix": {"a": 1.0}}, r"task\.mix = .*: the data set is an iterable"),
        (lambda: Table(ROWS), {"mix": {"math": 1.0}}, r"row 3 is of the part 'code', and there are shares of math"),
        (lambda: Table(ROWS), {"mix": {**SHARES, "code": 0.2, "maths": 0.05}}, r"'maths' has a share of 0\.05.*math\?"),
        (lambda: Table(ROWS), {"mix": {"a": 1.0}, "mix_column": "kind"}, r"'kind': row 0 has no such column.*part"),
        (lambda: Table([ROWS[0], {}]), {"mix": {"math": 1.0}}, r"'part': row 1 has no such column.* has part, prompt"),
        (broken, {"mix": {"a": 1.0}}, r"cannot be read: OSError: the disk is gone"),
    ],
)
def test_an_order_that_the_rows_do_not_allow_is_refused(
    rows: Callable[[], Any], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        check_order(rows(), section(**settings), has_no_data=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"order": "learnable"}, {"mix": {"a": 1.0}}])
def test_without_a_data_set_there_are_no_rows_to_choose(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the task has no data set"):
        check_order(Table([{}]), section(**settings), has_no_data=True)


@pytest.mark.parametrize(
    "choosing", [{"task": {"order": "learnable"}}, {"learner": {"keep_best": True}, "eval": {"every": 1}}]
)
def test_rows_and_checkpoints_cannot_be_chosen_by_a_teacher_alone(choosing: dict[str, Any]) -> None:
    teacher = {"url": "http://127.0.0.1:1", "coef": 1.0}
    build_rewards(config(teacher=teacher), [], None)
    with pytest.raises(ConfigError, match=r"a teacher alone gives none"):
        build_rewards(config(teacher=teacher, **choosing), [], None)


def test_the_column_of_the_parts_is_read_once() -> None:
    rows, settings = Table(ROWS), section(mix=SHARES)
    assert order_of(rows, settings) is order_of(rows, section(mix=dict(reversed(SHARES.items()))))


async def test_a_worker_makes_groups_of_the_parts_of_the_mix() -> None:
    rows = [row(number=number, part="b" if number else "a") for number in range(4)]

    def of_the_row(completions: list[Any], number: list[float], **_: Any) -> list[float]:
        return number

    settings = config(WORKER, task={"order": "as_given", "mix": {"a": 0.5, "b": 0.5}}, worker={"episodes": 2})
    done = await roll(task(dataset=rows, rewards=[of_the_row]), fake(), tickets=8, config=settings)
    groups = sorted(done.queue.groups, key=lambda group: group.index)
    assert [group.rollouts[0].reward for group in groups] == [0, 1, 0, 2, 0, 3, 0, 1]
    assert [group.epoch for group in groups] == [0, 0, 0, 0, 1, 1, 1, 1]
