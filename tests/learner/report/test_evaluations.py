"""The learner asks for evaluations, and what came of them reaches every view, whoever was restarted meanwhile."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from slipstream.learner.evaluator import Evaluator, open_eval_journal
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.report import summary
from slipstream.learner.report.journal import Journal
from slipstream.learner.report.progress import TerminalProgress, line
from slipstream.learner.report.records import EARLIER, EvaluationRecord, StepRecord, beside
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import ErrorBody
from slipstream.protocol.status import Evaluation, EvaluationRequest, describe_evaluation
from tests.kit import LEARNER, config
from tests.kit.learner import FakeQueue, endless, status
from tests.learner.report.test_summary import step_record
from tests.learner.test_loop import config_for, lines, train


class Queue(FakeQueue):
    """A queue whose evaluations end when they have been looked at `looks` times."""

    def __init__(self, *arguments: Any, looks: int = 1) -> None:
        super().__init__(*arguments)
        self.looks = looks
        self.asked: list[EvaluationRequest] = []
        self.all: dict[int, Evaluation] = {}
        self.seen: dict[int, int] = {}

    async def evaluate(self, request: EvaluationRequest) -> list[Evaluation]:
        self.asked.append(request)
        self.log.append(("evaluate", request.step))
        self.all.setdefault(request.step, Evaluation(request.step, request.version, request.group_size, rows=4))
        return list(self.all.values())

    async def evaluations(self, wait_s: float = 0.0) -> list[Evaluation]:
        for step, found in self.all.items():
            self.seen[step] = self.seen.get(step, 0) + 1
            if self.seen[step] >= self.looks and found.ended is None:
                self.all[step] = done(step)
                self.log.append(f"ended {step}")
        return list(self.all.values())


def done(step: int, **changes: Any) -> Evaluation:
    plain = Evaluation(
        step,
        step,
        1,
        rows=4,
        done=4,
        ended="complete",
        seconds=2.0,
        rollouts=4,
        reward=step / 10,
        reward_std=0.1,
        rewards={"right": step / 10},
        mean_length=9.0,
        clipped=0.0,
        versions=(step, step + 1),
    )
    return msgspec.structs.replace(plain, **changes)


def evaluating(model_path: Path, tmp_path: Path, **settings: Any) -> RunConfig:
    plain = config_for(model_path, tmp_path, steps=settings.pop("steps", 4))
    return RunConfig.model_validate({**plain.model_dump(), "eval": {"every": 2, **settings}})


def evaluated(tmp_path: Path) -> list[dict[str, Any]]:
    return lines(tmp_path / "test" / "evaluations.jsonl")


def test_each_that_is_due_is_asked_for_once_and_the_last_sees_the_last_weights(
    model_path: Path, tmp_path: Path
) -> None:
    queue = Queue(endless())
    settings = {"at_start": True, "rows": 3, "group_size": 2, "temperature": 0.5, "timeout_s": 60.0}
    train(evaluating(model_path, tmp_path, **settings), queue)
    assert [(request.step, request.version) for request in queue.asked] == [(0, 0), (2, 2), (4, 4)]
    asked = queue.asked[0]
    assert (asked.rows, asked.group_size, asked.temperature, asked.timeout_s) == (3, 2, 0.5, 60.0)
    last = queue.log.index(("evaluate", 4))
    assert ("publish", 4) in queue.log[:last]
    assert queue.log[last - 1] == "proven", "the last weights are on the servers"
    assert queue.log.index("finished") > last


def test_the_first_step_waits_for_the_evaluation_of_the_model_as_it_is(model_path: Path, tmp_path: Path) -> None:
    queue = Queue(endless(), looks=5)
    train(evaluating(model_path, tmp_path, at_start=True), queue)
    order = [event for event in queue.log if event in ("ended 0", ("publish", 1), ("evaluate", 2), "ended 2")]
    assert order == ["ended 0", ("publish", 1), ("evaluate", 2), "ended 2"]


def test_what_came_of_them_reaches_every_file(model_path: Path, tmp_path: Path) -> None:
    train(evaluating(model_path, tmp_path, at_start=True), Queue(endless()))
    found = evaluated(tmp_path)
    assert [(row["step"], row["reward"], row["versions"]) for row in found] == [
        (0, 0.0, [0, 1]),
        (2, 0.2, [2, 3]),
        (4, 0.4, [4, 5]),
    ]
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [row.get("eval/step") for row in metrics] == [0, None, 2, 4], "the last one came after the last line"
    assert (metrics[3]["eval/reward"], metrics[3]["step"], metrics[3]["eval/rewards/right/mean"]) == (0.4, 4, 0.4)
    assert not any(EARLIER in row for row in metrics)
    written = msgspec.json.decode((tmp_path / "test" / "summary.json").read_bytes())
    figures = {name: written[name] for name in written if name.startswith("eval")}
    assert figures == {"evaluations": 3, "eval_reward_first": 0.0, "eval_reward_last": 0.4, "eval_reward_best": 0.4}


@pytest.mark.parametrize("looks", [3, 8])
def test_of_several_that_end_by_one_line_none_is_lost(model_path: Path, tmp_path: Path, looks: int) -> None:
    """Whether they end while the run continues or after its last step."""
    train(evaluating(model_path, tmp_path, at_start=True), Queue(endless(), looks=looks))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    steps = [[each["eval/step"] for each in [*row.get(EARLIER, []), row] if "eval/step" in each] for row in metrics]
    assert [step for row in steps for step in row] == [0, 2, 4]
    assert metrics[3]["eval/step"] == 4, "the newest stands under its names"
    assert len(steps[3]) > 1, "the case is here"
    (first, *_) = metrics[3][EARLIER]
    assert first["eval/reward"] == first["eval/rewards/right/mean"] == first["eval/step"] / 10


def test_a_line_with_several_evaluations_has_the_newest_under_their_names() -> None:
    zero, two = {"eval/step": 0, "eval/reward": 0.0, "eval/best@4": 0.5}, {"eval/step": 2, "eval/reward": 0.25}
    line = beside({"step": 3, "reward": 0.5}, [two, zero])
    assert line == {"step": 3, "reward": 0.5, **two, EARLIER: [zero]}
    four = {"eval/step": 4}
    assert beside(line, [four]) == {"step": 3, "reward": 0.5, **four, EARLIER: [zero, two]}
    assert beside(line, []) == line
    assert beside({"step": 3}, []) == {"step": 3}


def test_a_run_without_evaluations_asks_for_none_and_has_no_file_of_them(model_path: Path, tmp_path: Path) -> None:
    queue = Queue(endless())
    train(config_for(model_path, tmp_path), queue)
    assert queue.asked == []
    assert not (tmp_path / "test" / "evaluations.jsonl").exists()


def test_the_learner_goes_on_while_one_is_open_and_waits_for_it_at_the_end(model_path: Path, tmp_path: Path) -> None:
    queue = Queue(endless(), looks=6)
    train(evaluating(model_path, tmp_path, steps=4), queue)
    acks = [entry for entry in queue.log if entry[0] == "ack"]
    assert len(acks) == 4
    assert [row["step"] for row in evaluated(tmp_path)] == [2, 4]


def test_a_resumed_learner_repeats_none_and_takes_in_what_ended_meanwhile(model_path: Path, tmp_path: Path) -> None:
    """It dies at version 3, after the checkpoint of step 2; the evaluation of step 0 is in its file, that of step 2
    ends while it is away."""
    from slipstream.protocol.client import Unreachable

    run_config = evaluating(model_path, tmp_path, at_start=True)
    run_config = run_config.model_copy(
        update={"learner": run_config.learner.model_copy(update={"prefetch_steps": 0, "checkpoint_every": 2})}
    )
    queue = Queue(endless(), looks=2)
    supply = queue.supply

    def dies(n: int, version: int) -> Any:
        if version == 3:
            raise Unreachable("gone")
        return supply(n, version)

    queue.supply = dies
    with pytest.raises(Unreachable):
        train(run_config, queue)
    assert [row["step"] for row in evaluated(tmp_path)] == [0]
    queue.supply, queue.asked = supply, []
    queue.all[2] = done(2, reward=0.75)
    train(run_config, queue, resume=True)
    assert [row["step"] for row in evaluated(tmp_path)] == [0, 2, 4]
    assert [row["reward"] for row in evaluated(tmp_path)] == [0.0, 0.75, 0.4]
    assert 0 not in [request.step for request in queue.asked], "what its file has is not asked for"


def test_what_belongs_to_steps_that_are_made_again_is_forgotten(tmp_path: Path) -> None:
    run_config = config(LEARNER, run={"dir": str(tmp_path), "name": "test"}, eval={"every": 2})
    journal = open_eval_journal(run_config, 0)
    assert journal is not None
    for step in (2, 6, 4):
        journal.append(EvaluationRecord(step, done(step)))
    again = open_eval_journal(run_config, 4)
    assert again is not None
    assert [record.step for record in again.records] == [2, 4]
    assert again.records[0].evaluation == done(2)


class Refusing(FakeQueue):
    async def evaluate(self, request: EvaluationRequest) -> list[Evaluation]:
        raise QueueRefused(409, ErrorBody("evaluations_open", "16 evaluations are open; raise eval.every"))


class NeverEnding(FakeQueue):
    async def evaluations(self, wait_s: float = 0.0) -> list[Evaluation]:
        return [Evaluation(2, 2, 1)]


def evaluator(
    queue: FakeQueue, client: BlockingQueueClient, tmp_path: Path, clock: Any
) -> tuple[Evaluator, io.StringIO]:
    shown = io.StringIO()
    run_config = config(LEARNER, run={"dir": str(tmp_path), "name": "test"}, eval={"every": 2, "timeout_s": 100.0})
    progress = TerminalProgress(10, console=Console(file=shown, width=200), log=False)
    return Evaluator(run_config, client, 1, open_eval_journal(run_config, 0), progress, clock), shown


def test_one_that_the_queue_has_no_room_for_is_told_and_holds_nothing_up(tmp_path: Path) -> None:
    with BlockingQueueClient(cast(QueueClient, queue := Refusing())) as client:
        asks, shown = evaluator(queue, client, tmp_path, lambda: 0.0)
        asks.ask_if_due(2, 2)
        asks.wait()
    assert "! there is no evaluation of step 2: 16 evaluations are open; raise eval.every" in shown.getvalue()


def test_the_wait_at_the_end_is_bounded(tmp_path: Path) -> None:
    ticks = iter(range(0, 10_000, 40))
    with BlockingQueueClient(cast(QueueClient, queue := NeverEnding())) as client:
        asks, shown = evaluator(queue, client, tmp_path, lambda: float(next(ticks)))
        asks.begin()
        asks.wait()
    assert "the evaluation of step 2 did not end in time; the run ends without it" in shown.getvalue()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "evaluation of step 5: reward 0.500 (4 rows, 9 tokens, versions 5 to 6, 2.0 s)"),
        (
            {"group_size": 4, "best": 0.75, "clipped": 0.5, "versions": (5, 5)},
            "evaluation of step 5: reward 0.500 (4 rows x 4, best@4 0.750, 9 tokens, 50% cut off, version 5, 2.0 s)",
        ),
        (
            {"done": 3, "failed": 1, "failures": {"failed:row": 1}},
            "evaluation of step 5: reward 0.500 (3 of 4 rows, 9 tokens, versions 5 to 6, 2.0 s); failed: row 1",
        ),
        (
            {"rows": None, "done": 0, "reward": None, "ended": "deadline", "waits_for": None, "versions": None},
            "evaluation of step 5: it ended (deadline) before any row was handed out",
        ),
    ],
)
def test_an_evaluation_in_one_line(changes: dict[str, Any], text: str) -> None:
    assert describe_evaluation(done(5, **changes)) == text


def test_the_live_line_names_the_newest() -> None:
    assert "| eval 0.500 at step 5 |" in line(step_record(7), 10, 3.0, evaluation=done(5))
    assert "eval" not in line(step_record(7), 10, 3.0, evaluation=done(5, reward=None))


def test_the_picture_has_the_evaluations_beside_the_curve(tmp_path: Path) -> None:
    steps, rewards = [1, 2, 3], [0.1, 0.2, 0.3]
    summary.draw_rewards(tmp_path / "without.png", steps, rewards)
    summary.draw_rewards(tmp_path / "with.png", steps, rewards, [(0, 0.1), (2, 0.4)])
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def records(*steps: int) -> Sequence[EvaluationRecord]:
    return [EvaluationRecord(step, done(step)) for step in steps]


def test_the_summary_takes_them_by_step() -> None:
    result = summary.summarise([], [], status(), records(5, 0, 2))
    assert (result.evaluations, result.eval_reward_first, result.eval_reward_last) == (3, 0.0, 0.5)


def test_figures_that_came_too_late_stand_in_the_newest_line_of_this_session_or_one_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, StepRecord, 0)
    journal.amend(lambda line: {"eval/reward": 1.0})
    assert path.read_bytes() == b""
    for step in (1, 2):
        journal.append(step_record(step))
    Journal(path, StepRecord, 2).amend(lambda line: {**line, "eval/reward": 0.5})
    first, second = lines(path)
    assert ("eval/reward" in first, second["eval/reward"], second["wild"], second["step"]) == (False, 0.5, None, 2)
    assert [record.step for record in Journal(path, StepRecord, 2).records] == [1, 2]
