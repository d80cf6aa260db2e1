import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.rollout_worker.task.task import Task, load_task
from tests.kit.worker import row, task

GOOD = """
from slipstream.rollout_worker.task.task import Task

def good(completions, **kwargs):
    return [0.0] * len(completions)

def untyped(a):
    '''Do.

    Args:
        a: One.
    '''

task = Task(dataset=[{"prompt": "hello"}], rewards=[good])
nothing = None
"""


@given(st.integers(1, 50), st.integers(0, 2**31 - 1), st.integers(0, 3))
def test_an_epoch_shows_every_row_once_in_an_order_of_its_own_seed(rows, seed, epoch):
    one = task(dataset=[row(number=number) for number in range(rows)])
    other = task(dataset=[row(number=number) for number in range(rows)])
    drawn = [one.row_for(epoch * rows + place, seed) for place in range(rows)]
    assert {entry.epoch for entry in drawn} == {epoch}
    assert sorted(entry.columns["number"] for entry in drawn) == list(range(rows))
    assert drawn == [other.row_for(epoch * rows + place, seed) for place in range(rows)]


def test_epochs_and_seeds_differ_in_order():
    the_task = task(dataset=[row(number=number) for number in range(100)])

    def order(seed, epoch):
        return [the_task.row_for(epoch * 100 + place, seed).columns["number"] for place in range(100)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_any_sequence_of_mappings_is_a_data_set():
    rows = collections.UserList([collections.UserDict(row())])
    assert task(dataset=rows).row_for(5, seed=0).epoch == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": []}, "is empty"),
        ({"dataset": iter([row()])}, "list_iterator"),
        ({"dataset": [{"question": "x"}]}, r"no 'prompt' column, it has \['question'\]"),
        ({"dataset": [row(completions=1)]}, "'completions' is a name that reward functions already get"),
        ({"dataset": [{"prompt": 3}], "tools": []}, "first prompt is a int"),
        ({"dataset": [{"prompt": "Multiply."}]}, "tools need a conversation"),
        ({"environment_factory": dict}, r"Task\(environment=\.\.\.\): dict has no method reset"),
        ({"tools": [lambda a: a]}, "cannot be described"),
    ],
)
def test_a_task_that_cannot_work_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        task(**changes)


def test_a_task_is_loaded_from_its_file(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    assert isinstance(load_task(TaskSection(path=f"{tmp_path}/good.py:task")), Task)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (GOOD, "tasks", "defines no 'tasks', it has task; define it there or name another"),
        ("x = 1", "task", "defines no 'task', it has no Task"),
        (GOOD, "nothing", r"nothing is a NoneType, not a Task; write nothing = slipstream\.Task\("),
        ("import no_such_module", "task", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def task(:", "task", "cannot be imported: SyntaxError"),
        ("raise SystemExit(1)", "task", "cannot be imported: SystemExit"),
        (
            GOOD.replace('"hello"}]', '[{"role": "user", "content": "x"}]}], tools=[untyped]'),
            "task",
            "'untyped' cannot be described.*type hint",
        ),
    ],
)
def test_a_task_file_that_cannot_be_used_is_one_message(tmp_path, source, name, message):
    (tmp_path / "bad.py").write_text(source)
    path = f"{tmp_path}/bad.py:{name}"
    with pytest.raises(ConfigError, match=message) as caught:
        load_task(TaskSection(path=path))
    assert path in str(caught.value)


def test_a_missing_task_file_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="there is no Python file"):
        load_task(TaskSection(path=f"{tmp_path}/none.py:task"))
