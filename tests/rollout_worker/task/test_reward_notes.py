"""`log_metric`, `log_extra` and `trainer_state`, with TRL 1.16's meaning."""

import asyncio
import threading

import pytest

from slipstream.protocol.messages import MAX_METRIC
from slipstream.rollout_worker.task.reward_base import (
    MAX_COLUMNS,
    MAX_METRICS,
    NAME_CHARACTERS,
    TEXT_CHARACTERS,
    RewardBatch,
    RewardError,
    TrainerState,
)
from slipstream.rollout_worker.task.rewards import RewardFunctions
from tests.kit.worker import fake, roll, task

BATCH = RewardBatch(
    prompt="2 by 3",
    completions=["6", "7"],
    completion_ids=[[6], [7]],
    columns={"prompt": "2 by 3"},
    state=TrainerState(global_step=5, version=7, epoch=1.0, max_steps=20),
)


async def scored(*functions, **options):
    """The scores, and what was told."""
    told: list[RewardError] = []
    return await RewardFunctions(functions, **options).score(BATCH, told.append), [str(error) for error in told]


async def test_a_function_gets_only_what_its_signature_takes():
    got = {}

    def named(completions, log_metric, **kwargs):
        got["named"] = {"log_metric", *kwargs}
        return [0.0, 0.0]

    def plain(prompts, completions, completion_ids):
        got["plain"] = set()
        return [0.0, 0.0]

    def stateful(prompts, completions, completion_ids, trainer_state=None):
        got["state"] = trainer_state
        return [0.0, 0.0]

    rewards = RewardFunctions([named, plain, stateful])
    rewards.check_signatures(BATCH.columns)
    await rewards.score(BATCH)
    assert got["named"] >= {"log_metric", "log_extra", "trainer_state"}
    assert got["state"] == TrainerState(5, 7, 1.0, 20)


@pytest.mark.parametrize("is_async", [False, True])
async def test_notes_go_to_every_rollout_and_metrics_are_averaged(is_async):
    def noting(completions, log_metric, log_extra, **kwargs):
        log_metric("hits", 1)
        log_metric("hits", 0)
        log_extra("said", completions)
        log_extra("length", [len(text) for text in completions])
        return [1.0, 0.0]

    async def noting_async(completions, log_metric, log_extra, **kwargs):
        await asyncio.sleep(0)
        return noting(completions, log_metric, log_extra)

    (first, second), told = await scored(noting_async if is_async else noting)
    assert (first.metrics, second.metrics) == ({"hits": 0.5}, {"hits": 0.5})
    assert (first.extra, second.extra) == ({"said": "6", "length": "1"}, {"said": "7", "length": "1"})
    assert told == []


async def test_i9_notes_that_cannot_be_sent_are_left_out_and_told():
    def noting(completions, log_metric, log_extra, **kwargs):
        log_metric("nan", float("nan"))
        log_metric("huge", 10 * MAX_METRIC)
        log_metric("tools/multiply/calls", 3.0)
        log_extra("one", ["only one"])
        for number in range(MAX_METRICS + 5):
            log_metric(f"m{number}", 1.0)
        for number in range(MAX_COLUMNS + 5):
            log_extra(f"c{number}", ["a", "b"])
        return [1.0, 0.0]

    (first, _), told = await scored(noting)
    assert set(first.metrics) == {f"m{number}" for number in range(MAX_METRICS)}
    assert "one" not in first.extra
    assert len(first.extra) == MAX_COLUMNS - 1  # "one" took a place
    assert [text for text in told if "log_metric('nan', nan): give a finite number" in text]
    assert [text for text in told if "that name is Slipstream's own" in text]
    assert [text for text in told if "log_extra('one', ...) had 1 values for 2 completions" in text]
    assert len(told) < 10


@pytest.mark.parametrize("value", ["text", None, [1.0], 10**400], ids=["text", "None", "list", "huge"])
async def test_i9_a_metric_that_is_no_number_is_left_out_and_told(value):
    def noting(completions, log_metric, **kwargs):
        log_metric("hits", value)
        log_metric("fine", 1)
        return [1.0, 0.0]

    (first, _), (told,) = await scored(noting)
    assert first.metrics == {"fine": 1.0}
    assert told == f"noting: log_metric('hits', {repr(value)[:60]}): give a finite number below {MAX_METRIC:g}"


async def test_i9_a_lone_surrogate_and_a_long_text_are_made_to_fit():
    def noting(completions, log_metric, log_extra, **kwargs):
        log_metric("\ud800" + "n" * 1000, 1.0)
        log_extra("said", ["\ud800", "x" * 100_000])
        return [1.0, 0.0]

    (first, second), _ = await scored(noting)
    assert first.extra == {"said": "?"}
    assert len(second.extra["said"]) == TEXT_CHARACTERS
    assert list(first.metrics) == ["?" + "n" * (NAME_CHARACTERS - 1)]


async def test_only_what_was_noted_in_time_counts():
    late = threading.Event()
    noted = threading.Event()

    def noting(completions, log_metric, log_extra, **kwargs):
        def later():
            late.wait(10)
            log_metric("late", 1.0)
            log_extra("late", ["a", "b"])
            noted.set()

        threading.Thread(target=later).start()
        log_metric("early", 1.0)
        return [1.0, 0.0]

    rewards = RewardFunctions([noting])
    scores = await rewards.score(BATCH)
    late.set()
    assert await asyncio.to_thread(noted.wait, 10)
    assert scores[0].metrics == {"early": 1.0}
    assert scores[0].extra == {}


async def test_notes_of_a_try_that_failed_do_not_count():
    tries = []

    def noting(completions, log_metric, **kwargs):
        tries.append(1)
        log_metric("try", len(tries))
        if len(tries) == 1:
            raise OSError("hiccup")
        return [1.0, 0.0]

    async def at_once(seconds):
        pass

    (first, _), told = await scored(noting, attempts=2, sleep=at_once)
    assert first.metrics == {"try": 2.0}
    assert told == ["noting: OSError: hiccup"]


async def test_notes_and_the_learner_s_step_cross_a_whole_worker():
    def noting(completions, trainer_state, log_metric, log_extra, **kwargs):
        log_metric("step", trainer_state.global_step)
        log_extra("at", [f"version {trainer_state.version}"] * len(completions))
        return [1.0, 0.0]

    from tests.kit.stand_in_queue import StandInQueue, tickets_for

    (ticket,) = tickets_for(1, version=7)
    ticket.step = 3
    run = await roll(task(rewards=[noting]), fake(), queue=StandInQueue([ticket]))
    for rollout in run.rollouts:
        assert rollout.metrics["step"] == 3.0
        assert rollout.extra == {"at": "version 7"}
