"""Rows, read behind the boundary."""

import collections
import enum
import threading

import numpy as np
import pytest

from slipstream.protocol import reasons
from slipstream.rollout_worker.task.row_reader import RowReader
from slipstream.rollout_worker.user_code import UserCode, UserCodeError
from tests.kit import config
from tests.kit.worker import row, task


def any_row(completions, **columns):
    return [0.0] * len(completions)


class Role(enum.StrEnum):
    USER = "user"


async def read(dataset, index=0, timeout_s=30.0):
    async with UserCode() as code:
        return await RowReader(
            task(dataset=dataset, tools=[], rewards=[any_row]), __file__, code, config().task, timeout_s
        ).read(index, 0)


class Later(list):
    """Rows whose first look, at the start, is not like the later ones."""

    def __init__(self, later, first=None):
        super().__init__([first or row()])
        self.later, self.looks = later, 0

    def __getitem__(self, place):
        self.looks += 1
        return super().__getitem__(place) if self.looks == 1 else self.later()


async def test_i9_a_row_is_its_tickets_own():
    rows = [row(parts=[[1]])]
    for _ in range(2):
        found = await read(rows)
        assert found.columns == rows[0]
        found.columns["prompt"][0]["content"] = "other"
        found.columns["parts"][0].append(2)
        found.columns.clear()
    assert rows == [row(parts=[[1]])]


async def test_i9_a_prompt_comes_back_as_plain_data():
    odd = collections.UserDict(role=Role.USER, content=np.str_("x"), n=np.int64(3), parts=({"a": np.arange(2)},))
    found = await read([collections.UserDict(prompt=[odd])])
    (message,) = found.columns["prompt"]
    assert message == {"role": "user", "content": "x", "n": 3, "parts": [{"a": [0, 1]}]}
    assert {type(message), *map(type, message.values())} == {dict, str, int, list}


async def test_i9_the_data_set_is_read_in_a_thread():
    idents = []
    await read(Later(lambda: idents.append(threading.get_ident()) or row()))
    assert idents
    assert threading.get_ident() not in idents


class Broken(dict):
    def items(self):
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("later", "text"),
    [
        (lambda: {}["gone"], "KeyError: 'gone'"),
        (lambda: exit(3), "SystemExit(3)"),
        (lambda: Broken(prompt="x"), "SystemExit(3)"),
        (lambda: None, "TypeError: it is a NoneType, not a mapping of columns"),
        (lambda: {"promt": "x"}, "ValueError: it has no column 'prompt', it has ['promt']"),
        (lambda: {"prompt": []}, "ValueError: its prompt is empty"),
        (lambda: {"prompt": "\ud800"}, "ValueError: its prompt has '\\ud800', half a character"),
        (lambda: {"prompt": [{"role": "user", "content": "a\udc00"}]}, "ValueError: its prompt has '\\udc00'"),
        (lambda: {"prompt": ["x"]}, "ValueError: its prompt is a list; give text or a list of messages"),
        (lambda: {"prompt": [{"role": "user", "content": object()}]}, "ValueError: prompt[0].content is a object"),
    ],
)
async def test_i9_a_row_that_fails_is_named(later, text):
    with pytest.raises(UserCodeError) as failure:
        await read(Later(later))
    assert str(failure.value).startswith(f"row 0 of the data set: {text}")


async def test_i9_a_row_whose_columns_hold_each_other_fails_alone():
    ring = []
    ring.append(ring)
    with pytest.raises(UserCodeError, match="row 0 of the data set: RecursionError"):
        await read(Later(lambda: {"prompt": [{"role": "user", "content": ring}]}))
    assert len((await read(Later(lambda: row(ring=ring)))).columns["ring"]) == 1


async def test_i9_a_row_that_never_comes_is_given_up():
    release = threading.Event()
    with pytest.raises(UserCodeError, match=r"the row of index 0 of the data set: no answer within 0.01 s") as late:
        await read(Later(release.wait), timeout_s=0.01)
    assert late.value.kind == reasons.TIMEOUT
    release.set()
