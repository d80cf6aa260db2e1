"""A worker is known to the queue by its fingerprint before it asks for tickets."""

import asyncio
import collections
import datetime
import json
import logging
import os
import subprocess
import sys

import pytest

from slipstream.protocol import codec
from slipstream.protocol.client import GaveUp, QueueRefused, RunFinished
from slipstream.protocol.config import ConfigError
from slipstream.protocol.config import fingerprint as shared
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_worker.fingerprint import fingerprint_of
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import build_tokenizer
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, fake, roll, row, task

ROWS = [row(number, 7, number=number) for number in range(100)]


async def fingerprint(rows=ROWS, run_config=None, tokenizer=TOKENIZER, **options):
    return await fingerprint_of(run_config or config(WORKER), task(dataset=rows), tokenizer, UserCode(), **options)


async def test_the_learners_side_computes_the_same():
    ours = await fingerprint()
    learners = shared.of(config(WORKER), build_tokenizer())
    assert shared.difference(learners, ours) is None
    assert ours.rows == 100
    assert set(ours.libraries) == {"transformers", "renderers", "jinja2"}
    assert ours.data is not None


async def test_other_rows_are_another_data_set():
    ours = await fingerprint()
    assert await fingerprint(collections.UserList(map(collections.UserDict, ROWS))) == ours, "any sequence of mappings"
    assert (await fingerprint(ROWS[:-1])).rows == 99
    for place in (0, 50, 99):
        changed = [dict(entry) for entry in ROWS]
        changed[place]["answer"] = -1
        assert shared.difference(ours, await fingerprint(changed))


async def test_other_tools_are_another_task():
    """Those of an MCP server are not in the task file."""
    here = config(WORKER, task={"path": f"{__file__}:task"})
    ours = await fingerprint(run_config=here, tools=[{"name": "add"}])
    newer = await fingerprint(run_config=here, tools=[{"name": "add", "description": "Newer."}])
    assert ours.task == (await fingerprint(run_config=here, tools=[{"name": "add"}])).task
    assert ours.task != newer.task
    assert shared.difference(ours, newer) is None, "told, not refused: nothing says that it is wrong data"


class Opaque:
    """As Python writes objects of most classes: with an address."""


ODD = [
    Opaque(),
    datetime.date(2026, 1, 2),
    {"b", "a", "c"},
    b"\xff",
    float("nan"),
    int("1" * 200),
    {(1, 2): {None: [Opaque]}},
    "\ud800",
]
PRINT_DIGEST = """
import asyncio
from tests.rollout_worker.test_registration import fingerprint, odd_rows
print(asyncio.run(fingerprint(odd_rows())).data)
"""


def odd_rows():
    return [row(value=value) for value in ODD]


def test_values_that_json_cannot_write_give_the_same_digest_in_every_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    (digest,) = digests
    assert digest.strip() not in ("", "None")


class Gone(list):
    def __getitem__(self, place):
        if place:
            raise SystemExit("the disk is gone")
        return super().__getitem__(place)


async def test_i9_rows_that_cannot_be_read_are_not_compared(caplog):
    with caplog.at_level(logging.WARNING):
        assert (await fingerprint(Gone(ROWS))).data is None
    assert "SystemExit(the disk is gone)" in caplog.text


async def test_the_task_files_text_is_named(tmp_path):
    file = tmp_path / "task.py"
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        digests.append((await fingerprint(run_config=config(WORKER, task={"path": f"{file}:task"}))).task)
    assert digests[0] == digests[2] != digests[1]
    assert (await fingerprint()).task is None, "there is no such file"


async def test_every_heartbeat_carries_the_fingerprint_and_the_first_comes_before_tickets():
    """The stand-in gives no tickets to a worker that it does not know."""
    queue = StandInQueue(tickets_for(3, 2))
    await roll(task(), fake(), queue=queue)
    assert len(queue.groups) == 3
    expected = await fingerprint([row()])
    assert {report.fingerprint.tokenizer for report in queue.reports} == {expected.tokenizer}
    assert [report.fingerprint.data for report in queue.reports] == [expected.data] * len(queue.reports)


async def test_a_worker_that_would_make_wrong_data_ends_with_the_queues_text():
    """As ConfigError, which is exit code 2."""
    queue = StandInQueue(tickets_for(1, 2))
    queue.refusal = QueueRefused(403, ErrorBody("fingerprint", "worker w0: the tokenizer differs: a, the run has b"))
    with pytest.raises(ConfigError, match="worker w0: the tokenizer differs: a, the run has b"):
        await roll(task(), fake(), queue=queue)
    assert queue.requests == []


DIFFERS = QueueRefused(409, ErrorBody("session_awaited", "worker w0 waits for the learner's session: a, not b"))


async def test_i9_a_worker_that_the_session_before_differs_from_waits_for_the_next(caplog):
    queue, asked = StandInQueue(tickets_for(1, 2)), 0
    queue.refusal = DIFFERS

    async def sleep(seconds):
        nonlocal asked
        await asyncio.sleep(0)
        asked += 1
        if asked == 3:
            queue.refusal = None

    with caplog.at_level(logging.WARNING, "slipstream.rollout_worker"):
        await roll(task(), fake(), queue=queue, sleep=sleep)
    assert len(queue.groups) == 1
    assert [record.message for record in caplog.records] == ["worker w0 waits for the learner's session: a, not b"]


async def test_i9_a_worker_does_not_wait_for_a_session_for_ever():
    queue = StandInQueue(tickets_for(1, 2))
    queue.refusal = DIFFERS

    async def sleep(seconds):
        await asyncio.sleep(0)

    with pytest.raises(ConfigError, match=r"a, not b \(no session began within vllm.start_timeout_s = 5 s\)"):
        await roll(task(), fake(), queue=queue, sleep=sleep, config=config(WORKER, vllm={"start_timeout_s": 5.0}))
    assert len(queue.reports) == 6
    assert queue.requests == []


async def test_a_worker_that_is_refused_later_ends_too(monkeypatch):
    """A new session of the learner may declare something else."""
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 0.01)
    queue = StandInQueue(tickets_for(1, 2), keep_open=True)
    original = queue.submit

    async def submit(group):
        queue.refusal = QueueRefused(403, ErrorBody("fingerprint", "rollout.temperature = 1.0, the run has 0.5"))
        return await original(group)

    queue.submit = submit
    with pytest.raises(ConfigError, match=r"rollout.temperature = 1.0"):
        await roll(task(), fake(), queue=queue)


@pytest.mark.parametrize("at", ["tickets", "submit"])
async def test_a_worker_that_the_queue_has_forgotten_registers_and_asks_again(at, monkeypatch):
    """As after a restart of the queue; no other heartbeat is due."""
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 1000.0)
    queue = StandInQueue(tickets_for(4, 2))
    original, first = getattr(queue, at), iter([True])

    async def forgetting(message):
        if next(first, False):
            queue.known = False
        return await original(message)

    setattr(queue, at, forgetting)
    run_config = config(WORKER, queue={"ticket_timeout_s": 3000.0})
    async with asyncio.timeout(30):
        run = await roll(task(), fake(), queue=queue, config=run_config)
    assert len(queue.groups) == 4
    assert len(queue.reports) == 2
    assert run.worker.counters.failures == {}


async def test_a_queue_that_keeps_forgetting_is_not_hammered():
    slept = []
    queue = StandInQueue()

    async def tickets(request):
        if len(slept) == 3:
            raise RunFinished("the run is finished")
        raise QueueRefused(409, ErrorBody("unregistered", "who are you?"))

    async def sleep(seconds):
        slept.append(seconds)

    queue.tickets = tickets
    await roll(task(), fake(), queue=queue, sleep=sleep)
    assert slept == [1.0, 1.0, 1.0]


async def test_warnings_are_logged_once_each(caplog, monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.ticket_loop._HEARTBEAT_S", 0.01)
    queue = StandInQueue(tickets_for(1, 2), keep_open=True)
    queue.warnings = ["the task file differs from that of worker-0"]
    with caplog.at_level(logging.WARNING, "slipstream.rollout_worker"):
        await roll(task(), fake(), queue=queue, stop_when=lambda worker: len(queue.reports) > 4)
    assert [record.message for record in caplog.records] == queue.warnings


@pytest.mark.parametrize("at", ["tickets", "submit"])
async def test_a_run_that_gave_up_ends_the_worker_with_the_text(at):
    queue = StandInQueue(tickets_for(1, 2), keep_open=True)
    gave_up = GaveUp("16 groups failed: reward accuracy: KeyError: 'answer'")
    if at == "tickets":
        queue.gave_up = gave_up
    else:
        queue.submit_error = gave_up
    with pytest.raises(GaveUp, match="16 groups failed: reward accuracy"):
        await roll(task(), fake(), queue=queue)


def test_a_report_with_a_fingerprint_is_small():
    report = codec.encode_json(asyncio.run(fingerprint()))
    assert len(report) < 1000, json.loads(report)
