from __future__ import annotations

import ast
import inspect
import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO, cast

import msgspec
import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from slipstream.learner import loop
from slipstream.learner.__main__ import main
from slipstream.learner.algorithm.objectives import OBJECTIVES, Objective, TokenLosses
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.learner.collapse import PolicyDestroyed
from slipstream.learner.feed import packing, step_draft
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.packing import pack
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.report import queue_status, sampler_checks
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.queue_status import PendingNotices, Watch
from slipstream.learner.run import build_trainer, run
from slipstream.learner.start import session, starting_point
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints, reasons
from slipstream.protocol.client import QueueClient, QueueRefused, Unreachable
from slipstream.protocol.collapse import CAUSE
from slipstream.protocol.config import ConfigError, RunConfig, fingerprint, to_toml
from slipstream.protocol.messages import ErrorBody, Group
from slipstream.protocol.status import Cause, Status
from slipstream.weight_sync.fleet.publications import PublishRecord
from slipstream.weight_sync.publisher import Publisher, PublishError
from slipstream.weight_sync.weights.snapshot import Probe
from tests.kit import LEARNER, config
from tests.kit.fake_vllm.tokenizer import build_tokenizer, tiny_tokenizer
from tests.kit.learner import FakeQueue, endless, sample, status
from tests.kit.messages import SERVER, VOCABULARY, group
from tests.kit.model import save_tiny_model
from tests.kit.ports import free_port
from tests.learner.families import PADDED


class FakePublisher:
    """Writes down what it is given, in the queue's log."""

    by_shares = False

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.session: int | None = None
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

    def rank_lost(self, error: BaseException) -> None: ...


def config_for(model_path: Path, tmp_path: Path, **learner: Any) -> RunConfig:
    settings = {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 2, **learner}
    return config(
        LEARNER, model={"path": str(model_path)}, run={"dir": str(tmp_path), "name": "test"}, learner=settings
    )


def train(
    config: RunConfig,
    queue: FakeQueue,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    screen: TextIO | None = None,
    watched: bool = False,
) -> FakePublisher:
    publisher = FakePublisher(queue)
    checkpoint = starting_point(config, resume)
    trainer = build_trainer(config, checkpoint)
    progress = TerminalProgress(config.learner.steps, console=Console(file=screen or io.StringIO()))
    with BlockingQueueClient(cast(QueueClient, queue)) as client, Stop(20.0) as stop, ExitStack() as entered:
        watch = entered.enter_context(Watch(client, progress)) if watched else None
        loop.train(
            *(config, trainer, client, cast(Publisher, publisher), progress, stop, checkpoint, resume, callbacks),
            watch=watch,
        )
    return publisher


def test_a_run_whose_rewards_are_all_equal_ends_with_the_word_that_nothing_was_learnt(
    model_path: Path, tmp_path: Path
) -> None:
    def supply(n: int, version: int) -> list[Group]:
        return [group(f"{version}.{i}", rewards=(0.0, 0.0), versions=(None, None, version)) for i in range(n)]

    screen = io.StringIO()
    train(config_for(model_path, tmp_path, steps=2, zero_variance="keep"), FakeQueue(supply), screen=screen)
    written = msgspec.json.decode((tmp_path / "test" / "summary.json").read_bytes())
    assert written["nothing_learnt"].startswith("nothing was learnt: the gradient was 0 in all of its 2 steps")
    assert screen.getvalue().splitlines()[-1].startswith("! nothing was learnt")


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def milestones(queue: FakeQueue) -> list[Any]:
    return [entry for entry in queue.log if entry[0] not in ("lease", "waiting")]


def test_the_loop_has_all_of_its_attributes_from_the_start() -> None:
    methods = {
        of.name: {
            node.attr
            for node in ast.walk(of)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        for of in ast.parse(textwrap.dedent(inspect.getsource(loop.Loop))).body[0].body  # type: ignore[attr-defined]
        if isinstance(of, ast.FunctionDef)
    }
    made = methods.pop("__init__")
    assert "_queue" in made
    assert set().union(*methods.values()) <= made


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
    train(config_for(model_path, tmp_path, clip_low=0.99, clip_high=100.0, delta="none"), FakeQueue(endless()))
    directory = tmp_path / "test"
    metrics = lines(directory / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in metrics] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert all(line["groups_trained"] == 2 and line["reward"] == 0.5 for line in metrics)
    assert all(line["staleness_max"] <= 4 and line["grad_norm"] > 0 for line in metrics)
    assert all(0 < line["ess"] <= 1.0001 for line in metrics)
    assert [line["num_tokens"] for line in metrics] == [16, 32, 48, 64], "two groups of two rollouts a step"
    assert [line["step"] for line in lines(directory / "rollouts.jsonl")] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert [line["publish_blocked_ms"] for line in metrics] == [0.0, 2.0, 2.0, 2.0], "of the version before"
    assert [line["version"] for line in lines(directory / "publications.jsonl")] == [0, 1, 2, 3, 4]
    result = msgspec.json.decode((directory / "summary.json").read_bytes())
    assert (result["steps"], result["sync_count"], result["sync_pause_ms_p50"]) == (4, 5, 5.0)
    assert (directory / "reward.png").stat().st_size > 1000


def test_a_server_that_leaves_its_range_is_named_to_the_queue(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's log-probs are made up, and of the same server in all steps."""
    for name, value in (("LEARNT", 1), ("IN_A_ROW", 1), ("UNUSUAL", 0.0), ("MIN_TOKENS", 1)):
        monkeypatch.setattr(sampler_checks, name, value)
    told: list[str] = []
    monkeypatch.setattr(PendingNotices, "server", lambda _, text: told.append(text))
    train(config_for(model_path, tmp_path, clip_low=0.99, clip_high=100.0, delta="none"), FakeQueue(endless()))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    seen = [line[f"sampler/distance/{SERVER}"] for line in metrics if f"sampler/distance/{SERVER}" in line]
    assert seen
    assert all(distance > 0 for distance in seen)
    assert bool(told) == (len(seen) > 1)
    assert all(text.startswith(f"{SERVER} samples farther") for text in told)


class MadeUp(Objective):
    """Gives a sum that nothing else has heard of."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        return TokenLosses(
            -tokens.logprobs * tokens.advantages * tokens.weights, {"anything": (tokens.weights > 0).sum()}
        )


def test_an_objective_s_sums_reach_the_metrics_under_their_names(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "ppo_clip", MadeUp)
    train(config_for(model_path, tmp_path, steps=2, groups_per_step=12), FakeQueue(endless()))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [line["rows"] for line in metrics] == [2, 2], "or sums over several rows are not tried"
    assert [line["anything"] for line in metrics] == [1.0] * 2


def test_the_reference_is_the_model_of_the_run_s_start_in_a_resumed_run_too(model_path: Path, tmp_path: Path) -> None:
    """The reference is not the checkpoint's model, from which the policy continues."""
    settings = {
        "kl_coef": 0.1,
        "clip_low": 0.99,
        "clip_high": 100.0,
        "delta": "none",
        "learning_rate": 1e-2,
        "checkpoint_every": 3,
    }
    config = config_for(model_path, tmp_path, **settings, steps=3)
    train(config, FakeQueue(endless()))
    found = starting_point(config_for(model_path, tmp_path, **settings), resume=True)
    trainer = build_trainer(config_for(model_path, tmp_path, **settings), found)
    assert trainer.reference is not None
    (row,) = pack([sample(9, 2, 0)], 32)
    begin = build_trainer(config_for(model_path, tmp_path / "new"), None).policy
    torch.testing.assert_close(trainer.reference.logprobs(row), begin(row).logprobs.detach())
    assert not torch.allclose(trainer.policy(row).logprobs, begin(row).logprobs, atol=1e-3)

    queue = FakeQueue(endless(), version=3)
    train(config_for(model_path, tmp_path, **settings, steps=5), queue, resume=True)
    figures = [line["kl_reference"] for line in lines(tmp_path / "test" / "metrics.jsonl")]
    assert figures[0] == pytest.approx(0, abs=1e-6)
    assert all(figure > 1e-4 for figure in figures[1:])


def test_the_default_run_has_no_reference(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path, steps=1)
    assert build_trainer(config, None).reference is None
    train(config, FakeQueue(endless()))
    (line,) = lines(tmp_path / "test" / "metrics.jsonl")
    assert "kl_reference" not in line


def test_with_the_kl_in_the_reward_groups_of_equal_rewards_train(model_path: Path, tmp_path: Path) -> None:
    asked = 0

    def flat(n: int, version: int) -> list[Group]:
        nonlocal asked
        asked += n
        assert asked <= 8, "they are dropped, and others asked for"
        return [group(f"flat-{asked}-{number}", [0.0, 0.0]) for number in range(n)]

    settings = {"kl_coef": 0.1, "kl_in_reward": True, "clip_low": 0.99, "clip_high": 100.0, "delta": "none", "steps": 2}
    train(config_for(model_path, tmp_path, **settings), FakeQueue(flat))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [(line["groups_trained"], line["groups_dropped"]) for line in metrics] == [(2, {}), (2, {})]
    assert all(line["grad_norm"] > 0 and line["kl_reference"] for line in metrics)


def test_steps_of_groups_without_variance_are_kept_and_change_no_weight(model_path: Path, tmp_path: Path) -> None:
    numbers = itertools.count()

    def flat(n: int, version: int) -> list[Group]:
        return [group(f"flat-{next(numbers)}", [0.0, 0.0]) for _ in range(n)]

    publisher = train(config_for(model_path, tmp_path, zero_variance="keep", steps=3), FakeQueue(flat))
    metrics = lines(tmp_path / "test" / "metrics.jsonl")
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in metrics] == [(n, 0.0, 0.0) for n in (1, 2, 3)]
    first, *_, last = publisher.weights
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_the_last_version_is_published_whatever_the_interval(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    config = config_for(model_path, tmp_path, checkpoint_every=0)
    config = config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"every": 3})})
    train(config, queue)
    assert [entry[1] for entry in queue.log if entry[0] == "publish"] == [0, 3, 4]
    assert [entry[1] for entry in queue.log if entry[0] == "checkpointed"] == [4]


def test_a_resume_names_the_newest_version_that_servers_may_know(model_path: Path, tmp_path: Path) -> None:
    """The learner dies at version 3 with a checkpoint of version 2, and the queue loses its store: the run directory
    alone knows of version 3."""
    config = config_for(model_path, tmp_path, prefetch_steps=0)
    queue, supply = FakeQueue(), endless()

    def dies_at_step_4(n: int, version: int) -> Any:
        if version == 3:
            raise Unreachable("gone")
        return supply(n, version)

    queue.supply = dies_at_step_4
    with pytest.raises(Unreachable):
        train(config, queue)
    empty = FakeQueue(supply, version=4)
    train(config, empty, resume=True)
    assert [(begin.step, begin.version) for begin in empty.begun] == [(2, 3)]


def test_i2_a_resumed_learner_goes_on_with_higher_versions(model_path: Path, tmp_path: Path) -> None:
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
    assert publisher.probes[0].token_ids != last.token_ids, "each publication has another probe"


def test_ranks_that_nobody_has_numbered_are_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2"):
        run(config_for(model_path, tmp_path))


def test_the_command_says_what_is_wrong_with_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([])
    assert main([str(tmp_path / "none.toml"), "--resume"]) == 2
    assert "none.toml: there is no such run file" in capsys.readouterr().err


def test_the_session_declares_the_tokenizer_the_settings_and_the_vocabulary(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    settings = config_for(model_path, tmp_path, steps=1)
    train(settings, queue)
    assert queue.begun[0].fingerprint == fingerprint.of(settings, tiny_tokenizer())
    assert queue.begun[0].vocabulary == VOCABULARY


def test_the_session_declares_the_tokenizer_that_the_run_file_names(model_path: Path, tmp_path: Path) -> None:
    other = build_tokenizer("its own template")
    other.save_pretrained(tmp_path / "tokenizer")
    settings = config_for(model_path, tmp_path)
    model = settings.model.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")})
    settings = settings.model_copy(update={"model": model})
    begin = session(settings, None, False, VOCABULARY)
    assert begin.fingerprint == fingerprint.of(settings, other) != fingerprint.of(settings, tiny_tokenizer())
    gone = settings.model_copy(update={"model": model.model_copy(update={"tokenizer": str(tmp_path / "gone")})})
    with pytest.raises(ConfigError, match=f"model.tokenizer = {tmp_path}/gone: no tokenizer can be loaded from it"):
        session(gone, None, False, VOCABULARY)


def test_a_learner_without_the_task_refuses_epochs(model_path: Path, tmp_path: Path) -> None:
    settings = config_for(model_path, tmp_path)
    epochs = settings.model_copy(update={"learner": settings.learner.model_copy(update={"epochs": 2.0})})
    with pytest.raises(ConfigError, match=r"learner.epochs = 2: .*start it with: slipstream learner run.toml"):
        run(epochs)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded .* tokenizer.save_pretrained"):
        train(config_for(folder, tmp_path), FakeQueue(endless()))


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    """A queue and a publisher that `run` finds in the place of the real ones."""
    queue = FakeQueue(endless())
    queue.shown = status()
    monkeypatch.setattr("slipstream.learner.run.QueueClient", lambda url, token: queue)
    monkeypatch.setattr("slipstream.learner.run.Publisher", lambda config, url, ranks: FakePublisher(queue))
    monkeypatch.setenv("SLIPSTREAM_COMMAND", "slipstream up my.toml")
    return queue


def signal_in_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send it to this process as the forward pass of `step` begins."""
    count, forward = 0, PolicyTrainer.step

    def signalled(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), number)
        return forward(*arguments)

    monkeypatch.setattr(PolicyTrainer, "step", signalled)


def test_resuming_what_was_never_saved_begins_again_and_says_so(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_place.now.step = 3
    run(config_for(model_path, tmp_path), resume=True)
    assert [(begin.step, begin.resume) for begin in in_place.begun] == [(0, True)]
    told = " ".join(capsys.readouterr().out.split())
    assert "checkpoints holds no checkpoint, and 3 steps were made and are given up: starting at step 0" in told


def test_a_resume_says_from_where_and_what_was_changed(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config_for(model_path, tmp_path, steps=2))
    capsys.readouterr()
    run(config_for(model_path, tmp_path, steps=3, learning_rate=5e-4), resume=True)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"resuming from step 2 of 3: {tmp_path}/test/checkpoints/step-000002"
    assert said[1] == (
        "changed since that checkpoint, and used from here on: learner.steps = 3 (was 2), "
        "learner.learning_rate = 0.0005 (was 0.001)"
    )
    assert said[2] == "algorithm grpo"
    assert in_place.begun[-1].changed == ["learner.steps = 3 (was 2)", "learner.learning_rate = 0.0005 (was 0.001)"]
    rates = [line["learning_rate"] for line in lines(tmp_path / "test" / "metrics.jsonl")]
    assert rates == [1e-3, 1e-3, 5e-4]


def test_resuming_a_finished_run_says_so(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config_for(model_path, tmp_path, steps=2))
    capsys.readouterr()
    in_place.log.clear()
    run(config_for(model_path, tmp_path, steps=2), resume=True)
    assert (
        capsys.readouterr().out == "test is finished: it has made all of its 2 steps; raise learner.steps to continue\n"
    )
    assert in_place.log == ["closed"]


def test_resuming_before_the_first_step_starts(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config_for(model_path, tmp_path, steps=1), resume=True)
    assert "holds no checkpoint, and no step was made: starting at step 0" in capsys.readouterr().out


def test_a_run_that_gave_up_ends_with_the_queue_s_words_and_code_1(
    in_place: FakeQueue, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the first 16 groups failed: reward: accuracy gave 3 values for 4 completions; return one for each"
    in_place.fail_lease = QueueRefused(409, ErrorBody(reasons.GAVE_UP, text))
    (tmp_path / "task.py").write_text("task = None\n")
    settings = config_for(model_path, tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(settings))
    assert main([str(file), "--task.path", f"{tmp_path}/task.py:task"]) == 1
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_failure_between_publications_ends_the_wait_for_groups(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = FakeQueue()
    publisher = FakePublisher(queue)

    def fails(n: int, version: int) -> list[Any]:
        if publisher.on_failure is not None:
            publisher.on_failure(PublishError("the watch ended"))
        return []

    queue.supply = fails
    settings = config_for(model_path, tmp_path)
    progress = TerminalProgress(4, console=Console(file=io.StringIO()))
    with (
        BlockingQueueClient(cast(QueueClient, queue)) as client,
        Stop(20.0) as stop,
        pytest.raises(PublishError, match="the watch ended"),
    ):
        loop.train(settings, build_trainer(settings, None), client, cast(Publisher, publisher), progress, stop)


@pytest.mark.parametrize("moment", ["imports", "waits"])
def test_ctrl_c_prints_no_traceback(moment: str, model_path: Path, tmp_path: Path) -> None:
    """While packages load, and while the queue is waited for."""
    (tmp_path / "task.py").write_text("task = None\n")
    (tmp_path / "run.toml").write_text(to_toml(config_for(model_path, tmp_path)))
    command = [sys.executable, "-m", "slipstream.learner", "run.toml", "--task.path", "task.py:task", "--queue.port"]
    command.append(str(free_port()))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = ""
        if moment == "waits":
            while "waiting for the queue at" not in errors:
                errors += process.stderr.readline()
        else:
            while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        errors += process.stderr.read()
    assert process.returncode == (130 if moment == "waits" else -signal.SIGINT)
    for word in ("Traceback", "destroyed", "ignored"):
        assert word not in errors


@pytest.mark.parametrize(("accepted", "told"), [(False, 1), (True, 0)])
def test_a_sampler_that_differs_is_told_once_unless_that_was_accepted(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: bool, told: int
) -> None:
    """The supply's log-probs are not the tiny model's; without prefetch, each step trains on its own version's."""
    warnings: list[str] = []
    monkeypatch.setattr(TerminalProgress, "warn", lambda _, text: warnings.append(text))
    monkeypatch.setattr(sampler_checks, "MIN_TOKENS", 1)
    plain = config_for(model_path, tmp_path, prefetch_steps=0)
    rollout = plain.rollout.model_copy(update={"accept_sampler_mismatch": accepted})
    train(plain.model_copy(update={"rollout": rollout}), FakeQueue(endless(), version=0))
    figures = [line["sampler/kl_staleness_0"] for line in lines(tmp_path / "test" / "metrics.jsonl")]
    assert sum(abs(kl) > sampler_checks.SUSPICIOUS_KL for kl in figures if kl is not None) > 1
    assert sum("sampler/kl_staleness_0" in text for text in warnings) == told


def test_a_model_whose_layers_mix_positions_trains_on_rows_of_whole_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    PADDED["LFM2 (convolutions)"]().save_pretrained(tmp_path / "lfm2")
    tiny_tokenizer().save_pretrained(tmp_path / "lfm2")
    packed = list[bool]()

    def pack(*given: Any, branches: bool, **named: Any) -> Any:
        packed.append(branches)
        return packing.pack(*given, branches=branches, **named)

    monkeypatch.setattr(step_draft, "pack", pack)
    publisher = train(config_for(tmp_path / "lfm2", tmp_path, steps=2), FakeQueue(endless()))
    assert set(packed) == {False}
    assert [record.version for record in publisher.records] == [0, 1, 2]
    assert any(not torch.equal(publisher.weights[0][name], publisher.weights[2][name]) for name in publisher.weights[0])


@pytest.mark.parametrize(("first_bad", "kept", "back"), [(2, [1], "Continue from step 1"), (1, [], "begin again")])
def test_a_destroyed_policy_ends_the_run_and_the_last_good_checkpoint_is_the_newest(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_bad: int, kept: list[int], back: str
) -> None:
    """The update of step `first_bad` is a thousand times too large."""
    config = config_for(model_path, tmp_path, steps=6, checkpoint_every=1, keep_checkpoints=5)
    monkeypatch.setattr(sys, "argv", ["learner/__main__.py", "run.toml"])
    destroy_after(monkeypatch, first_bad)
    queue = FakeQueue(stale_by_one)
    with pytest.raises(PolicyDestroyed, match=rf"step {first_bad + 1}: the update of step {first_bad} ") as caught:
        train(config, queue)
    assert f"{back}" in str(caught.value)
    assert str(caught.value).count("--resume --learner.learning_rate 0.0001") == 1
    assert sorted(checkpoints.complete(config.run_dir)) == kept
    assert queue.now.step == first_bad + 1
    assert ("publish", first_bad + 1) not in queue.log
    assert [line["step"] for line in lines(config.run_dir / "metrics.jsonl")] == [*range(1, first_bad + 2)]


def test_with_warn_a_run_goes_on_after_its_policy_was_destroyed(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy_after(monkeypatch, 1)
    queue = FakeQueue(stale_by_one)
    train(config_for(model_path, tmp_path, steps=3, on_collapse="warn"), queue)
    assert queue.now.finished


class AllEqualAfter(FakeQueue):
    """From step `last` on all rewards of a group are equal, and the status blames that step's update.

    That is over when the status was asked a few times.
    """

    def __init__(self, last: int) -> None:
        super().__init__(self.groups)
        self.last, self.asked, self.made = last, 0, 0

    def groups(self, n: int, version: int) -> list[Group]:
        equal = version == self.last and self.asked < 4
        self.made += n
        rewards = (0.0, 0.0) if equal else (0.0, 1.0)
        return [group(f"{self.made}.{i}", rewards=rewards, versions=(None, None, version)) for i in range(n)]

    async def status(self) -> Status:
        blamed = self.now.step == self.last
        self.asked += blamed
        causes = [Cause(CAUSE, "the update made all rewards equal", "bad")] if blamed else []
        return status(step=self.now.step, diagnosis=causes)


@pytest.mark.parametrize("on_collapse", ["stop", "warn"])
def test_a_wait_for_groups_of_a_destroyed_policy_ends(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_collapse: str
) -> None:
    """A policy that samples for itself yields no group that is worth a step, so that no later step shows it."""
    monkeypatch.setattr(queue_status, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(sys, "argv", ["learner/__main__.py", "run.toml", "--learner.learning_rate", "0.001"])
    settings = {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 5, "prefetch_steps": 0}
    config, queue = config_for(model_path, tmp_path, on_collapse=on_collapse, **settings), AllEqualAfter(last=2)
    if on_collapse == "warn":
        train(config, queue, watched=True)
        assert queue.now.finished
        return
    with pytest.raises(PolicyDestroyed) as caught:
        train(config, queue, watched=True)
    assert caught.value.step == queue.now.step == 2
    assert [*checkpoints.complete(config.run_dir)] == [1]
    assert str(caught.value).count("learner.learning_rate 0.0001") == 1
    assert "learner.learning_rate 0.001" not in str(caught.value)


def stale_by_one(n: int, version: int) -> list[Group]:
    """Make groups that the version before has sampled, if there is one."""
    before = max(0, version - 1)
    return [group(f"{version}.{i}", versions=(None, None, before, before, before)) for i in range(n)]


def destroy_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the update of step `number` make all that a group's tokens are sampled from unlikely."""
    whole = PolicyTrainer._step

    def step(trainer: PolicyTrainer, *arguments: Any) -> Any:
        found = whole(trainer, *arguments)
        if trainer.schedule.last_epoch == number:
            with torch.no_grad():
                for weight in trainer.policy.parameters():
                    weight.mul_(30)
        return found

    monkeypatch.setattr(PolicyTrainer, "_step", step)
