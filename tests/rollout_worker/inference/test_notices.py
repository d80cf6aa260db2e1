"""The first failure of each kind is told at once, with its text and the line of the user's code."""

import asyncio
import logging
import re

import pytest

from slipstream.protocol.client import QueueRefused
from slipstream.protocol.config import TaskSection
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_worker.inference.failures import MAX_CHARACTERS, MAX_NOTICES, FailureNotices
from slipstream.rollout_worker.task.task import load_task
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, ReadableOnce, accuracy, fake, roll, row, task

PATIENT = config(WORKER, queue={"ticket_timeout_s": 3000.0})


async def notices_of(the_task, *servers, **options):
    """Return the notices of a worker that is done with its tickets."""
    run = await roll(the_task, *(servers or [fake()]), **options)
    return [(notice.kind, notice.text) for notice in run.worker.report().notices]


def line_of(function, below=0):
    return f"({__file__}:{function.__code__.co_firstlineno + below})"


def test_the_first_of_each_kind_and_key_is_kept_and_told(caplog):
    told = []
    notices = FailureNotices()
    notices.on_new = lambda: told.append(None)
    with caplog.at_level(logging.WARNING):
        for kind, key in [("tool", "a"), ("tool", "a"), ("tool", "b"), ("reward", "a")]:
            notices.add(kind, key, f"{kind} {key} failed")
    assert [notice.text for notice in notices.found] == ["tool a failed", "tool b failed", "reward a failed"]
    assert len(told) == 3
    assert caplog.records[0].message == "tool a failed; others like it are only counted"


def test_a_failure_that_comes_back_after_a_while_is_told_again_with_what_was_counted():
    now, told = [0.0], []
    notices = FailureNotices(lambda: now[0])
    notices.on_new = lambda: told.append(now[0])
    notices.add("tool", "other", "another failed")
    for at in (10.0, 11.0, 300.0, 900.0, 901.0, 1300.0):
        now[0] = at
        notices.add("tool", "a", f"row {at:.0f} failed", "/a/task.py:3")
    assert told == [0.0, 10.0, 900.0, 1300.0]
    assert [notice.text for notice in notices.found] == [
        "another failed",
        "row 1300 failed (/a/task.py:3); again, after 7 min without, and 5 like it before",
    ]


def test_notices_are_bounded_in_number_and_length_and_keep_the_line():
    notices = FailureNotices()
    for number in range(MAX_NOTICES + 5):
        notices.add("tool", str(number), "x " * 1000, "/a/task.py:3")
    assert len(notices.found) == MAX_NOTICES
    for notice in notices.found:
        assert len(notice.text) <= MAX_CHARACTERS
        assert notice.text.endswith("... (/a/task.py:3)")
    notices = FailureNotices()
    notices.add("tool", "deep", "x " * 1000, "/deep" * 1000 + "/task.py:3")
    assert len(notices.found[0].text) <= MAX_CHARACTERS
    assert notices.found[0].text.endswith("/task.py:3)")


def short(completions, **columns):
    return [1.0]


def words(completions, **columns):
    return ["good"] * len(completions)


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def nothing(completions, **columns):
    return [None] * len(completions)


def helping(answer):
    return {"408": 1.0}[answer]


def broken(completions, answer, **columns):
    return [helping(str(right) + "!") for right in answer]


async def broken_async(completions, answer, **columns):
    return broken(completions, answer)


async def endless(completions, **columns):
    await asyncio.Event().wait()


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(3)


def unspeakable(completions, **columns):
    raise Unspeakable


class Judge:
    __name__ = "judge"

    def __call__(self, completions, **columns):
        raise OSError("no model")


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        (short, "short returned 1 rewards for 2 completions; return one for each, in their order", line_of(short)),
        (
            words,
            "words returned ['good', 'good'], which is not a list of numbers: 'good' is text, and a reward is a number",
            line_of(words),
        ),
        (nan, "nan returned nan; a reward is a finite number, or None for no reward", line_of(nan)),
        (broken, "broken: KeyError: '408!'", line_of(helping, 1)),
        (broken_async, "broken_async: KeyError: '408!'", line_of(helping, 1)),
        (endless, "endless: no answer within 0.2 s", line_of(endless)),
        (unspeakable, "unspeakable: Unspeakable, whose text fails with SystemExit", line_of(unspeakable, 1)),
        (Judge(), "judge: OSError: no model", line_of(Judge.__call__, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_reward_that_fails_is_told_once_with_its_row_and_line(function, said, line):
    run_config = config(WORKER, worker={"reward_timeout_s": 0.2})
    told = await notices_of(task(rewards=[accuracy, function]), tickets=2, config=run_config)
    assert told == [("reward", f"reward {said}; at row 0 {line}")]


async def test_no_reward_at_all_is_told():
    ((kind, text),) = await notices_of(task(rewards=[nothing]))
    assert kind == "reward"
    assert text == "every reward function gave None for 2 of 2 episodes; at row 0"


def half(a: int, b: int) -> int:
    """Divide.

    Args:
        a: One.
        b: Two.
    """
    return a // (b - b)


async def test_a_tool_that_raises_is_told_with_its_line_and_the_episode_goes_on():
    half.__name__ = "multiply"
    the_task = task(tools=[half], dataset=[row(number=number) for number in range(3)])
    ((kind, text),) = await notices_of(the_task, tickets=3)
    assert kind == "tool"
    assert text == f"tool multiply: ZeroDivisionError: integer division or modulo by zero {line_of(half, 7)}"


CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


@pytest.mark.parametrize(
    "said",
    [CALL.format("nobody", "{}"), CALL.format("multiply", '{"a": "x"}'), "<tool_call>multiply(2, 3)</tool_call>"],
    ids=["unknown", "arguments", "malformed"],
)
async def test_what_the_policy_does_wrong_is_counted_and_not_told(said):
    run = await roll(task(), fake(scripted(TOKENIZER, in_turn([said, "408"]))))
    assert run.worker.report().notices == []
    assert {rollout.tool_failures for rollout in run.rollouts} == {1}


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (ReadableOnce([row()]), "row", "row 0 of the data set: OSError: the disk is gone"),
        ([row(), {**row(), "prompt": []}], "row", "row 1 of the data set: ValueError: its prompt is empty"),
        (
            [row(), {**row(), "prompt": [{"role": "user"}]}],
            "prompt",
            "the prompt of row 1 cannot be rendered: message 0, of role 'user', has no content",
        ),
        ([row(), row(b=int("1" * 2000))], "prompt", "the prompt of row 1 has 2"),
        ([row(), row(b="1" * 40_000)], "prompt", "the prompt of row 1 has at least 40"),
    ],
)
async def test_a_row_or_prompt_that_cannot_be_used_is_told_with_its_number(rows, kind, text):
    ((told_kind, told),) = await notices_of(task(dataset=rows), tickets=4)
    assert told_kind == kind
    assert told.startswith(text)


async def test_a_failure_in_the_task_file_is_told_with_its_line(tmp_path):
    """The data set's own code is looked for in the task file."""
    file = tmp_path / "own.py"
    file.write_text(
        "from slipstream.rollout_worker.task.task import Task\n"
        "class Rows(list):\n"
        "    def __getitem__(self, place):\n"
        "        return super().__getitem__(place) if place == 0 else self.gone[place]\n"
        "def good(completions, **columns):\n"
        "    return [0.0] * len(completions)\n"
        'task = Task(dataset=Rows([{"prompt": "a"}, {"prompt": "b"}]), rewards=[good])\n'
    )
    path = f"{file}:task"
    ((_, text),) = await notices_of(
        load_task(TaskSection(path=path)), tickets=2, config=config(WORKER, task={"path": path})
    )
    assert text == f"row 1 of the data set: AttributeError: 'Rows' object has no attribute 'gone' ({file}:4)"


async def test_an_episode_that_vllm_refuses_is_told():
    server = fake(faults=[Fault("status", status=400, times=None)])
    ((kind, text),) = await notices_of(task(), server, tickets=3)
    assert kind == "episode"
    assert re.match(r"an episode failed \(rejected\): server vllm-0 at http://\S+: HTTP 400", text)


async def test_a_group_that_the_queue_refuses_is_told():
    queue = StandInQueue(tickets_for(2, 2), keep_open=True)
    queue.submit_error = QueueRefused(422, ErrorBody("logprob_positive", "rollout 0: a log-prob is 3, above 0"))
    run = await roll(
        task(),
        fake(),
        queue=queue,
        stop_when=lambda worker: worker.counters.failures["refused:logprob_positive"] == 2,
    )
    (notice,) = run.worker.report().notices
    assert notice.kind == "ticket"
    assert "rollout 0: a log-prob is 3, above 0" in notice.text


async def test_a_new_notice_is_reported_at_once(monkeypatch):
    """The next heartbeat would come in 1000 s."""
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 1000.0)
    queue = StandInQueue(tickets_for(1, 2), keep_open=True)
    await roll(
        task(rewards=[short]),
        fake(),
        queue=queue,
        config=PATIENT,
        stop_when=lambda worker: any(report.notices for report in queue.reports),
    )
    assert [notice.kind for notice in queue.reports[-1].notices] == ["reward"]


def test_i9_a_notice_can_be_sent_whatever_its_text_is():
    notices = FailureNotices()
    notices.add("tool", "a", "caf\udce9", "/caf\udce9/task.py:3")
    assert notices.found[0].text.encode() == b"caf? (/caf?/task.py:3)"
