"""`slipstream.join`: a trainer of one's own leases, commits and publishes on a real queue."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import slipstream
from slipstream.learner.joined_run import Run
from slipstream.learner.report.journal import Journal
from slipstream.learner.report.records import StepRecord
from slipstream.protocol.client import QueueError
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Group, Ticket
from slipstream.weight_sync.publisher import Publisher, PublishError
from tests.kit.config import LEARNER, config
from tests.kit.live_queue import LivePublisher, LiveQueue, live_queue, of_row

WEIGHTS = {"w": torch.ones(2)}


class Left(Exception):
    """Leaves a run that is not to be finished."""


def score(token_ids: list[int]) -> list[float]:
    return [-1.0] * (len(token_ids) - 1)


def settings(model_path: Path, tmp_path: Path, **sections: Any) -> RunConfig:
    given = sections.pop("learner", {})
    end = {} if "epochs" in given else {"steps": 4}
    learner = {"groups_per_step": 2, "zero_variance": "keep", **end, **given}
    return config(
        LEARNER, model={"path": str(model_path)}, run={"dir": str(tmp_path), "name": "own"}, learner=learner, **sections
    )


@contextlib.contextmanager
def joined(of: RunConfig, queue: LiveQueue, **given: Any) -> Iterator[tuple[Run, LivePublisher]]:
    publisher = LivePublisher(queue)
    made = contextlib.nullcontext(cast(Publisher, publisher))
    with Run(of, queue.url, make_publisher=lambda *_: cast(Publisher, made), **given) as run:
        yield run, publisher


def test_i1_each_batch_makes_one_version_and_no_group_is_trained_twice(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path)
    with live_queue(here) as queue:
        with joined(here, queue) as (run, publisher):
            run.publish(WEIGHTS, score)
            for number, batch in enumerate(run.batches(), start=1):
                assert (batch.step, batch.version, run.version) == (number, number - 1, number - 1)
                run.commit(batch, {"loss": 0.5, "mine": number})
                run.publish(WEIGHTS, score)
        status = queue.call(lambda client: client.status())
        position = queue.call(lambda client: client.position())
    assert (position.step, position.finished, status.ledger.trained) == (4, True, 8)
    assert [record.version for record in publisher.records] == [0, 1, 2, 3, 4]
    lines = Journal(here.run_dir / "metrics.jsonl", StepRecord, 4).records
    assert [line.metrics.loss for line in lines] == [0.5] * 4
    assert '"mine":4.0' in (here.run_dir / "metrics.jsonl").read_text().splitlines()[-1]


def test_i2_a_batch_has_the_tokens_log_probs_and_versions_of_its_groups(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"normaliser": "tokens"})
    groups: dict[int, Group] = {}

    def make(ticket: Ticket) -> Group:
        return groups.setdefault(ticket.index, of_row(ticket))

    with live_queue(here, make) as queue, joined(here, queue) as (run, _):
        run.publish(WEIGHTS, score)
        batch = next(run.batches())
        expected = [(group, number) for _, group in sorted(groups.items())[:2] for number in range(2)]
        assert len(batch) == len(expected) == 4
        for row, (group, number) in enumerate(expected):
            (segment,) = group.rollouts[number].segments
            length = len(segment.token_ids)
            assert batch.attention_mask[row].sum() == length
            assert batch.input_ids[row, :length].tolist() == segment.token_ids.tolist()
            assert np.array_equal(batch.behaviour[row, :length].numpy(), segment.logprobs)
            assert batch.trains[row, :length].tolist() == segment.loss_mask.tolist()
            assert batch.versions[row][batch.trains[row]].unique().tolist() == [0]
            assert batch.rewards[row] == group.rollouts[number].reward
        assert (
            batch.advantages[batch.trains].sign()
            == (2 * batch.rewards - 1)[:, None].expand_as(batch.trains)[batch.trains]
        ).all()
        assert not batch.weights[~batch.trains].any()
        assert batch.weights.sum() == pytest.approx(1.0)
        run.commit(batch)


def test_the_parts_of_a_batch_add_up_to_it(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path)
    with live_queue(here) as queue, joined(here, queue) as (run, _):
        run.publish(WEIGHTS, score)
        batch = next(run.batches())
        parts = list(batch.split(3))
        assert [len(part) for part in parts] == [3, 1]
        assert all(bool(part.attention_mask[:, -1].any()) for part in parts)
        assert torch.isclose(sum(part.weights.sum() for part in parts), batch.weights.sum())
        assert batch.to("meta").input_ids.device.type == "meta"
        run.commit(batch)


def test_a_batch_that_is_skipped_makes_no_version_and_its_groups_are_dropped(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 1})
    with live_queue(here) as queue:
        with joined(here, queue) as (run, _):
            run.publish(WEIGHTS, score)
            for number, batch in enumerate(run.batches()):
                assert (batch.step, batch.version) == (1, 0)
                run.commit(batch) if number else run.skip(batch)
        status = queue.call(lambda client: client.status())
    assert (status.ledger.trained, status.drops["step_not_finite"]) == (2, 2)


def test_i1_a_batch_that_was_skipped_cannot_be_committed_in_place_of_the_next(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 1})
    with live_queue(here) as queue, joined(here, queue) as (run, _):
        run.publish(WEIGHTS, score)
        batches = run.batches()
        skipped = next(batches)
        run.skip(skipped)
        batch = next(batches)
        with pytest.raises(RuntimeError, match="not the batch"):
            run.commit(skipped)
        run.commit(next(batch.split(1)).to("cpu"))
        assert run.step == 1


def test_a_publication_that_ends_during_a_step_stands_in_its_line(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 1})
    with live_queue(here) as queue, joined(here, queue) as (run, publisher):
        run.publish(WEIGHTS, score)
        for batch in run.batches():
            publisher.records += [replace(publisher.records[0], pause_s=7.5)]
            run.commit(batch)
    assert '"weight_sync/pause_s":7.5' in (here.run_dir / "metrics.jsonl").read_text()


def test_a_run_is_entered_once(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 1})
    with live_queue(here) as queue, joined(here, queue) as (run, _), pytest.raises(RuntimeError, match="already"), run:
        pytest.fail("it would begin a second session")


@pytest.mark.parametrize(("every", "published"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_a_publication_is_made_when_it_is_due(
    every: int, published: list[int], model_path: Path, tmp_path: Path
) -> None:
    here = settings(model_path, tmp_path, weight_sync={"every": every}, queue={"max_staleness": 4})
    with live_queue(here) as queue, joined(here, queue) as (run, publisher):
        run.publish(WEIGHTS, score)
        for batch in run.batches():
            run.commit(batch)
            run.publish(WEIGHTS, score)
            run.publish(WEIGHTS, score)
    assert [record.version for record in publisher.records] == published


def test_an_exception_leaves_the_run_to_be_resumed_from_the_caller_s_checkpoint(
    model_path: Path, tmp_path: Path
) -> None:
    here = settings(model_path, tmp_path)
    with live_queue(here) as queue:
        with contextlib.suppress(KeyboardInterrupt), joined(here, queue) as (run, _):
            run.publish(WEIGHTS, score)
            for batch in run.batches():
                if batch.step == 4:
                    raise KeyboardInterrupt
                run.commit(batch)
                run.publish(WEIGHTS, score)
                if batch.step == 2:
                    run.saved()
        assert not queue.call(lambda client: client.position()).finished
        with pytest.raises(QueueError), joined(here, queue):
            pytest.fail("a fresh start would give up the run's steps")
        with joined(here, queue, step=2, resume=True) as (run, _):
            assert (run.step, run.version) == (2, 4)
            run.publish(WEIGHTS, score)
            steps = []
            for batch in run.batches():
                steps.append((batch.step, batch.version))
                run.commit(batch)
                run.publish(WEIGHTS, score)
        assert steps == [(3, 4), (4, 5)]
        assert queue.call(lambda client: client.position()).finished
    assert [record.step for record in Journal(here.run_dir / "metrics.jsonl", StepRecord, 4).records] == [1, 2, 3, 4]


def test_mistakes_are_told_before_anything_is_lost(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 1})
    with live_queue(here) as queue, joined(here, queue) as (run, publisher):
        with pytest.raises(RuntimeError, match="publish"):
            next(run.batches())
        with pytest.raises(ValueError, match="score"):
            run.publish(WEIGHTS, lambda ids: [0.0] * len(ids))
        with pytest.raises(ValueError, match="score"):
            run.publish(WEIGHTS, lambda ids: [float("nan")] * (len(ids) - 1))
        assert not publisher.records
        run.publish(WEIGHTS, score)
        batches = run.batches()
        batch = next(batches)
        for value in (float("inf"), None, 10**400):
            with pytest.raises(ValueError, match="loss"):
                run.commit(batch, {"loss": value})  # type: ignore[dict-item]
        with pytest.raises(RuntimeError, match="neither committed nor skipped"):
            next(batches)
        run.commit(batch, {"loss": 0.0})
        with pytest.raises(RuntimeError, match="step 1"):
            run.commit(batch)
        with pytest.raises(RuntimeError, match="step 1"):
            run.skip(batch)


def test_a_new_iterator_gets_the_groups_that_the_one_before_gave_back(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, learner={"steps": 2})
    with live_queue(here) as queue, joined(here, queue) as (run, _):
        run.publish(WEIGHTS, score)
        first = next(run.batches())
        for batch in run.batches():
            if batch.step == 1:
                assert torch.equal(batch.input_ids, first.input_ids)
            run.commit(batch)
            run.publish(WEIGHTS, score)
    assert run.step == 2


def test_a_run_that_was_not_entered_and_a_rank_that_joins_are_told(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings(model_path, tmp_path)
    with pytest.raises(RuntimeError, match="enter it"):
        slipstream.join(here).publish(WEIGHTS, score)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="RANK = 1"):
        slipstream.join(here)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"lora": {"r": 8}}, "lora.r"),
        ({"rollout": {"top_k": 20}}, "rollout.top_k"),
        ({"learner": {"router_replay": True}}, "learner.router_replay"),
        (
            {"learner": {"demonstrations_coef": 0.1}, "demonstrations": {"path": "demos.jsonl"}},
            "learner.demonstrations_coef",
        ),
        ({"learner": {"epochs": 2.0}}, "learner.epochs"),
    ],
)
def test_settings_that_only_our_learner_follows_are_refused(
    sections: dict[str, Any], named: str, model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        slipstream.join(settings(model_path, tmp_path, **sections))


def test_a_script_takes_run_file_and_settings_from_its_command_line(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[model]\npath = "{model_path}"\n[task]\npath = "task.py:task"\n[learner]\nscript = "trainer.py"\n'
    )
    monkeypatch.setattr(sys, "argv", ["trainer.py"])
    with pytest.raises(SystemExit):
        slipstream.join()
    monkeypatch.setattr(sys, "argv", ["trainer.py", str(run_file), "--resume", "--learner.steps", "7"])
    run = slipstream.join()
    assert run.config.learner.steps == 7
    assert run.config.learner.script == str(tmp_path / "trainer.py")


def test_a_first_publication_that_is_not_proven_asks_about_the_score(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path)

    def fails() -> None:
        raise PublishError("after version 0 its log-probs of the probe differ by 2.8")

    with live_queue(here) as queue, contextlib.suppress(Left), joined(here, queue) as (run, publisher):
        run.publish(WEIGHTS, score)
        publisher.records.clear()
        publisher.wait = fails  # type: ignore[method-assign]
        with pytest.raises(PublishError, match=r"does score\(\) return .* differ by 2\.8"):
            run.batches()
        raise Left


def test_a_module_in_place_of_its_weights_is_refused_with_what_to_give(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path)
    with live_queue(here) as queue, contextlib.suppress(Left), joined(here, queue) as (run, _):
        with pytest.raises(TypeError, match=r"a module, Linear: give it model\.named_param"):
            run.publish(torch.nn.Linear(2, 2), score)  # type: ignore[arg-type]
        raise Left


def test_leaving_before_the_last_step_is_said(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    here = settings(model_path, tmp_path)
    with live_queue(here) as queue, joined(here, queue) as (run, _):
        run.publish(WEIGHTS, score)
        run.commit(next(run.batches()))
    assert "the trainer left after step 1 of 4: the run ends" in caplog.text + "".join(capsys.readouterr())
