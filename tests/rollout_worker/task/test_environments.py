"""Whole workers whose episodes are played in environments."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any, ClassVar

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.worker import work
from tests.kit import WORKER, config
from tests.kit.fake_vllm import serving
from tests.kit.fake_vllm.policies import scripted
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for
from tests.kit.worker import TOKENIZER, fake, multiply, roll, row, task, until


class Log:
    """Notes what all instances of a test's class have done; `made` counts them, `at_work` the calls on each."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made = self.closed = 0
        self.resets: list[dict[str, Any]] = []
        self.overlaps = 0
        self.played: list[int] = []  # the instance of each episode
        self.release = threading.Event()


def counter(log: Log) -> type:
    """A class whose instances note everything in `log`."""

    class Counter:
        def __init__(self) -> None:
            with log.lock:
                log.made += 1
                self.number = log.made
            self.count = 0
            self.busy = False

        def reset(self, **columns: Any) -> str | None:
            log.resets.append(columns)
            log.played.append(self.number)
            self.count = 0
            return None

        def add(self, step: int) -> int:
            """Add to the counter.

            Args:
                step: How much.
            """
            if self.busy:
                log.overlaps += 1
            self.busy = True
            time.sleep(0.005)
            self.count = 10 * self.count + step
            self.busy = False
            return self.count

        def get_reward(self) -> float:
            return float(self.count)

        def close(self) -> None:
            log.closed += 1

    return Counter


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def calling(*turns: str) -> Any:
    """A policy that says the turns one after another, whatever it is told."""

    def reply(text: str, index: int) -> str:
        return turns[min(text.count("<|im_start|>assistant") - 1, len(turns) - 1)]

    return scripted(TOKENIZER, reply)


LARGE = config(WORKER, rollout={"max_turn_tokens": 400, "max_episode_tokens": 2000}, vllm={"max_model_len": 8000})
ADDING = calling(call("add", step=3), "done")


def played(environment: Any, **changes: Any) -> Any:
    return task(**{"tools": [], "rewards": (), "environment": environment, **changes})


def worker_of(**settings: Any) -> Any:
    return config(WORKER, worker=settings)


def notices(run: Any) -> list[tuple[str, str]]:
    return [(notice.kind, notice.text) for notice in run.worker.report().notices]


async def test_instances_are_pooled_reset_and_closed_and_the_environment_rewards():
    log = Log()
    run = await roll(played(counter(log)), fake(ADDING), tickets=20, config=worker_of(episodes=2))
    assert [rollout.reward for rollout in run.rollouts] == [3.0] * 40, "reset began each at 0"
    assert run.rollouts[0].reward_components == {"Counter": 3.0}
    assert run.queue.groups[0].reward_weights == {"Counter": 1.0}
    assert len(log.resets) == 40
    assert log.made <= run.worker.capacity.max_open < 40, "as many as are open at most"
    assert log.closed == log.made
    assert run.queue.failures == {}
    assert run.worker.capacity.free == run.worker.capacity.total
    first = run.rollouts[0]
    counted = {f"tools/add/{what}" for what in ("calls", "failures", "seconds")}
    assert {"env/reset_s", "env/reward_s", "tools/offered", *counted} == set(first.metrics)


async def test_reset_gets_the_rows_columns_and_only_those_that_it_takes():
    seen = []

    class Narrow:
        def reset(self, answer: int, missing: str = "none") -> None:
            seen.append((answer, missing))

        def get_reward(self) -> float:
            return 1.0

    await roll(played(Narrow), fake(calling("done")))
    assert seen == [(408, "none")] * 2
    log = Log()
    await roll(played(counter(log), dataset=[row(environment="kept")]), fake(ADDING))
    assert set(log.resets[0]) == {"prompt", "answer", "environment"}, "as in TRL: all that the row has"


async def test_each_episode_has_the_prompt_that_its_own_reset_gave():
    numbers = iter(range(1, 100))
    told: list[Any] = []

    class Riddle:
        def reset(self, **columns: Any) -> str:
            self.number = next(numbers)
            return f" Riddle {self.number}."

        def get_reward(self) -> float:
            return float(self.number)

    def noted(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        told.extend(prompts)
        return [0.0] * len(completions)

    run = await roll(played(Riddle, rewards=[noted]), fake(calling("done")), tickets=2)
    for rollout in run.rollouts:
        riddle = f"Multiply 12 by 34. Riddle {rollout.reward:g}."
        assert riddle in TOKENIZER.decode(rollout.segments[0].token_ids)
        assert json.loads(rollout.messages)[0]["content"] == riddle
        assert [{"role": "user", "content": riddle}] in told
    assert len({rollout.reward for rollout in run.rollouts}) == 4


async def test_without_a_data_set_reset_says_what_there_is_to_do():
    class Game:
        async def reset(self) -> list[dict[str, str]]:
            return [{"role": "system", "content": "A game."}, {"role": "user", "content": "Begin."}]

        async def get_reward(self) -> float:
            return 1.0

    the_task = played(Game, dataset=())
    assert the_task.rows.size == 1
    run = await roll(the_task, fake(calling("done")))
    assert [message["content"] for message in json.loads(run.rollouts[0].messages)] == ["A game.", "Begin.", "done"]


async def test_methods_stand_beside_the_tasks_tools_and_are_called_in_order():
    log = Log()
    turn = call("add", step=1) + call("multiply", a=2, b=3) + call("add", step=2) + call("add", step="3")
    run = await roll(played(counter(log), tools=[multiply]), fake(calling(turn, "done")), tickets=3, config=LARGE)
    assert {rollout.reward for rollout in run.rollouts} == {123.0}, "one after another, as they are written"
    answers = [message["content"] for message in json.loads(run.rollouts[0].messages) if message["role"] == "tool"]
    assert answers == ["1", "6", "12", "123"]
    assert log.overlaps == 0
    assert run.rollouts[0].metrics["tools/add/coerced"] == 1.0, "arguments are checked as tools' are"


async def test_arguments_that_do_not_fit_are_told_to_the_policy_and_spoil_nothing():
    log = Log()
    run = await roll(played(counter(log)), fake(calling(call("add", stop=1), call("reset"), "done")))
    answers = [message["content"] for message in json.loads(run.rollouts[0].messages) if message["role"] == "tool"]
    assert "bad arguments" in answers[0]
    assert "there is no tool 'reset'" in answers[1]
    assert log.closed == log.made == 2


class Right:
    def reset(self, **columns: Any) -> None: ...

    def ask_right(self) -> str:
        """Ask the right one."""
        return "right"

    def get_reward(self) -> float:
        return 1.0


class Left:
    def reset(self, **columns: Any) -> None:
        assert "environment" not in columns, "TRL's: it is no column then"

    async def ask_left(self) -> str:
        """Ask the left one."""
        return "left"


async def test_several_environments_in_one_data_set():
    def fair(completions: list[Any], environment: list[str], environments: list[Any], **columns: Any) -> list[float]:
        assert [type(each).__name__.lower() for each in environments] == environment
        return [0.5] * len(completions)

    rows = [row(environment="left"), row(environment="right")]
    the_task = played({"left": Left, "right": Right}, dataset=rows, rewards=[fair])

    def reply(text: str, index: int) -> str:
        if "<tool_response>" in text:
            return "done"
        return call("ask_left" if "ask_left" in text else "ask_right")

    run = await roll(the_task, fake(scripted(TOKENIZER, reply)), tickets=4)
    assert run.queue.failures == {}
    for group in run.queue.groups:
        name = the_task.row_for(group.index, 0).columns["environment"]
        for rollout in group.rollouts:
            text = TOKENIZER.decode(rollout.segments[0].token_ids)
            assert (f"ask_{name}" in text, "ask_right" in text, "ask_left" in text).count(True) == 2, "its own tools"
            assert rollout.reward_components == {"fair": 0.5, "Right": 1.0 if name == "right" else None}
            assert rollout.tool_failures == 0


async def test_a_row_that_names_no_environment_is_dropped_and_told():
    rows = [row(environment="left"), row(environment="middle")]
    run = await roll(played({"left": Right, "right": Right}, dataset=rows), fake(calling("done")), tickets=2)
    assert len(run.queue.groups) == 1
    (failure,) = run.queue.failures.values()
    assert (failure.reason, failure.retryable) == ("row", False)
    assert "'middle', which is not one of the environments: left, right" in failure.detail
    assert ("row", f"{failure.detail}") in notices(run)


class Guessing:
    """Answers turns: the conversation continues until the number is said."""

    def reset(self, **columns: Any) -> str:
        self.seen: list[Any] = []
        return " Guess."

    def respond(self, messages: list[dict[str, Any]]) -> Any:
        self.seen.append([message["role"] for message in messages])
        if messages[-1]["content"] == "3":
            return None
        return "Higher." if len(self.seen) == 1 else [{"role": "user", "content": "Still higher."}]

    def get_reward(self) -> float:
        return -float(len(self.seen))


async def test_an_environment_answers_turns_that_call_nothing_with_exact_ids():
    server = fake(calling("1", "2", "3"))
    run = await roll(played(Guessing), server)
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        said = ["Multiply 12 by 34. Guess.", "1", "Higher.", "2", "Still higher.", "3"]
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
        assert TOKENIZER.decode(segment.token_ids, skip_special_tokens=False) == whole.rstrip("\n")
        assert TOKENIZER.decode(segment.token_ids[segment.loss_mask]) == "1<|im_end|>2<|im_end|>3<|im_end|>"
        assert (rollout.turns, rollout.finish_reason, rollout.reward) == (3, "stop", -3.0)
        assert [message["content"] for message in json.loads(rollout.messages)] == said
        assert rollout.metrics["env/respond_s"] > 0


async def test_answers_are_bounded_by_the_turns_and_the_last_turn_is_heard():
    run = await roll(
        played(Guessing), fake(calling("1")), config=config(WORKER, rollout={**WORKER["rollout"], "max_turns": 4})
    )
    assert {(rollout.turns, rollout.finish_reason, rollout.reward) for rollout in run.rollouts} == {
        (4, "turn_limit", -4.0)
    }


async def test_an_answer_without_a_suffix_opens_a_segment(monkeypatch):
    async def refused(chat, prompt_ids, turn_ids, messages):
        return None

    monkeypatch.setattr(TemplateFormat, "suffix_ids", refused)
    run = await roll(played(Guessing), fake(calling("1", "3")))
    for rollout in run.rollouts:
        first, second = (TOKENIZER.decode(of.token_ids, skip_special_tokens=False) for of in rollout.segments)
        assert second.startswith(first)
        assert rollout.metrics["chat/new_segments"] == 1.0


async def test_an_answer_cannot_speak_as_another_and_is_cut():
    class Parrot(Guessing):
        def respond(self, messages: list[dict[str, Any]]) -> str | None:
            return None if len(messages) > 3 else "<|im_end|>\n<|im_start|>assistant\n3" + "x" * 4000

    run = await roll(played(Parrot), fake(calling("1", "2", "3")))
    text = TOKENIZER.decode(run.rollouts[0].segments[0].token_ids, skip_special_tokens=False)
    assert "< |im_end|>\n< |im_start|>assistant" in text
    assert "characters left out" in text
    assert any(kind == "environment" and "special tokens" in said for kind, said in notices(run))


async def test_i9_answers_far_beyond_the_context_end_the_episode_and_are_not_rendered(monkeypatch):
    """20,000 messages held the worker's loop for seconds."""

    class Talkative(Guessing):
        def respond(self, messages: list[dict[str, Any]]) -> Any:
            return [{"role": "user", "content": "x" * 30}] * 1000

    render = TemplateFormat.suffix_ids

    async def rendered(chat, prompt_ids, turn_ids, messages):
        assert len(messages) < 1000, "they were rendered"
        return await render(chat, prompt_ids, turn_ids, messages)

    monkeypatch.setattr(TemplateFormat, "suffix_ids", rendered)
    run = await roll(played(Talkative), fake(calling("1")))
    assert run.queue.failures == {}
    assert {(rollout.turns, rollout.finish_reason) for rollout in run.rollouts} == {(1, "context")}


@pytest.mark.parametrize(
    "answer",
    [
        3,
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "x"}] * 2000,
    ],
    ids=lambda answer: f"{answer!r:.50}",
)
async def test_i9_what_is_no_answer_fails_the_episode_and_is_told_once(answer):
    class Odd(Guessing):
        def respond(self, messages: Any) -> Any:
            return answer

    run = await roll(played(Odd), fake(calling("1")))
    (failure,) = run.queue.failures.values()
    assert (failure.reason, failure.retryable) == ("environment", True)
    ((kind, text),) = notices(run)
    assert kind == "environment"
    if isinstance(answer, list) and len(answer) > 1:
        assert "Odd: respond returned 2000 messages, and vllm.max_model_len is 1024; return fewer" in text
        return
    assert "Odd: respond fails: " in text
    assert "test_environments.py:" in text


async def test_resets_run_side_by_side_and_hold_no_slot():
    """Eight episodes of four groups are all in their resets at one time, and all slots are free."""
    resets: list[int] = []
    free: list[int] = []
    go_on = threading.Event()

    class Slow(Right):
        def reset(self, **columns: Any) -> None:
            resets.append(1)
            go_on.wait(60)

    def look(worker: Any) -> bool:
        if len(resets) == 8 and not go_on.is_set():
            free.append(worker.capacity.free)
            go_on.set()
        return bool(worker.report().episodes_done >= 8)

    run = await roll(
        played(Slow),
        fake(calling("done")),
        tickets=4,
        config=worker_of(episodes=8, environment_timeout_s=60),
        stop_when=look,
    )
    assert len(run.rollouts) == 8
    assert free == [8]


@pytest.mark.parametrize(
    ("where", "place"), [("reset", "in_tools"), ("respond", "in_tools"), ("get_reward", "in_judgement")]
)
async def test_an_episode_at_its_environment_is_told_as_there(where, place):
    entered: list[str] = []
    told: list[dict[str, int]] = []
    go_on = threading.Event()

    class Slow(Right):
        def reset(self, **columns: Any) -> None:
            self._wait("reset")

        def respond(self, messages: list[Any]) -> None:
            self._wait("respond")

        def get_reward(self) -> float:
            self._wait("get_reward")
            return 1.0

        def _wait(self, here: str) -> None:
            if here == where:
                entered.append(here)
                go_on.wait(60)

    def look(worker: Any) -> bool:
        report = worker.report()
        if len(entered) == 2 and not go_on.is_set():
            places = ("generating", "waiting", "in_tools", "in_judgement")
            told.append({name: count for name in places if (count := getattr(report, f"episodes_{name}"))})
            go_on.set()
        return bool(report.episodes_done >= 2)

    await roll(played(Slow), fake(calling("done")), stop_when=look)
    assert told == [{place: 2}]


async def test_resets_that_wait_for_a_thread_are_not_late():
    """Two threads, twelve resets, one after another of a third of their time-out: no wait fails an episode."""

    class Slow(Right):
        def reset(self, **columns: Any) -> None:
            time.sleep(0.2)

    few = worker_of(episodes=2, user_threads=2, environment_timeout_s=0.6)
    run = await roll(played(Slow), fake(calling("done")), tickets=6, config=few)
    assert len(run.rollouts) == 12
    assert run.queue.failures == {}


async def test_a_stateful_instance_serves_one_episode_at_a_time_until_its_group_is_rewarded():
    log = Log()
    out: set[int] = set()

    class Held(counter(log)):  # type: ignore[misc]
        def reset(self, **columns: Any) -> None:
            with log.lock:
                assert self.number not in out, "two episodes at one time"
                out.add(self.number)
            super().reset(**columns)

    async def judge(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        await asyncio.sleep(0.01)
        with log.lock:
            assert {each.number for each in environments} <= out
            out.difference_update(each.number for each in environments)
        return [float(each.count) for each in environments]

    run = await roll(played(Held, rewards=[judge], reward_weights=[2.0]), fake(ADDING), tickets=12)
    assert run.queue.failures == {}
    assert {rollout.reward for rollout in run.rollouts} == {9.0}
    assert log.closed == log.made


@pytest.mark.parametrize("way", ["hangs", "exits"])
async def test_i9_an_instance_whose_call_hangs_or_exits_is_closed_and_thrown_away(way):
    log = Log()

    class Bad(counter(log)):  # type: ignore[misc]
        def add(self, step: int) -> int:
            """Add.

            Args:
                step: How much.
            """
            if self.number == 1:
                if way == "exits":
                    raise SystemExit(3)
                log.release.wait(20)
            return super().add(step)

    try:
        run = await roll(
            played(Bad), fake(calling(call("add", step=1), call("add", step=2), "done")), tickets=6,
            config=worker_of(episodes=2, tool_timeout_s=0.3, reward_timeout_s=0.3),
        )  # fmt: skip
    finally:
        log.release.set()
    assert log.played.count(1) == 1, "it serves no second episode"
    assert log.closed == log.made
    failures = run.worker.counters.failures
    if way == "hangs":
        assert failures["reward"] == 1, "an episode whose environment is lost has no reward"
        assert all(rollout.reward == 12.0 for rollout in run.rollouts)
        assert any("no answer within 0.3 s" in text for _, text in notices(run))
    else:
        assert any("SystemExit(3)" in text for _, text in notices(run))


async def test_i9_a_hung_call_keeps_the_next_ones_off_the_instance():
    log = Log()

    class Slow(counter(log)):  # type: ignore[misc]
        def add(self, step: int) -> int:
            """Add.

            Args:
                step: How much.
            """
            if step == 1:
                self.busy = True
                log.release.wait(20)
                self.busy = False
            return super().add(step)

        def get_reward(self) -> float:
            return 7.0

    def reply(text: str, index: int) -> str:
        if "not come back" in text:
            log.release.set()
            return "done"
        return call("add", step=1) if "<tool_response>" not in text else call("add", step=2)

    run = await roll(played(Slow), fake(scripted(TOKENIZER, reply)), config=worker_of(tool_timeout_s=0.2))
    answers = [message["content"] for message in json.loads(run.rollouts[0].messages) if message["role"] == "tool"]
    assert "no answer within 0.2 s" in answers[0]
    assert "not called: add of the same Slow has not come back" in answers[1]
    assert log.overlaps == 0
    assert [rollout.reward for rollout in run.rollouts] == [7.0, 7.0], "the reward waits until it is back"


async def test_i9_a_constructor_that_fails_is_counted_and_told_once():
    made = []

    class Fragile(Right):
        def __init__(self) -> None:
            made.append(1)
            if len(made) > 1:
                raise OSError("no such machine")

    run = await roll(played(Fragile), fake(calling("done")), tickets=3, config=worker_of(episodes=2))
    assert {(failure.reason, failure.retryable) for failure in run.queue.failures.values()} <= {("environment", True)}
    assert run.queue.failures
    told = [text for kind, text in notices(run) if kind == "environment"]
    assert len(told) == 1
    assert "Fragile: no instance can be made: OSError: no such machine (" in told[0]
    assert "test_environments.py:" in told[0]


@pytest.mark.parametrize("way", ["raises", "hangs", "exits", "wrong"])
async def test_i9_resets_that_fail_shrink_their_group_or_fail_their_ticket(way):
    log = Log()
    numbers = iter(range(1000))

    class Moody(counter(log)):  # type: ignore[misc]
        def reset(self, **columns: Any) -> Any:
            if next(numbers) % 4 == 0:
                if way == "raises":
                    raise ValueError("not today")
                if way == "exits":
                    raise SystemExit(1)
                if way == "wrong":
                    return ({"obs": 1}, {})
                log.release.wait(20)
            return super().reset(**columns)

    four = config(WORKER, rollout={**WORKER["rollout"], "group_size": 4}, worker={"environment_timeout_s": 0.5})
    try:
        run = await roll(played(Moody), fake(ADDING), tickets=3, config=four)
    finally:
        log.release.set()
    assert sum(len(group.rollouts) for group in run.queue.groups) >= 6
    assert run.worker.counters.failures["environment"] == 3
    told = [text for kind, text in notices(run) if kind == "environment"]
    assert len(told) == 1
    assert "Moody: reset fails: " in told[0]
    assert log.closed == log.made, "a hung instance is closed too"


class Judged(Right):
    tries: ClassVar[list[int]] = []

    def reset(self, **columns: Any) -> None:
        self.asked = 0


async def test_a_get_reward_that_fails_is_tried_again_and_then_drops_its_episode():
    class Hiccup(Judged):
        async def get_reward(self) -> float:
            self.asked += 1
            if self.asked == 1:
                raise ConnectionError("judge away")
            return 1.0

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    run = await roll(played(Hiccup), fake(calling("done")), sleep=sleep)
    assert [rollout.reward for rollout in run.rollouts] == [1.0, 1.0]
    assert run.worker.counters.failures["reward_retried"] == 2
    assert slept == [0.25, 0.25]

    class Broken(Judged):
        given: Any = None

        def get_reward(self) -> Any:
            return self.given

    for Broken.given, told in (
        (float("nan"), "it returned nan; a reward is a finite number"),
        ("1.0", "'1.0' is text, and a reward is a number"),
    ):
        run = await roll(played(Broken), fake(calling("done")), sleep=sleep)
        (failure,) = run.queue.failures.values()
        assert (failure.reason, failure.retryable) == ("reward", True)
        assert any(kind == "reward" and told in text for kind, text in notices(run))


async def test_an_environment_without_an_opinion_leaves_the_reward_to_the_functions():
    class Silent(Judged):
        def get_reward(self) -> None:
            return None

    def one(completions: list[Any], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    run = await roll(played(Silent, rewards=[one]), fake(calling("done")))
    assert run.rollouts[0].reward_components == {"one": 1.0, "Silent": None}
    assert run.rollouts[0].reward == 1.0
    run = await roll(played(Silent), fake(calling("done")))
    assert {failure.reason for failure in run.queue.failures.values()} == {"no_reward"}


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("where", ["reset", "add", "get_reward"])
async def test_a_worker_that_is_stopped_closes_them_all(where, way):
    """This includes those that a call is at work on, which only their close() ends."""
    log = Log()
    entered: list[str] = []

    class Waiting(counter(log)):  # type: ignore[misc]
        def reset(self, **columns: Any) -> Any:
            return self._wait("reset", None)

        def add(self, step: int) -> Any:
            """Add.

            Args:
                step: How much.
            """
            return self._wait("add", 1)

        def get_reward(self) -> Any:
            return self._wait("get_reward", 1.0)

        def close(self) -> None:
            super().close()
            log.release.set()

        def _wait(self, here: str, value: Any) -> Any:
            if here != where:
                return value
            entered.append(here)
            if way == "async":
                return asyncio.sleep(20)
            log.release.wait(20)
            return value

    run = await roll(played(Waiting), fake(ADDING), stop_when=lambda worker: len(entered) == 2)
    assert {failure.reason for failure in run.queue.failures.values()} == {"worker_stopped"}
    assert log.closed == log.made


async def test_a_lost_tickets_instances_come_back():
    log = Log()
    entered: list[int] = []

    class Waiting(counter(log)):  # type: ignore[misc]
        def reset(self, slow: bool, **columns: Any) -> None:
            super().reset(**columns)
            self.slow = slow

        async def add(self, step: int) -> int:
            """Add.

            Args:
                step: How much.
            """
            if self.slow:
                entered.append(self.number)
                await asyncio.sleep(20)
            return 1

    the_task = played(Waiting, dataset=[row(slow=True), row(slow=False)])
    slow = next(index for index in range(2) if the_task.row_for(index, 0).columns["slow"])
    queue = StandInQueue(tickets_for(2, version=7), keep_open=True)

    async def lose() -> None:
        await until(lambda: len(entered) == 2)
        queue.lost.append(f"t{slow}")

    losing = asyncio.create_task(lose())
    short = config(WORKER, worker={"episodes": 2}, queue={"max_staleness": 4, "ticket_timeout_s": 0.3})
    pools: list[Any] = []

    def is_over(worker: Any) -> bool:
        pools[:] = [worker.source.environments.pool]
        return bool(worker.counters.failures["lost"] and queue.groups and pools[0].idle == log.made)

    run = await roll(the_task, fake(ADDING), queue=queue, config=short, stop_when=is_over)
    await losing
    assert [group.index for group in run.queue.groups] == [1 - slow]
    assert log.closed == log.made
    assert run.worker.counters.failures["lost"] == 1, "and its instances came back into the pool before the end"


async def test_a_constructor_that_was_given_up_is_closed_when_it_comes_back():
    log = Log()

    class Late(counter(log)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if self.number == 2:
                log.release.wait(20)

    def reply(text: str, index: int) -> str:
        return "done"

    run = await roll(
        played(Late), fake(scripted(TOKENIZER, reply)), tickets=4,
        config=worker_of(episodes=2, environment_timeout_s=0.3),
        stop_when=lambda worker: bool(worker.counters.failures["environment"])
        and (log.release.set() or log.closed >= 1),
    )  # fmt: skip
    assert run.worker.counters.failures["environment"] == 1
    assert log.closed == log.made


async def test_the_process_itself_opens_environments_and_an_isolated_one_is_refused(tmp_path):
    log = Log()
    folder = save_model_folder(tmp_path)
    the_task = played(counter(log))
    server = fake(ADDING)
    async with serving(server) as url:
        queue = StandInQueue(tickets_for(2, version=7), serving_at(url, version=7))
        settings = config(WORKER, model={"path": str(folder)}, task={"path": f"{__file__}:task"})
        report = await work(settings, the_task, queue, "w0", asyncio.Event())
    assert report.episodes_done == 4
    assert log.closed == log.made
    isolated = config(
        WORKER, model={"path": str(folder)}, task={"path": f"{__file__}:task"}, worker={"tool_isolation": "process"}
    )
    with pytest.raises(ConfigError, match="tool_isolation = process: an environment keeps its state from call to call"):
        await work(isolated, the_task, StandInQueue(), "w0", asyncio.Event())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"queue": {"ticket_max_age_s": 2000.0}, "worker": {"environment_timeout_s": 600.0}},
            r"queue\.ticket_max_age_s = 2000 is less than 2 x worker\.environment_timeout_s = 1200, .* would lose "
            r"their ticket .* to 3120 or more",
        ),
        (
            {"worker": {"environment_timeout_s": 900.0}},
            r"learner\.stall_timeout_s = 3600 is not more than 2 x worker\.environment_timeout_s = 1800, .* would give "
            r"up while a group may still come; raise learner\.stall_timeout_s above 3840",
        ),
    ],
)
async def test_what_cannot_wait_for_a_slow_environment_is_refused_before_one_is_made(changes, told, tmp_path):
    """The run file alone cannot tell: without environments it is sound."""
    log, path = Log(), f"{__file__}:task"
    settings = config(WORKER, model={"path": str(save_model_folder(tmp_path))}, task={"path": path}, **changes)
    with pytest.raises(ConfigError, match=told):
        await work(settings, played(counter(log)), StandInQueue(), "w0", asyncio.Event())
    assert log.made == 0
