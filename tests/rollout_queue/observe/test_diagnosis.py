"""What keeps a run from learning: which cause is named, in which order, and what is advised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.protocol import reasons
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.collapse import Row
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
    LearnerReport,
    LeaseAck,
    LeaseRequest,
    TicketRequest,
    WorkerReport,
)
from slipstream.protocol.messages import Notice as Told
from slipstream.protocol.rollouts import TOOLS_OFFERED
from slipstream.protocol.status import Cause, Notice, WorkerStatus
from slipstream.rollout_queue.observe.causes import diagnose
from slipstream.rollout_queue.observe.symptoms import HOLD_S, WINDOW_GROUPS, CauseTimes, Symptoms
from slipstream.rollout_queue.observe.windows import GroupOutcome, OutcomeWindow, ToolCounts
from tests.kit import config, group
from tests.kit.messages import group_of_roles, group_of_turns
from tests.kit.queue import serve_version, serving

RAISES = {"search": ToolCounts(calls=4, own_failures=4)}
SOMETIMES = {"search": ToolCounts(calls=4, own_failures=2)}
WORKS = {"search": ToolCounts(calls=4)}
WRONG = {"search": ToolCounts(calls=4, wrong_calls=4)}
ERROR = Notice(1, "tool", "tool search: KeyError: 'q' (task.py:12)", "w", 0.0)


def outcome(
    *rewards: float,
    finished: str = "stop",
    tools: dict[str, ToolCounts] | None = None,
    callers: int | None = None,
    offered: bool = False,
) -> GroupOutcome:
    mean = sum(rewards) / len(rewards)
    callers = (len(rewards) if tools else 0) if callers is None else callers
    return GroupOutcome(mean, len(set(rewards)) == 1, {finished: len(rewards)}, tools or {}, callers, offered)


def seen(
    *parts: tuple[int, GroupOutcome], failed: Sequence[str] = (), flat: int = 0, steps: Sequence[Row] = ()
) -> Symptoms:
    """Make symptoms of groups, the oldest first, of failed tickets, of steps without a gradient, and of other steps."""
    symptoms = Symptoms(groups_per_step=2)
    for count, of in parts:
        for _ in range(count):
            symptoms.group_came(of)
    for reason in failed:
        symptoms.ticket_failed(reason)
    for _ in range(flat):
        symptoms.stepped({"grad_norm": 0.0})
    for step in steps:
        symptoms.stepped(step)
    return symptoms


def worker(does: str, reason: str | None = None, seen_s_ago: float = 1.0) -> WorkerStatus:
    counts = ("w", "host", 1, 8, 0, 0, 0, 0, 0, 0, 0)
    return WorkerStatus(*counts, 0.0, None, seen_s_ago, does=does, reason=reason)  # type: ignore[arg-type]


# The quickstart's steps at a learning rate of 0.02, two cores and a real vLLM; 2026-11-28.
DESTROYED: list[Row] = [
    {"step": 1, "reward": 0.48, "entropy": 0.23, "kl": 0.0, "ess": 1.0, "learning_rate": 0.02},
    {"step": 2, "reward": 0.15, "entropy": 0.46, "kl": 7.2, "ess": 0.02, "sampler/kl_staleness_1": 7.9},
    {"step": 3, "reward": 0.02, "entropy": 0.14, "kl": 9.1, "ess": 0.12, "sampler/kl_staleness_1": 11.8},
]
FAIL, PASS, VARIES = outcome(0.0, 0.0), outcome(1.0, 1.0), outcome(0.0, 1.0)
REWARD = reasons.failed(reasons.REWARD)
REFUSED = worker("refused", "worker w would make wrong data: the tokenizer differs")


@pytest.mark.parametrize(
    ("symptoms", "notices", "workers", "settings", "expected"),
    [
        pytest.param(seen((40, VARIES)), [], [worker("generating")], {}, [], id="all is well"),
        pytest.param(seen((15, FAIL)), [], [], {}, [], id="too few groups to say so"),
        pytest.param(
            seen((16, FAIL)),
            *([], [], {}),
            [("rewards", "bad", ("16 groups in a row", "all are 0. Look at the reward first", "may be too hard"))],
            id="rewards before the task",
        ),
        pytest.param(seen((20, PASS)), [], [], {}, [("rewards", "bad", ("all are 1.", "too easy"))], id="too easy"),
        pytest.param(
            seen((20, outcome(0.5, 0.5))), [], [], {}, [("rewards", "bad", ("all are 0.5",))], id="a constant reward"
        ),
        pytest.param(
            seen((1, FAIL), (19, PASS)),
            *([], [], {}),
            [("rewards", "bad", ("nearly all are 1",))],
            id="one group by chance does not hide what the others show",
        ),
        pytest.param(
            seen((10, FAIL), (10, PASS)),
            *([], [], {"rollout": {"temperature": 0.1}}),
            [
                (
                    "rewards",
                    "bad",
                    ("groups differ, the episodes of one group do not", "raise rollout.temperature = 0.1"),
                )
            ],
            id="cold sampling",
        ),
        pytest.param(
            seen((85, outcome(0.0, 0.0, tools=RAISES))),
            *([ERROR], [], {}),
            [
                (
                    *("tool search", "bad"),
                    ("fails in 64 of its newest 64 calls (KeyError: 'q' (task.py:12))", "Meanwhile 85 groups in a row"),
                )
            ],
            id="a tool that raises in every call, before the rewards that follow from it",
        ),
        pytest.param(
            seen((85, outcome(0.0, 0.0, tools=RAISES)), (16, outcome(0.0, 0.0, tools=WORKS))),
            *([ERROR], [], {}),
            [("rewards", "bad", ("101 groups in a row", "the reward first"))],
            id="a tool that no longer raises is not named",
        ),
        pytest.param(
            seen((16, outcome(0.0, 1.0, tools=RAISES))),
            *([], [], {}),
            [("tool search", "bad", ("see the notices",))],
            id="a tool that raises while rewards differ",
        ),
        pytest.param(
            seen((16, outcome(0.0, 0.0, tools=SOMETIMES))),
            *([ERROR], [], {}),
            [("rewards", "bad", ("16 groups",)), ("tool search", "warn", ("fails in 32 of its newest 64 calls",))],
            id="a tool that fails now and then explains nothing",
        ),
        pytest.param(
            seen((16, outcome(0.0, 0.0, tools=WRONG))),
            *([], [], {}),
            [
                (
                    "tool calls",
                    "bad",
                    ("64 of the newest 64 tool calls", "64 of them call search", "Meanwhile 16 groups"),
                )
            ],
            id="calls that the policy gets wrong",
        ),
        pytest.param(
            seen((16, outcome(0.0, 1.0, tools={"unknown": ToolCounts(6, 0, 6), "search": ToolCounts(4)}))),
            *([], [], {}),
            [("tool calls", "warn", ("96 of the newest 160 tool calls", "96 of them name no tool"))],
            id="calls that name no tool",
        ),
        pytest.param(
            seen((16, outcome(0.0, 1.0, tools={"unknown": ToolCounts(3, 0, 3), "search": ToolCounts(4)}))),
            *([], [], {}, []),
            id="fewer calls that name no tool than others",
        ),
        pytest.param(
            seen((16, outcome(0.0, 0.0, finished="length"))),
            *([], [], {"rollout": {"max_turn_tokens": 64, "mask_truncated": True}}),
            [
                (
                    *("rollouts cut off", "bad"),
                    ("32 of the newest 32 rollouts", "max_turn_tokens = 64", "mask_truncated is on", "Meanwhile 16"),
                )
            ],
            id="rollouts that are cut off, before their rewards",
        ),
        pytest.param(
            seen((16, outcome(0.0, 0.0, finished="length", tools=WRONG)), steps=DESTROYED),
            *([], [], {"learner": {"learning_rate": 0.02}}),
            [
                (
                    *("learning rate", "bad"),
                    ("the update of step 1", "learner.learning_rate = 0.02, to 0.002 first", "Meanwhile 16 groups"),
                )
            ],
            id="the rate that destroyed the policy, before limits, calls and rewards",
        ),
        pytest.param(
            seen((16, outcome(0.0, 1.0)), steps=[*DESTROYED, {"step": 4, "reward": 0.6}]),
            *([], [], {}, []),
            id="a policy that is better than before the update that destroyed it",
        ),
        pytest.param(
            seen((40, outcome(0.0, 1.0, finished="length")), (1, outcome(0.0, 1.0, tools=SOMETIMES))),
            *([], [], {}),
            [("episodes without tools", "warn", ("2 of the newest 32 episodes call a tool",))],
            id="a policy that hardly calls its tools, before the limit at which it talks on",
        ),
        pytest.param(
            seen((1, outcome(0.0, 1.0, tools=SOMETIMES)), (40, FAIL)),
            *([], [], {}),
            [("episodes without tools", "bad", ("0 of the newest 32 episodes", "Meanwhile 40 groups in a row"))],
            id="a policy that has stopped to call its tools, before the task",
        ),
        pytest.param(
            seen((40, outcome(0.0, 0.0, offered=True))),
            *([], [], {}),
            [("episodes without tools", "bad", ("0 of the newest 32 episodes", "Meanwhile 40 groups in a row"))],
            id="a policy that never called its tools",
        ),
        pytest.param(
            seen((40, VARIES), (1, outcome(0.0, 1.0, tools=SOMETIMES))),
            *([], [], {}, []),
            id="few calls are no fault where rewards differ and no limit ends rollouts",
        ),
        pytest.param(
            seen((8, outcome(0.0, 1.0, finished="length")), (8, outcome(0.0, 1.0, finished="length", tools=WORKS))),
            *([], [], {}),
            [("rollouts cut off", "bad", ("rewarded as they stand",))],
            id="rollouts that are cut off although tools are called",
        ),
        pytest.param(
            seen((16, outcome(0.0, 0.0, finished="context")), flat=8),
            *([], [], {}),
            [("rollouts cut off", "bad", ("vllm.max_model_len", ", and the gradient of the newest 8 steps was 0"))],
            id="everything that follows from one cause is told with it",
        ),
        pytest.param(
            seen((16, FAIL), flat=8),
            *([], [], {"learner": {"zero_variance": "keep"}}),
            [("rewards", "bad", ("the gradient of the newest 8 steps was 0",))],
            id="no gradient, since rewards are equal and kept",
        ),
        pytest.param(seen((16, VARIES), flat=7), [], [], {}, [], id="a few steps without a gradient"),
        pytest.param(
            seen((16, VARIES), flat=8), [], [], {}, [("gradient", "bad", ("masked or clipped",))], id="no gradient"
        ),
        pytest.param(
            seen((4, VARIES), failed=[REWARD] * 12),
            *([Notice(1, "reward", "accuracy: ValueError (task.py:3)", "w", 0.0)], [], {}),
            [
                (
                    *("groups that fail: reward", "warn"),
                    ("12 of the newest 16 groups", "accuracy: ValueError (task.py:3). Fix it in the task"),
                )
            ],
            id="a reward that raises",
        ),
        pytest.param(
            seen(failed=[reasons.failed(reasons.SERVER)] * 16), [], [], {}, [], id="a server that went away is no cause"
        ),
        pytest.param(
            seen((16, FAIL)),
            *([], [REFUSED, worker("generating")], {}),
            [("rewards", "bad", ()), ("refused workers", "warn", ("a worker is refused: worker w would make wrong",))],
            id="one refused worker of two",
        ),
        pytest.param(
            seen(),
            *([], [REFUSED, REFUSED, worker("silent"), worker("left")], {}),
            [("refused workers", "bad", ("2 workers are refused, the newest", "the tokenizer differs"))],
            id="no worker but refused ones",
        ),
        pytest.param(
            seen(),
            *([], [worker("refused", "why", 601.0), worker("generating")], {}),
            [],
            id="a worker that was refused long ago, and others work",
        ),
    ],
)
def test_causes_are_joined_and_ranked(
    symptoms: Symptoms,
    notices: list[Notice],
    workers: list[WorkerStatus],
    settings: dict[str, Any],
    expected: list[tuple[str, str, tuple[str, ...]]],
) -> None:
    causes = diagnose(symptoms, notices, workers, config(**settings))
    assert [(cause.about, cause.severity) for cause in causes] == [(about, how) for about, how, _ in expected]
    for cause, (_, _, parts) in zip(causes, expected, strict=True):
        assert [part for part in parts if part not in cause.text] == []
        assert "zero_variance" not in cause.text


@pytest.mark.parametrize(
    ("turns", "turn", "episode", "remedy"),
    [
        (1, 24, 2048, "rollout.max_turn_tokens = 24"),
        (1, 64, 32, "rollout.max_episode_tokens = 32"),
        (1, 16, 16, "rollout.max_turn_tokens = 16 and rollout.max_episode_tokens = 16"),
        (2, 24, 48, "rollout.max_turn_tokens = 24 or rollout.max_episode_tokens = 48"),
    ],
)
def test_only_a_limit_that_may_have_ended_the_rollouts_is_named(
    turns: int, turn: int, episode: int, remedy: str
) -> None:
    limits = config(rollout={"max_turns": turns, "max_turn_tokens": turn, "max_episode_tokens": episode})
    (cause,) = diagnose(seen((16, outcome(0.0, 1.0, finished="length"))), [], [], limits)
    assert cause.text.endswith(f": raise {remedy}")


def test_an_update_after_which_no_group_is_worth_a_step_is_named() -> None:
    """SmolLM2-135M at a staleness of 0 and a learning rate of 0.3: no second step was ever made; 2026-11-28."""
    symptoms = seen((4, VARIES), (4, FAIL))
    symptoms.stepped({"step": 1, "reward": 0.18, "grad_norm": 2.9, "kl": 0.0, "ess": 1.0, "learning_rate": 0.3})
    for _ in range(16):
        symptoms.group_came(outcome(0.0, 0.0, finished="length"))
    (cause,) = diagnose(symptoms, [], [], config(learner={"learning_rate": 0.3}))
    assert (cause.about, cause.severity) == ("learning rate", "bad")
    assert cause.text.startswith("since the update of step 1, with a learning rate of 0.3, at a gradient norm of 2.9")
    assert "as 4 of the 8 before it had, and the reward went from 0.18 to 0" in cause.text
    assert "Lower learner.learning_rate = 0.3, to 0.03 first. Meanwhile 20 groups in a row" in cause.text


@pytest.mark.parametrize("since", [PASS, outcome(0.0, 0.0, tools=RAISES)], ids=["solved", "a tool that raises"])
def test_an_update_is_not_blamed_for(since: GroupOutcome) -> None:
    symptoms = seen((8, VARIES))
    symptoms.stepped({"step": 1, "reward": 0.5})
    for _ in range(16):
        symptoms.group_came(since)
    assert all(cause.about != "learning rate" for cause in diagnose(symptoms, [], [], config()))


def test_a_few_groups_with_variance_do_not_hide_the_others() -> None:
    symptoms = seen(*[(1, FAIL if number % 12 else VARIES) for number in range(WINDOW_GROUPS)])
    (cause,) = diagnose(symptoms, [], [], config())
    assert cause.text.startswith("366 of the last 400 groups")
    healthy = seen(*[(1, FAIL if number % 2 else VARIES) for number in range(WINDOW_GROUPS)])
    assert diagnose(healthy, [], [], config()) == []


def test_large_steps_have_four_steps_patience() -> None:
    symptoms = Symptoms(groups_per_step=20)
    for _ in range(79):
        symptoms.group_came(FAIL)
    assert diagnose(symptoms, [], [], config()) == []
    symptoms.group_came(FAIL)
    assert diagnose(symptoms, [], [], config()) != []


def test_i7_what_to_read_is_named_with_the_run_file_that_is_there(tmp_path: Path) -> None:
    """A script has none in its working directory: it is in the run's."""
    settings = config(run={"dir": tmp_path / "my runs"})
    settings.run_dir.mkdir(parents=True)
    assert "`slipstream rollouts run.toml`" in diagnose(seen((16, FAIL)), [], [], settings)[0].text
    settings.run_file.touch()
    assert f"`slipstream rollouts '{settings.run_file}'`" in diagnose(seen((16, FAIL)), [], [], settings)[0].text


def test_a_cause_holds_no_escape_sequence() -> None:
    hostile = {"\x1b[2Jx": ToolCounts(calls=9, own_failures=9)}
    (cause,) = diagnose(seen((1, outcome(0.0, 1.0, tools=hostile))), [], [], config())
    assert "\x1b" not in cause.about + cause.text


def test_each_cause_is_timed_from_when_it_was_first_seen() -> None:
    times, tool, rewards = CauseTimes(), Cause("tool search", "1 of 2", "bad"), Cause("rewards", "equal", "bad")
    assert [cause.since_s for cause in times.timed([tool], 10.0)] == [0.0]
    changed = msgspec.structs.replace(tool, text="2 of 2")
    assert [cause.since_s for cause in times.timed([changed, rewards], 15.0)] == [5.0, 0.0]
    assert [(cause.about, cause.since_s) for cause in times.timed([tool], 20.0)] == [
        ("tool search", 10.0),
        ("rewards", 5.0),
    ]


def test_a_cause_that_comes_and_goes_stays_and_is_counted() -> None:
    """A minute on, a minute off, ten times: it stays. After a time-out without it, it is over, and counted if it comes
    back."""
    times, cut = CauseTimes(), Cause("rollouts cut off", "half", "warn")
    for minute in range(20):
        assert [cause.times for cause in times.timed([cut] if minute % 2 == 0 else [], minute * 60.0)] == [1]
    assert times.timed([], 1140.0 + HOLD_S) == []
    (back,) = times.timed([cut], 1500.0)
    assert (back.times, back.since_s, back.first_s) == (2, 0.0, 1500.0)
    assert [cause.times for cause in times.timed([], 1500.0 + 1.9 * HOLD_S)] == [2]
    assert times.timed([], 1500.0 + 2 * HOLD_S) == []


def test_a_cause_that_another_explains_goes_at_once() -> None:
    times, rewards, tool = CauseTimes(), Cause("rewards", "equal", "bad"), Cause("tool search", "fails", "bad")
    times.timed([rewards], 0.0)
    assert [cause.about for cause in times.timed([tool], 1.0)] == ["tool search"]


def test_a_window_counts_the_newest_groups_alone_and_keeps_nothing_of_the_others() -> None:
    window = OutcomeWindow(2)
    for of in (outcome(0.0, 0.0, finished="length", tools=RAISES), VARIES, outcome(1.0, 1.0, tools=WRONG)):
        window.add(of)
    assert (len(window), window.equal, window.rewards, window.finished) == (2, 1, {1.0: 1}, {"stop": 4})
    assert window.tools == WRONG


def test_an_outcome_tells_the_tools_own_failures_from_wrong_calls() -> None:
    made = group(rewards=(0.0, 1.0))
    counts = {
        "calls": 5.0,
        "failures": 4.0,
        "failures/raised": 1.0,
        "failures/timeout": 2.0,
        "failures/bad_arguments": 1.0,
    }
    made.rollouts[0].metrics = {f"tools/a/b/{name}": value for name, value in counts.items()} | {"own": 3.0}
    made.rollouts[1].metrics = {"tools/a/b/calls": 1.0, "tools/a/b/failures": 0.0, TOOLS_OFFERED: 1.0}
    of = GroupOutcome.of(made)
    assert of.offered
    assert of.tools == {"a/b": ToolCounts(calls=6, own_failures=3, wrong_calls=1)}
    assert (of.reward, of.equal, of.finished) == (0.5, False, {"stop": 2})


@pytest.mark.parametrize(
    ("short", "right", "weights", "equal"),
    [
        ((0.0, 1.0), (1.0, 0.5), {"short": 1.0, "right": 2.0}, False),
        ((0.0, 1.0), (1.0, 1.0), {"short": 0.0, "right": 1.0}, True),
        ((0.5, None), (1.0, 1.0), {}, True),
    ],
)
def test_equal_sums_of_functions_that_differ_have_taught_gdpo_something(
    short: tuple[float, float | None], right: tuple[float, float], weights: dict[str, float], equal: bool
) -> None:
    made = group(rewards=(2.0, 2.0))
    made.reward_weights = weights
    for rollout, *values in zip(made.rollouts, short, right, strict=True):
        rollout.reward_components = dict(zip(("short", "right"), values, strict=True))
    assert GroupOutcome.of(made).equal
    assert GroupOutcome.of(made, apart=True).equal is equal


def test_roles_with_equal_rewards_each_have_taught_nothing() -> None:
    assert GroupOutcome.of(group_of_roles(("a", 0.0), ("b", 1.0), ("a", 0.0), ("b", 1.0))).equal
    assert not GroupOutcome.of(group_of_roles(("a", 0.0), ("b", 1.0), ("a", 0.0), ("b", 2.0))).equal


async def test_a_tool_that_raises_stays_the_cause_as_long_as_it_does() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        told = Told("tool", "tool search: KeyError: 'q' (task.py:12)")
        await client.heartbeat(WorkerReport("w", [], notices=[told]))
        for since_s in (0.0, 3600.0):
            for _ in range(24):
                (ticket,) = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets
                came = group(ticket, rewards=(0.0, 0.0))
                for rollout in came.rollouts:
                    rollout.metrics = {f"tools/search/{what}": 1.0 for what in ("calls", "failures", "failures/raised")}
                await client.submit(came)
                await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
                await client.ack("l", LeaseAck(1, dropped={ticket.id: reasons.ZERO_VARIANCE}))
            (cause,) = (await client.status()).diagnosis
            assert (cause.about, cause.severity, cause.since_s) == ("tool search", "bad", since_s)
            assert "KeyError: 'q' (task.py:12)" in cause.text
            queue.time.now += 3600.0
        await client.heartbeat(WorkerReport("w", []))
        await client.waiting(1, "groups")
        why = (await client.status()).stall.why or ""
        assert "48 of the 48 groups" in why
        assert "tool search fails in 32 of its newest 32 calls" in why
        assert "too hard" not in why


async def test_a_refused_worker_is_shown_as_refused_until_it_is_admitted() -> None:
    declared = Fingerprint("1", "ours", "c", {}, rows=9)
    other = msgspec.structs.replace(declared, tokenizer="theirs")
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False, fingerprint=declared))
        await client.heartbeat(WorkerReport("w", [], fingerprint=declared, episodes_done=3))
        with pytest.raises(QueueRefused):
            await client.heartbeat(WorkerReport("w", [], fingerprint=other, episodes_done=3))
        queue.time.now += 120.0
        status = await client.status()
        (shown,) = status.workers
        assert (shown.does, shown.episodes_done) == ("refused", 3)
        assert "the tokenizer differs" in (shown.reason or "")
        assert [(cause.about, cause.severity) for cause in status.diagnosis] == [("refused workers", "bad")]
        await client.heartbeat(WorkerReport("w", [], fingerprint=declared))
        status = await client.status()
        assert [(found.does, found.reason) for found in status.workers] == [("idle", None)]
        assert status.diagnosis == []


async def test_a_checkpoint_that_cannot_be_written_is_a_cause_until_one_is() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        (ticket,) = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets
        await client.submit(group(ticket))
        await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
        told = [Told("checkpoint", "the checkpoint step-000001 cannot be written: make room on that disk")]
        report = LearnerReport(1, 0.5, 1.0, 1.0, 6, 0.0, 0, notices=told)
        await client.ack("l", LeaseAck(1, [ticket.id], step=1, version=1, report=report))
        causes = (await client.status()).diagnosis
        assert [(cause.about, cause.text) for cause in causes] == [("checkpoints", told[0].text)]
        await client.checkpointed(1, 1)
        assert (await client.status()).diagnosis == []
        assert queue.broker.observations.symptoms.checkpoint_failure is None


def test_a_group_is_equal_only_where_its_turns_are_if_the_learner_credits_turns() -> None:
    alike, apart = group_of_turns([1.0, 0.0], [1.0, 0.0]), group_of_turns([1.0, 0.0], [0.0, 1.0])
    assert [GroupOutcome.of(made, discount=1.0).equal for made in (alike, apart)] == [True, False]
    assert GroupOutcome.of(apart).equal
