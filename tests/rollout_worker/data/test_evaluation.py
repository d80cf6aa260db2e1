"""A worker with tickets of an evaluation: its own rows, any group size, its own temperature, the training's tools and
rewards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Ticket, WorkerReport
from slipstream.rollout_worker.data.dataset import check_evaluation, count_eval_rows, find_evaluation_warnings
from slipstream.rollout_worker.fingerprint import fingerprint_of
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.fake_vllm import Fault
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, accuracy, fake, multiply, roll, row, task

EVALS = [row(10 + number, 3, number=number) for number in range(4)]
ON = {"eval": {"every": 5}}


def eval_tickets(*rows: int, group_size: int = 1, temperature: float | None = None) -> list[Ticket]:
    return [
        Ticket(f"e0.{index}.0", index, group_size, 0, 7, 60.0, kind="eval", temperature=temperature) for index in rows
    ]


def texts(queue: StandInQueue) -> list[str]:
    return [TOKENIZER.decode(group.rollouts[0].segments[0].token_ids) for group in queue.groups]


@pytest.mark.parametrize("group_size", [1, 2, 11])
async def test_rows_of_the_eval_dataset_in_its_order_and_groups_of_any_size(group_size: int) -> None:
    """11 is above worker.episodes."""
    queue = StandInQueue(eval_tickets(0, 1, 2, 3, group_size=group_size))
    run_config = config(WORKER, worker={"episodes": 4}, **ON)
    run = await roll(task(dataset=[row(90, 90)], eval_dataset=EVALS), fake(), config=run_config, queue=queue)
    assert queue.failures == {}
    by_index = {group.index: group for group in queue.groups}
    for index, group in sorted(by_index.items()):
        assert len(group.rollouts) == group_size
        text = TOKENIZER.decode(group.rollouts[0].segments[0].token_ids)
        assert f"Multiply {10 + index} by 3." in text
        assert [rollout.reward for rollout in group.rollouts] == [1.0] * group_size
        assert (group.epoch, group.ticket_id) == (0, f"e0.{index}.0")
    assert sorted(by_index) == [0, 1, 2, 3]
    assert run.worker.capacity.free == run.worker.capacity.total, "every permit is back"
    assert run.worker.capacity.open == 0


@pytest.mark.parametrize(("asked", "sent"), [(0.0, 0.0), (0.3, 0.3), (None, 1.0)])
async def test_the_tickets_temperature_holds_for_every_turn(asked: float | None, sent: float) -> None:
    server, queue = fake(), StandInQueue(eval_tickets(0, temperature=asked))
    await roll(task(eval_dataset=EVALS), server, queue=queue)
    assert [request["sampling_params"]["temperature"] for request in server.requests] == [sent, sent]
    assert queue.groups[0].rollouts[0].turns == 2


async def test_training_beside_it_keeps_its_own_rows_and_temperature() -> None:
    server = fake()
    queue = StandInQueue([*eval_tickets(0, temperature=0.0), *tickets_for(1, version=7)])
    await roll(task(dataset=[row(90, 90)], eval_dataset=EVALS), server, queue=queue)
    by_kind = {group.ticket_id: group for group in queue.groups}
    assert "Multiply 90 by 90." in TOKENIZER.decode(by_kind["t0"].rollouts[0].segments[0].token_ids)
    assert {request["sampling_params"]["temperature"] for request in server.requests} == {0.0, 1.0}


async def test_its_episodes_are_in_none_of_the_trainings_counts() -> None:
    def of_one(evaluations: int) -> WorkerReport:
        counters = runs[evaluations].worker.report()
        return msgspec.structs.replace(counters, elapsed_s=0.0, cpu_s=0.0, waited_s=0.0, full_s=0.0, eval_episodes=0)

    runs = {}
    for evaluations in (0, 4):
        queue = StandInQueue([*eval_tickets(*range(evaluations), group_size=3), *tickets_for(2, version=7)])
        runs[evaluations] = await roll(task(eval_dataset=EVALS), fake(), queue=queue)
        assert queue.failures == {}
    assert [run.worker.counters.eval_episodes for run in runs.values()] == [0, 12]
    alone, beside = of_one(0), of_one(4)
    assert alone == beside
    assert (alone.episodes_done, alone.tool_calls, alone.episodes_failed) == (4, 4, 0)
    assert alone.tokens_sampled > 0


async def test_one_episode_that_is_left_of_a_group_is_enough() -> None:
    def silent_on_the_first(completions: list[Any], **columns: Any) -> list[float | None]:
        return [None, *[0.5] * (len(completions) - 1)]

    queue = StandInQueue(eval_tickets(0, group_size=2))
    await roll(task(eval_dataset=EVALS, rewards=[silent_on_the_first]), fake(), queue=queue)
    assert [len(group.rollouts) for group in queue.groups] == [1]


async def test_rows_that_cannot_be_used_fail_and_hold_nothing_up() -> None:
    broken = [{"prompt": [{"role": "user", "content": "x " * 5000}], "answer": 0}, {"prompt": None, "answer": 0}]
    queue = StandInQueue([*eval_tickets(*range(12)), *tickets_for(1, version=7)])
    run = await roll(task(eval_dataset=[row(), *broken * 6]), fake(), queue=queue)
    reasons = {ticket: failure.reason for ticket, failure in queue.failures.items()}
    assert reasons == {f"e0.{i}.0": "prompt" if i % 2 else "row" for i in range(1, 12)}
    assert not any(failure.retryable for failure in queue.failures.values())
    assert "of the eval_dataset" in queue.failures["e0.2.0"].detail
    assert {group.ticket_id for group in queue.groups} == {"e0.0.0", "t0"}
    assert run.worker._failed_in_a_row == 0, "the training would be paced by it"


async def test_a_server_that_fails_fails_the_row_and_it_may_be_tried_again() -> None:
    run_config = config(WORKER, worker={"request_attempts": 1})
    queue = StandInQueue(eval_tickets(0))
    await roll(task(eval_dataset=EVALS), fake(faults=[Fault("status", status=500)]), config=run_config, queue=queue)
    assert [(failure.reason, failure.retryable) for failure in queue.failures.values()] == [("server", True)]


# The data set.


def test_the_eval_dataset_takes_every_form_of_a_data_set(tmp_path: Any) -> None:
    import json

    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in EVALS))
    for source in (EVALS, str(file), lambda: EVALS, lambda: iter(EVALS)):
        rows = task(eval_dataset=source).eval_rows
        assert [rows.row_for(index, 0, False).columns["number"] for index in range(4)] == [0, 1, 2, 3]


def test_it_is_read_where_it_is_asked_for_and_not_before(tmp_path: Any) -> None:
    made = task(eval_dataset=str(tmp_path / "none.jsonl"))
    assert made.rows.size == 1
    with pytest.raises(ConfigError, match=r"Task\(eval_dataset='.*none.jsonl'\): there is no such file"):
        _ = made.eval_rows


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"Task\(eval_dataset=\.\.\.\) is empty"),
        ({"a": EVALS}, r"Task\(eval_dataset=\.\.\.\) is a dict with 'a'; give one of these"),
        ([{"question": 1}], r"Task\(eval_dataset=\.\.\.\): the first row has no 'prompt' column"),
        (iter(EVALS), r"Task\(eval_dataset=\.\.\.\) is a list_iterator"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], "answer"),
    ],
)
def test_a_data_set_that_cannot_be_evaluated_on_says_why(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(eval_dataset=source)


def test_the_training_data_set_itself_is_no_eval_dataset() -> None:
    made = Task(dataset="org/data", rewards=[accuracy], tools=[multiply], eval_dataset="org/data")
    with pytest.raises(
        ConfigError, match=r"eval_dataset='org/data'.* is the training data set itself.*eval_dataset_split"
    ):
        _ = made.eval_rows


def test_a_split_of_no_eval_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval_dataset_split='test'\) without an eval_dataset: give it too"):
        Task(dataset=EVALS, rewards=[accuracy], tools=[multiply], eval_dataset_split="test")


@pytest.mark.parametrize(
    ("sections", "given", "told"),
    [
        ({"eval": {"every": 5}}, None, r"eval.every = 5, and the task .* has no rows to evaluate on: give Task\(eval_"),
        ({"eval": {"at_end": True}}, None, r"eval.at_end = true"),
    ],
)
def test_evaluations_without_rows_are_refused(sections: Any, given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_evaluation(config(WORKER, **sections), given)


def test_an_eval_dataset_that_is_never_read_is_a_warning() -> None:
    (finding,) = find_evaluation_warnings(config(WORKER), EVALS)
    assert finding.text == (
        "Task(eval_dataset=...): never read, since eval.every, eval.at_start and eval.at_end are off"
    )
    (finding,) = find_evaluation_warnings(config(WORKER, eval={"at_end": False, "rows": 32}), None)
    assert finding.text.startswith("eval.rows: never read, since")
    assert find_evaluation_warnings(config(WORKER, **ON), EVALS) == []
    late = config(WORKER, eval={"every": 50}, learner={"steps": 20})
    (finding,) = find_evaluation_warnings(late, EVALS)
    assert "eval.every = 50 is beyond the last step, learner.steps = 20" in finding.text
    assert find_evaluation_warnings(config(WORKER), None) == []


def test_how_many_rows_there_are() -> None:
    assert count_eval_rows(task(eval_dataset=EVALS).eval_rows, "all") == 4
    assert count_eval_rows(task(eval_dataset=EVALS).eval_rows, 2) == 4
    stream = task(eval_dataset=lambda: iter(EVALS))
    with pytest.raises(ConfigError, match=r"eval.rows = all, and Task\(eval_dataset=...\) is an iterable"):
        count_eval_rows(stream.eval_rows, "all")
    assert count_eval_rows(stream.eval_rows, 3) == 3
    assert count_eval_rows(task(eval_dataset=lambda: iter(EVALS)).eval_rows, 99) == 4


async def test_the_fingerprint_knows_the_rows_where_evaluations_are_on() -> None:
    async def of(run_config: RunConfig, **changes: Any) -> Any:
        async with UserCode() as code:
            return await fingerprint_of(run_config, task(**changes), TOKENIZER, code)

    on = config(WORKER, **ON)
    one, other = await of(on, eval_dataset=EVALS), await of(on, eval_dataset=EVALS[::-1])
    assert (one.eval_rows, one.eval_data == other.eval_data) == (4, False)
    off = await of(config(WORKER), eval_dataset="none.jsonl")
    assert (off.eval_rows, off.eval_data) == (None, None)
    assert (one.rollout["eval.rows"], off.rollout["eval.rows"]) == ("all", "none")


def answers(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    return [0.0] * len(completions)


async def agent(endpoint: Any, answer: int) -> float:
    return 0.0


class Room:
    def reset(self, **columns: Any) -> None: ...
    def get_reward(self) -> float:
        return 0.0


MESSAGES = [{"role": "user", "content": "Go."}]


@pytest.mark.parametrize(
    ("given", "row", "told"),
    [
        (
            {"rewards": [answers]},
            {},
            "answers takes 'answer', which is not a column of the eval_dataset; the columns are",
        ),
        ({"agent": agent}, {}, "agent takes 'answer', which is not a column of the eval_dataset"),
        (
            {"rewards": [answers], "tools": [multiply]},
            {"prompt": "Go.", "answer": 1},
            "the prompts are text, and tools",
        ),
        (
            {"environment": {"a": Room}},
            {"environment": "b"},
            "the first row cannot be played: its column 'environment'",
        ),
    ],
)
def test_what_the_task_does_not_find_in_the_eval_dataset_is_said_of_it(
    given: dict[str, Any], row: dict[str, Any], told: str
) -> None:
    trained = [{"prompt": MESSAGES, "answer": 1, "environment": "a"}]
    with pytest.raises(ConfigError) as refused:
        Task(dataset=trained, eval_dataset=[{"prompt": MESSAGES, **row}], **given)
    assert str(refused.value).startswith(f"Task(eval_dataset=...): {told}")
