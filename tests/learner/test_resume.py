"""A learner and a real queue: what a resume gives back, what a poisoned batch costs, and what a record replays."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from rich.console import Console

from slipstream.learner import loop
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.replay import Outcome, Request, digest, made_with, replay
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.run import build_trainer
from slipstream.learner.start import starting_point
from slipstream.learner.training.base import DivergedError, StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol import reasons, trained_record
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Group, Ticket
from slipstream.rollout_queue.store import open_for_reading
from slipstream.rollout_queue.store.base import LedgerRow
from slipstream.weight_sync.publisher import Publisher
from tests.kit import LEARNER, config
from tests.kit.live_queue import LivePublisher, LiveQueue, live_queue, of_row

Weights = dict[str, torch.Tensor]


def settings(
    model_path: Path, tmp_path: Path, name: str = "test", queue: dict[str, Any] | None = None, **learner: Any
) -> RunConfig:
    """K is far above any age here, and the clip so wide that every step has a gradient."""
    wide = {"clip_low": 0.99, "clip_high": 100.0, "delta": "none"}
    plain = {"steps": 6, "learning_rate": 1e-2, "checkpoint_every": 3, "warmup_steps": 4, **wide}
    return config(
        LEARNER,
        model={"path": str(model_path)},
        run={"dir": str(tmp_path), "name": name},
        queue={"max_staleness": 50, **(queue or {})},
        learner={**plain, **learner},
    )


class Killed(BaseException):
    """The learner is gone."""


def train(
    config: RunConfig, queue: LiveQueue, resume: bool = False, killed_in: int | None = None
) -> tuple[Weights, TerminalProgress]:
    """The weights after the last step. `killed_in`: the step in which the learner dies, before it changes a weight."""
    publisher = LivePublisher(queue)
    checkpoint = starting_point(config, resume)
    trainer = build_trainer(config, checkpoint)
    if killed_in is not None:
        left = [killed_in - (checkpoint.info.step if checkpoint else 0)]

        def die(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                raise Killed

        trainer.optimiser.optimizer.register_step_pre_hook(die)
    progress = TerminalProgress(config.learner.steps, console=Console(file=io.StringIO(), width=400))
    with BlockingQueueClient(QueueClient(queue.url)) as client, Stop(20.0) as stop:
        loop.train(config, trainer, client, cast(Publisher, publisher), progress, stop, checkpoint, resume)
    return publisher.weights, progress


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def told(progress: TerminalProgress) -> str:
    file = progress.console.file
    assert isinstance(file, io.StringIO)
    return " ".join(file.getvalue().split())


def ledger_of(config: RunConfig) -> list[LedgerRow]:
    return open_for_reading(config).read_ledger()


def rows_of_steps(config: RunConfig) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in ledger_of(config):
        if row.trained:
            found.setdefault(row.step or 0, []).append(row.index)
    return {step: sorted(rows) for step, rows in sorted(found.items())}


def check_i1(config: RunConfig) -> None:
    rows = ledger_of(config)
    trained = [row.index for row in rows if row.trained]
    assert len(trained) == len(set(trained)), "a row was trained twice"
    assert Counter(row.state for row in rows).keys() <= {"trained", "dropped", "reissued"}
    assert all(row.reason for row in rows if row.state == "dropped")


def test_with_nothing_over_age_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    model_path: Path, tmp_path: Path
) -> None:
    """It dies twice: with a checkpoint behind it, in the step after it, and later."""
    whole, broken = settings(model_path, tmp_path, "whole"), settings(model_path, tmp_path, "broken")
    with live_queue(whole) as queue:
        expected, _ = train(whole, queue)
    with live_queue(broken) as queue:
        for step in (2, 6):
            with pytest.raises(Killed):
                train(broken, queue, resume=step > 2, killed_in=step)
        found, _ = train(broken, queue, resume=True)
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
    ours, theirs = lines(broken.run_dir / "metrics.jsonl"), lines(whole.run_dir / "metrics.jsonl")
    assert [(line["loss"], line["grad_norm"]) for line in ours] == [
        (line["loss"], line["grad_norm"]) for line in theirs
    ]
    assert [line["version"] for line in ours] == [3, 4, 5, 9, 10, 11], "versions never go back"
    assert rows_of_steps(broken) == rows_of_steps(whole) == {n: [2 * n - 2, 2 * n - 1] for n in range(1, 7)}
    check_i1(broken)


def test_i1_where_groups_are_over_age_a_resume_trains_the_same_rows_each_once(model_path: Path, tmp_path: Path) -> None:
    """With K = 1, what was trained two steps ago is too old to come back: its rows are issued again."""
    queue_settings = {"max_staleness": 1}
    here = settings(model_path, tmp_path, queue=queue_settings, checkpoint_every=4, prefetch_steps=0)
    with live_queue(here) as queue:
        with pytest.raises(Killed):
            train(here, queue, killed_in=4)
        train(here, queue, resume=True)
    trained = sorted(row for of in rows_of_steps(here).values() for row in of)
    assert trained[:6] == list(range(6)), "of the steps that were lost"
    too_old = {row.index for row in ledger_of(here) if row.reason == reasons.OVERAGE}
    assert set(range(trained[-1])) == {*trained[:-1], *too_old}
    assert any(row.state == "reissued" and row.reason == reasons.ROLLED_BACK for row in ledger_of(here))
    assert max(line["staleness_max"] for line in lines(here.run_dir / "metrics.jsonl")) <= 1
    check_i1(here)


def poisoned(
    trainer_step: Callable[..., StepMetrics], fails: Callable[[int], BaseException | None]
) -> Callable[..., StepMetrics]:
    """A trainer's step that fails at the attempts for which `fails` gives an error."""
    count = 0

    def step(self: PolicyTrainer, rows: list[PackedRow], *rest: Any) -> StepMetrics:
        nonlocal count
        count += 1
        if (error := fails(count)) is not None:
            for row in rows:  # gradients of a backward that came before the end
                self.policy(row).logprobs.sum().backward()
            raise error
        return trainer_step(self, rows, *rest)

    return step


# Its gradient is beyond what float32 holds the norm of, with advantages that no deviation divides.
POISON: dict[str, Any] = {"advantage": "dr_grpo"}


def bad_row(ticket: Ticket, bad: set[int]) -> Group:
    group = of_row(ticket)
    if ticket.index in bad:
        for rollout in group.rollouts:
            rollout.reward *= 9e29
    return group


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_i1_i4_a_poisoned_batch_is_left_out_and_the_run_goes_on_as_if_it_had_never_been(
    model_path: Path, tmp_path: Path, prefetch: int
) -> None:
    """Rows 4 and 5 fill the third batch. The step, the schedule and the version go to the batch after it."""
    here = settings(model_path, tmp_path, "bad", prefetch_steps=prefetch, **POISON)
    with live_queue(here, lambda ticket: bad_row(ticket, {4})) as queue:
        weights, progress = train(here, queue)
        status = queue.call(lambda client: client.status())
    assert status.drops[reasons.STEP_NOT_FINITE] == 2
    assert any(notice.kind == "batch" and "groups 4.0, 5.0" in notice.text for notice in status.notices)
    metrics = lines(here.run_dir / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in metrics] == [(n, n) for n in range(1, 7)]
    assert [line["groups_dropped"] for line in metrics] == [{}, {}, {reasons.STEP_NOT_FINITE: 2}, {}, {}, {}]
    for line in metrics:
        lost = sum(line["tokens_masked"].values()) + sum(line["tokens_dropped"].values())
        assert line["tokens_sampled"] == line["tokens_trained"] + lost
    assert metrics[2]["rollouts"] == 8
    (left_out,) = lines(here.run_dir / "left_out.jsonl")
    assert (left_out["step"], left_out["version"], left_out["groups"]) == (3, 2, ["4.0", "5.0"])
    assert "step 3: a batch is left out (step_not_finite), 1 in a row" in told(progress)
    assert rows_of_steps(here) == {1: [0, 1], 2: [2, 3], 3: [6, 7], 4: [8, 9], 5: [10, 11], 6: [12, 13]}
    check_i1(here)

    def without(ticket: Ticket) -> Group:
        row = ticket.index if ticket.index < 4 else ticket.index + 2
        group = of_row(msgspec.structs.replace(ticket, index=row))
        group.index = ticket.index
        return group

    clean = settings(model_path, tmp_path, "clean", **POISON)
    with live_queue(clean, without) as queue:
        expected, _ = train(clean, queue)
    for name, weight in expected.items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_is_left_out_starves_no_step_however_few_groups_may_be_outstanding(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """With one step of depth, what is leased for the next step is all that admission allows."""
    queue_settings = {"max_staleness": staleness, "depth": 1.0}
    here = settings(model_path, tmp_path, queue=queue_settings, prefetch_steps=2, stall_timeout_s=4000.0)
    error = DivergedError("the loss is nan")
    monkeypatch.setattr(
        PolicyTrainer, "step", poisoned(PolicyTrainer.step, lambda attempt: error if attempt in (2, 3, 6) else None)
    )
    with live_queue(here) as queue:
        train(here, queue)
    metrics = lines(here.run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness_max"] for line in metrics) <= staleness
    check_i1(here)


def test_a_step_that_the_memory_does_not_hold_is_left_out(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings(model_path, tmp_path, steps=3)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    monkeypatch.setattr(
        PolicyTrainer, "step", poisoned(PolicyTrainer.step, lambda attempt: error if attempt == 2 else None)
    )
    with live_queue(here) as queue:
        _, progress = train(here, queue)
        drops = queue.call(lambda client: client.status()).drops
    assert drops[reasons.OUT_OF_MEMORY] == 2
    assert "CUDA out of memory" in told(progress)
    assert "lower learner.token_budget" in told(progress)
    assert rows_of_steps(here) == {1: [0, 1], 2: [4, 5], 3: [6, 7]}


@pytest.mark.parametrize("most", [0, 2])
def test_too_many_batches_in_a_row_end_the_run_with_the_weights_as_they_were(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    here = settings(model_path, tmp_path, skip_bad_batches=most, checkpoint_every=1)
    error = DivergedError("the loss is nan")
    step = poisoned(PolicyTrainer.step, lambda attempt: error if attempt > 2 else None)
    monkeypatch.setattr(PolicyTrainer, "step", step)
    many = rf"3 batches in a row cannot be trained, and learner.skip_bad_batches = {most}; " if most else ""
    with (
        live_queue(here) as queue,
        pytest.raises(
            DivergedError, match=rf"step 3: {many}the loss is nan. Continue from the last checkpoint.*--resume"
        ),
    ):
        train(here, queue)
    assert list(places.complete(here.run_dir)) == [1, 2]
    dropped = [row for row in ledger_of(here) if row.reason == reasons.STEP_NOT_FINITE]
    assert len(dropped) == 2 * most


def test_batches_that_fail_now_and_then_end_no_run(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each good step forgives those before it."""
    here = settings(model_path, tmp_path, skip_bad_batches=1, prefetch_steps=2)
    error = DivergedError("the loss is nan")
    monkeypatch.setattr(
        PolicyTrainer, "step", poisoned(PolicyTrainer.step, lambda attempt: error if attempt % 2 else None)
    )
    with live_queue(here) as queue:
        train(here, queue)
    metrics = lines(here.run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert len(lines(here.run_dir / "left_out.jsonl")) == 6
    check_i1(here)


def replayed(config: RunConfig, out: Path, **request: Any) -> tuple[Outcome, str]:
    progress = TerminalProgress(config.learner.steps, console=Console(file=io.StringIO(), width=400))
    return replay(config, Request(config.run_dir / trained_record.RECORD_FOLDER, out, **request), progress), told(
        progress
    )


def test_a_replay_gives_the_run_s_own_figures_and_weights_to_the_bit_each_time(
    model_path: Path, tmp_path: Path
) -> None:
    """From the initial model and from a checkpoint, over a resume and a batch that was left out."""
    here = settings(model_path, tmp_path, queue={"record": True}, **POISON)
    with live_queue(here, lambda ticket: bad_row(ticket, {4})) as queue:
        with pytest.raises(Killed):
            train(here, queue, killed_in=6)
        train(here, queue, resume=True)
    last = build_trainer(here, starting_point(here, resume=True))
    first, said = replayed(here, tmp_path / "one")
    assert (first.from_step, first.steps, first.compared, first.first_difference) == (0, 6, 6, None)
    assert first.weights_sha256 == digest(last)
    assert "every metric of 6 steps is the run's own, to the bit" in said
    (fate,) = first.left_out.values()
    assert fate.startswith("left out here as in the run (step_not_finite): the step's loss is")

    second, _ = replayed(here, tmp_path / "two")
    assert second.weights_sha256 == first.weights_sha256
    for one, two in zip(
        lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "two" / "metrics.jsonl"), strict=True
    ):
        timed = {"train_s", "step_time", "cpu_s", "train_tokens_per_s"}
        assert {name: one[name] for name in one if name not in timed} == {
            name: two[name] for name in two if name not in timed
        }

    later, _ = replayed(here, tmp_path / "later", from_step=3, steps=2)
    assert (later.from_step, later.steps, later.compared, later.first_difference) == (3, 2, 2, None)


def test_a_replay_says_where_it_leaves_the_run(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, queue={"record": True}, steps=3)
    with live_queue(here) as queue:
        train(here, queue)
    other = settings(model_path, tmp_path, queue={"record": True}, steps=3, learning_rate=2e-2)
    outcome, said = replayed(other, tmp_path / "one")
    assert outcome.first_difference == 1
    assert outcome.largest_difference["learning_rate"] == pytest.approx(0.75e-2)
    assert "step 1: learning_rate is 0.005, and was 0.0025 in the run" in said
    assert "differ from the run's own from step 1 on" in said
    assert (
        "these settings differ from those with which the run made step 1: learner.learning_rate = 0.02 (was 0.01) "
        in said
    )


def test_what_steps_were_made_with_is_said_by_the_first_checkpoint_that_holds_them(tmp_path: Path) -> None:
    here = config(LEARNER, run={"dir": str(tmp_path)})
    assert made_with(here, 1) is None
    for step in (2, 4):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(f'{{"step": {step}, "version": {step}}}')
    found = [made_with(here, step) for step in (1, 2, 3, 5)]
    assert [info.step for info in found if info] == [2, 2, 4, 4]


def test_a_wrong_replay_is_refused_before_anything_is_written(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, queue={"record": True}, steps=3)
    with live_queue(here) as queue:
        train(here, queue)
    with pytest.raises(ConfigError, match=r"--from 2: not a step .* holds steps 1 to 3.*possible: 0$"):
        replayed(here, tmp_path / "out", from_step=2)
    epochs = here.model_copy(update={"learner": here.learner.model_copy(update={"epochs": 2.0})})
    with pytest.raises(ConfigError, match=r"learner.epochs = 2: a replay does not load the data set.*run.toml"):
        replayed(epochs, tmp_path / "out")
    (part,) = trained_record.record_parts(here.run_dir / trained_record.RECORD_FOLDER)
    part.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"part-000001.groups: not a record of groups"):
        replayed(here, tmp_path / "out")
    assert not (tmp_path / "out").exists()
