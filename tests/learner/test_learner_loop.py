from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pytest
import torch
from rich.console import Console

from learner.__main__ import main
from learner.algorithm.objectives import OBJECTIVES
from learner.algorithm.objectives.base import Objective, TokenLosses, Tokens
from learner.blocking_client import BlockingQueueClient
from learner.loop import Loop, build_trainer, run
from learner.report.progress import Progress
from learner.start import starting_point
from learner.stopping import Stop
from protocol.client import QueueClient, Unreachable
from protocol.config import ConfigError, RunConfig
from tests.kit import LEARNER, config
from tests.kit.learner import FakeQueue, endless
from weight_sync.probe import Probe
from weight_sync.publisher import Publisher, PublishRecord


class FakePublisher:
    """Writes down what it is given, in the queue's log."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.records: list[PublishRecord] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.probes: list[Probe] = []
        self.in_flight: int | None = None
        self.on_failure: Callable[[BaseException], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> float:
        self.queue.log.append(("publish", version))
        self.weights.append({name: weight.clone() for name, weight in weights})
        self.probes.append(probe)
        self.records.append(PublishRecord(version, 0.001, 0.002, 0.01, 0.005, 1e-6, ["vllm-0"], {}))
        return 0.002

    def wait(self) -> None:
        self.queue.log.append("proven")


def config_for(model_path: Path, tmp_path: Path, **learner: Any) -> RunConfig:
    settings = {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 2, **learner}
    return config(
        LEARNER, model={"path": str(model_path)}, run={"dir": str(tmp_path), "name": "test"}, learner=settings
    )


def train(config: RunConfig, queue: FakeQueue, resume: bool = False) -> FakePublisher:
    publisher = FakePublisher(queue)
    checkpoint = starting_point(config, resume)
    trainer = build_trainer(config, checkpoint)
    progress = Progress(config.learner.steps, console=Console(file=io.StringIO()))
    with BlockingQueueClient(cast(QueueClient, queue)) as client, Stop(20.0) as stop:
        Loop(config, trainer, client, cast(Publisher, publisher), progress, stop).run(checkpoint, resume)
    return publisher


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def milestones(queue: FakeQueue) -> list[Any]:
    return [entry for entry in queue.log if entry[0] not in ("lease", "waiting")]


def test_a_version_is_acknowledged_before_it_is_published_or_saved(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless(), version=0)
    publisher = train(config_for(model_path, tmp_path), queue)
    assert milestones(queue) == [
        ("begin", 0, False),
        ("publish", 0),
        "proven",
        ("ack", 1),
        ("publish", 1),
        ("ack", 2),
        ("publish", 2),
        ("checkpointed", 2),
        ("ack", 3),
        ("publish", 3),
        ("ack", 4),
        ("publish", 4),
        ("checkpointed", 4),
        "proven",
        "finished",
        "closed",
    ]
    changed = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(publisher.weights, publisher.weights[1:], strict=False)
    ]
    assert all(changed)


def test_the_servers_are_proven_before_the_first_lease(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    train(config_for(model_path, tmp_path, steps=1), queue)
    assert queue.log.index("proven") < next(i for i, entry in enumerate(queue.log) if entry[0] == "lease")


def test_the_run_directory_holds_metrics_summary_and_curve(model_path: Path, tmp_path: Path) -> None:
    """The stand-in's log-probs are made up: a wide clip keeps a gradient in every step."""
    train(config_for(model_path, tmp_path, clip_low=0.99, clip_high=100.0), FakeQueue(endless()))
    directory = tmp_path / "test"
    metrics = lines(directory / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in metrics] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert all(line["groups_trained"] == 2 and line["reward_mean"] == 0.5 for line in metrics)
    assert all(line["staleness_max"] <= 4 and line["grad_norm"] > 0 for line in metrics)
    assert all(0 < line["objective"]["ess"] <= 1.0001 for line in metrics)
    assert [line["publish_blocked_ms"] for line in metrics] == [0.0, 2.0, 2.0, 2.0], "of the version before"
    assert [line["version"] for line in lines(directory / "publications.jsonl")] == [0, 1, 2, 3, 4]
    result = msgspec.json.decode((directory / "summary.json").read_bytes())
    assert (result["steps"], result["sync_count"], result["sync_pause_ms_p50"]) == (4, 5, 5.0)
    assert (directory / "reward.png").stat().st_size > 1000


class MadeUp(Objective):
    """Gives a sum that nothing else has heard of."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        return TokenLosses(-tokens.logprobs * tokens.advantages * tokens.weights, {"anything": tokens.weights.sum()})


def test_an_objective_s_sums_reach_the_metrics_under_their_names(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "ppo_clip", MadeUp)
    train(config_for(model_path, tmp_path, steps=2, groups_per_step=12), FakeQueue(endless()))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [line["rows"] for line in metrics] == [2, 2], "or sums over several rows are not tried"
    assert [line["objective"] for line in metrics] == [{"anything": 1.0}] * 2


def test_the_last_version_is_published_whatever_the_interval(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    config = config_for(model_path, tmp_path, checkpoint_every=0)
    config = config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"every": 3})})
    train(config, queue)
    assert [entry[1] for entry in queue.log if entry[0] == "publish"] == [0, 3, 4]
    assert [entry[1] for entry in queue.log if entry[0] == "checkpointed"] == [4]


def test_i2_f1_a_resumed_learner_goes_on_with_higher_versions(model_path: Path, tmp_path: Path) -> None:
    """The first learner dies at step 3, after its checkpoint of step 2; the queue knows version 3."""
    config = config_for(model_path, tmp_path, prefetch_steps=0)
    queue = FakeQueue(endless())
    supply = queue.supply

    def dies_at_step_4(n: int, version: int) -> Any:
        if version == 3:
            raise Unreachable("gone")
        return supply(n, version)

    queue.supply = dies_at_step_4
    with pytest.raises(Unreachable):
        train(config, queue)
    assert [line["step"] for line in lines(tmp_path / "test" / "metrics.jsonl")] == [1, 2, 3]

    queue.supply, queue.log = supply, []
    train(config, queue, resume=True)
    assert milestones(queue)[:3] == [("begin", 2, True), ("publish", 3), "proven"]
    assert [entry[1] for entry in queue.log if entry[0] == "ack"] == [4, 5]
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in metrics] == [(1, 1), (2, 2), (3, 4), (4, 5)]


def test_training_follows_from_the_seed_alone(model_path: Path, tmp_path: Path) -> None:
    first = train(config_for(model_path, tmp_path / "a"), FakeQueue(endless()))
    second = train(config_for(model_path, tmp_path / "b"), FakeQueue(endless()))
    assert all(torch.equal(weight, second.weights[-1][name]) for name, weight in first.weights[-1].items())


def test_a_run_finished_from_outside_ends_with_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue()
    supply = endless()

    def until_step_1(n: int, version: int) -> Any:
        if version == 0:
            return supply(n, version)
        queue.now.finished = True
        return []

    queue.supply = until_step_1
    train(config_for(model_path, tmp_path, prefetch_steps=0), queue)
    assert ("checkpointed", 1) in queue.log
    assert (tmp_path / "test" / "summary.json").exists()


def test_an_old_checkpoint_is_not_overwritten_unasked(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path)
    train(config, FakeQueue(endless()))
    with pytest.raises(ConfigError, match=r"run.name = test: .*step-000004.*--resume, or choose another run.name"):
        run(config)


def test_resuming_without_a_checkpoint_starts_at_step_0(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless(), version=3)
    train(config_for(model_path, tmp_path, steps=1), queue, resume=True)
    assert milestones(queue)[:2] == [("begin", 0, True), ("publish", 3)]


def test_the_probe_is_scored_by_the_weights_that_are_published(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    config = config_for(model_path, tmp_path, steps=2)
    publisher = train(config, queue)
    trainer = build_trainer(config, starting_point(config, resume=True))
    last = publisher.probes[-1]
    assert (trainer.policy.score(last.token_ids) == last.logprobs).all()
    assert (publisher.probes[0].logprobs != last.logprobs).any()


def test_several_ranks_are_refused(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2"):
        run(config_for(model_path, tmp_path))


def test_the_command_says_what_is_wrong_with_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2
    assert main([str(tmp_path / "none.toml"), "--resume"]) == 2
    assert "none.toml: there is no such run file" in capsys.readouterr().err
