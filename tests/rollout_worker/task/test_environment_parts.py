"""Environments, part by part: what a class can do, what reset says, which tasks are refused, the proof of answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.format_check import check_answer_format
from slipstream.rollout_worker.data.columns import EMPTY_PROMPT
from slipstream.rollout_worker.task.environment_instance import answered, folded, interface_of, observed, tools_of
from slipstream.rollout_worker.task.environment_pool import Pool
from slipstream.rollout_worker.task.reward_base import RewardBatch
from slipstream.rollout_worker.task.rewards import RewardFunctions
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCode, UserCodeError
from tests.kit.renderer_cases import CASES as RENDERERS
from tests.kit.template_cases import CASES as TEMPLATES
from tests.kit.worker import chat_format, multiply, row, task, until

USER = {"role": "user", "content": "Ask."}


class Whole:
    """All that an environment may have."""

    answer = 3

    def reset(self, **columns: Any) -> None: ...

    def look(self) -> str:
        """Look around."""
        return "nothing"

    @staticmethod
    def ask() -> str:
        """Ask somebody."""
        return "nobody"

    @property
    def broken(self) -> int:
        raise AssertionError("a property is not read")

    @classmethod
    def build(cls) -> Whole:
        return cls()

    def _inner(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0

    def respond(self, messages: list[Any]) -> None: ...

    def close(self) -> None: ...


def test_the_methods_that_are_tools_are_trls():
    interface = interface_of(Whole())
    assert interface.tools == ("ask", "look")
    assert (interface.cls, interface.rewards, interface.responds) == ("Whole", True, True)
    assert [tool.schema["function"]["description"] for tool in tools_of(interface, Whole())] == [
        "Ask somebody.",
        "Look around.",
    ]


def test_a_method_that_cannot_be_described_says_what_to_do():
    class Untold:
        def reset(self) -> None: ...

        def helper(self, x): ...

    with pytest.raises(
        ConfigError, match=r"class Untold: the tool 'helper' cannot be described.*begin the name of one"
    ):
        tools_of(interface_of(Untold()), Untold())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, None),
        ("text", "text"),
        ([], None),
        ((), None),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ({"role": "user", "content": "x"}, [{"role": "user", "content": "x"}]),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user", "content": "x"}]),
    ],
)
def test_what_reset_may_say(said, found):
    assert observed(said) == found


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (7, "it returned a int; return None, text, or a list of messages"),
        (({"obs": 1}, {}), "part of type None"),
        ([{"type": "image", "image": 1}], "part of type 'image', and the policy reads text alone"),
        ([{"role": "user", "content": object()}], "is a object; messages hold text"),
        (iter("abc"), "it returned a str_"),
    ],
)
def test_what_it_may_not_say(said, message):
    with pytest.raises((TypeError, ValueError), match=message):
        observed(said)


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("prompt", "observation", "found"),
    [
        ([USER], None, [USER]),
        ([USER], " Now.", [says("user", "Ask. Now.")]),
        ([says("system", "S"), USER], "!", [says("system", "S"), says("user", "Ask.!")]),
        ([says("system", "S")], "Go", [says("system", "S"), says("user", "Go")]),
        ([USER, says("assistant", "So")], "!", [says("user", "Ask.!"), says("assistant", "So")]),
        ([says("user", [part("A")])], "B", [says("user", [part("A"), part("B")])]),
        ([USER], [says("user", "B")], [USER, says("user", "B")]),
        (EMPTY_PROMPT, [says("user", "B")], [says("user", "B")]),
        (EMPTY_PROMPT, "B", [says("user", "B")]),
    ],
)
def test_an_observation_is_folded_into_the_prompt_as_trl_folds_it(prompt, observation, found):
    before = [dict(message) for message in prompt]
    assert folded(prompt, observation) == found
    assert prompt == before, "the row's prompt is another episode's too"


def test_an_answer_has_the_users_role_alone():
    assert answered("continue") == [{"role": "user", "content": "continue"}]
    assert answered(None) is None
    with pytest.raises(ValueError, match="role 'tool'"):
        answered([{"role": "tool", "content": "x"}])


class Bare:
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": 3}, "environment=3.*give a class, or a function"),
        ({"environment": {}}, "give a class, or a function"),
        ({"environment": Bare()}, "give a class"),
        (
            {"environment": {"a": Bare()}},
            r"Task\(environment=\{'a': ...\}\) is a Bare, which every episode would share",
        ),
        ({"environment": {1: Bare}}, "name each environment by a text"),
        ({"environment": {"a": Bare}}, "no column 'environment', which names its environment, one of: a"),
        ({"environment": {"a": Bare}, "dataset": [row(environment="b")]}, "'environment' is 'b', which is not one of"),
        ({"environment": {"a": Bare}, "dataset": ()}, "give a dataset with a column 'environment'"),
        ({"environment": Bare, "rewards": []}, r"nothing gives a reward: write a method get_reward\(self\) of Bare"),
        ({"environment": Bare, "dataset": [{"prompt": "text"}], "tools": []}, "an environment needs a conversation"),
        ({"environment": Bare, "dataset": [row(environments=1)]}, "'environments' is a name that reward functions"),
        ({"environment": Bare, "environment_factory": Bare}, "two names of the same"),
    ],
)
def test_a_task_that_cannot_work_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        task(**changes)


def test_a_reward_may_ask_for_the_environments_of_a_task_that_has_some():
    def judge(environments, **columns):
        return [0.0] * len(environments)

    task(environment=Bare, rewards=[judge])
    with pytest.raises(ConfigError, match="takes 'environments', which is not a column"):
        task(rewards=[judge])


async def test_rewards_of_ones_own_are_weighted_one_beside_the_functions():
    def half(completions, **columns):
        return [0.5] * len(completions)

    functions = RewardFunctions([half], [4.0], own=["Game"])
    batch = RewardBatch([USER], ["a", "b", "c"], [[1]] * 3, {}, own=[{"Game": 1.0}, {"Game": None}, {}])
    scores = await functions.score(batch)
    assert [score.reward for score in scores] == [3.0, 2.0, 2.0]
    assert scores[1].components == {"half": 0.5, "Game": None}
    assert functions.weights == {"half": 4.0, "Game": 1.0}


async def test_the_pool_closes_idle_ones_of_other_names_for_new_ones():
    closed = []
    may_close = threading.Event()

    def close(name: str) -> None:
        may_close.wait(4.0)
        closed.append(name)

    def kind(name: str) -> type:
        return type(name, (Bare,), {"close": lambda self: close(name)})

    async with UserCode() as code:
        pool = Pool({"a": kind("a"), "b": kind("b")}, code, 5.0, max_alive=2)
        first, second = await pool.take("a"), await pool.take("a")
        pool.give_back(first)
        pool.give_back(second)
        again = await pool.take("a")
        assert again in (first, second)
        other = await pool.take("b")
        assert (pool.alive, pool.idle) == (3, 0), "one of them is being closed"
        may_close.set()
        pool.give_back(again)
        pool.give_back(other)
        await pool.close()
        assert pool.alive == 0
    assert sorted(closed) == ["a", "a", "b"]


async def test_i9_an_instance_without_close_is_let_go_of_where_user_code_runs():
    """A destructor is user code too."""
    ended: list[str] = []

    class Dying(Bare):
        def __del__(self) -> None:
            ended.append(threading.current_thread().name)

    async with UserCode() as code:
        pool = Pool({None: Dying}, code, 5.0)
        instance = await pool.take(None)
        await instance.call("reset", bool, 5.0)
        pool.give_back(instance)
        await pool.close()
    assert ended == ["user code"]


async def test_i9_a_close_that_fails_is_told_and_ends_nothing():
    told = []

    class Stubborn(Bare):
        def close(self) -> None:
            raise SystemExit("no")

    async with UserCode() as code:
        pool = Pool({None: Stubborn}, code, 5.0, notify=lambda key, text, where: told.append((text, where)))
        pool.give_back(await pool.take(None))
        await pool.close()
        assert pool.alive == 0
    ((text, where),) = told
    assert "Stubborn.close failed: SystemExit(no)" in text
    assert where is not None


class Gate:
    """A factory's work: `begun` once it is at it; it continues when `opened` is set."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.made: list[Any] = []
        self.closed: list[Any] = []

    def environment(self) -> Any:
        gate = self

        class Slow(Bare):
            def __init__(self) -> None:
                gate.made.append(self)

            def close(self) -> None:
                gate.closed.append(self)

        return Slow()

    def in_a_thread(self) -> Any:
        self.begun.set()
        self.opened.wait(30)
        return self.environment()

    async def on_a_loop(self) -> Any:
        """It ends in its own time, and not when it is cancelled."""
        self.begun.set()
        while not self.opened.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return self.environment()

    def later(self) -> Any:
        return self.on_a_loop()


@pytest.mark.parametrize("how", ["in_a_thread", "on_a_loop", "later"])
@pytest.mark.parametrize("timeout_s", [5.0, 0.5])
async def test_i9_what_is_still_being_made_when_the_pool_closes_is_waited_for_and_closed(how, timeout_s):
    """Its episode was cancelled, or its time-out is over."""
    gate = Gate()
    async with UserCode() as code:
        pool = Pool({None: getattr(gate, how)}, code, timeout_s)
        taking = asyncio.create_task(pool.take(None))
        await until(gate.begun.is_set)
        if timeout_s == 5.0:
            taking.cancel()
        with pytest.raises((asyncio.CancelledError, UserCodeError)):
            await taking
        closing = asyncio.create_task(pool.close())
        for _ in range(100):
            await asyncio.sleep(0)
        gate.opened.set()
        await closing
        assert pool.alive == 0
    assert len(gate.made) == 1
    assert gate.closed == gate.made


async def test_the_pool_waits_for_what_is_being_made_for_a_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr("slipstream.rollout_worker.task.environment_pool.CLOSE_S", 0.01)
    gate = Gate()
    async with UserCode() as code:
        pool = Pool({None: gate.in_a_thread}, code, 0.5)
        with pytest.raises(UserCodeError):
            await pool.take(None)
        await pool.close()
        assert "1 environments were still being made after 0.01 s" in caplog.text
        gate.opened.set()


async def test_what_was_made_too_late_and_fails_to_close_is_told_with_its_factory():
    told = []

    class Stubborn(Bare):
        def close(self) -> None:
            raise SystemExit("no")

    gate = Gate()
    gate.environment = Stubborn  # type: ignore[method-assign]
    async with UserCode() as code:
        pool = Pool(
            {None: partial(gate.in_a_thread)}, code, 0.5, notify=lambda key, text, where: told.append((text, where))
        )
        with pytest.raises(UserCodeError):
            await pool.take(None)
        gate.opened.set()
        await pool.close()
    ((text, where),) = told
    assert "Gate.in_a_thread.close failed: SystemExit(no)" in text
    assert where.startswith(__file__)


async def test_a_factory_that_gives_something_else_is_told():
    made = iter([Bare(), Whole()])
    async with UserCode() as code:
        pool = Pool({None: lambda: next(made)}, code, 5.0)
        await pool.take(None)
        with pytest.raises(UserCodeError, match="it gave a Whole with other methods than before"):
            await pool.take(None)
        await pool.close()
        assert pool.alive == 0


@given(
    st.lists(st.tuples(st.sampled_from(["take", "back", "spoil", "call", "cancel"]), st.integers(0, 7)), max_size=30)
)
def test_i9_whatever_happens_no_instance_is_out_twice_and_each_is_closed_once(steps):
    """Instances are taken, called, spoilt, and given back while a call is still at work."""
    made: list[Any] = []
    closed: list[Any] = []

    class Noted(Bare):
        def __init__(self) -> None:
            made.append(id(self))
            self.me = self  # never freed, so that no id comes twice

        async def step(self) -> None:
            await asyncio.sleep(0.001)

        def close(self) -> None:
            closed.append(id(self))

    async def play() -> None:
        async with UserCode() as code:
            pool = Pool({None: Noted}, code, 5.0, max_alive=4)
            out: list[Any] = []
            calls: list[asyncio.Task[Any]] = []
            for what, place in steps:
                if what == "take":
                    instance = await pool.take(None)
                    assert instance.free
                    assert instance not in out
                    out.append(instance)
                elif out:
                    instance = out[place % len(out)]
                    if what == "call":
                        calls.append(asyncio.create_task(instance.call("step", bool, 5.0)))
                        await asyncio.sleep(0)
                    elif what == "spoil":
                        instance.lost = True
                    elif what == "cancel" and calls:
                        calls[place % len(calls)].cancel()
                    elif what == "back":
                        for call in calls:
                            call.cancel()
                        await asyncio.gather(*calls, return_exceptions=True)
                        calls.clear()
                        out.remove(instance)
                        pool.give_back(instance)
            await asyncio.gather(*calls, return_exceptions=True)
            await pool.close()
            assert pool.alive == 0

    asyncio.run(play())
    assert sorted(closed) == sorted(made)


@pytest.mark.parametrize("case", [*TEMPLATES, *RENDERERS], ids=lambda case: f"{case.how}, {case.thinking}")
@pytest.mark.parametrize("with_tools", [False, True])
def test_i4_no_format_appends_what_it_would_not_write(case, with_tools):
    """Where nothing can be proven nothing is appended: a segment opens."""
    try:
        chat = case.build(ToolBox([multiply]).schemas if with_tools else [])
    except ConfigError:
        return  # it takes no tools
    proof = asyncio.run(check_answer_format(chat))
    assert proof.appended is not False, proof.problems
    if proof.appended is None:
        prompt = asyncio.run(chat.prompt_ids([USER]))
        turn = [*chat.tokenizer.encode("thought</think>said", add_special_tokens=False), chat.stop_token_ids[0]]
        assert asyncio.run(chat.suffix_ids(prompt, turn, [USER])) is None


def test_a_format_that_appends_something_else_is_found(monkeypatch):
    chat = chat_format()

    async def wrong(prompt_ids, turn_ids, messages):
        return [1, 2]

    monkeypatch.setattr(chat, "suffix_ids", wrong)
    proof = asyncio.run(check_answer_format(chat))
    assert proof.appended is False
    assert "is not what the whole conversation has there" in proof.problems[0]


def test_the_tiny_models_template_appends_an_answer_exactly():
    proof = asyncio.run(check_answer_format(chat_format()))
    assert (proof.appended, proof.problems) == (True, [])
