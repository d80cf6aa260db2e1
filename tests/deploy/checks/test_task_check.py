"""Checks of a task before the run starts: prompts without room for an answer, servers that do not answer."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.deploy.checks import task_check
from slipstream.protocol.config import ConfigError, load
from slipstream.rollout_worker.task.task import Task
from tests.kit.fake_pooling import FakePooling
from tests.kit.ports import free_port
from tests.kit.stand_in_tokenizer import stand_in_tokenizer

SHORT = [{"role": "user", "content": "Multiply 2 by 3."}]
LONG = [{"role": "user", "content": "Multiply. " * 400}]


def reward(completions: list[object], **_: object) -> list[float]:
    return [0.0] * len(completions)


def task_of(*prompts: object) -> Task:
    return Task(dataset=[{"prompt": prompt} for prompt in prompts], rewards=[reward])


def check(run_file: Path, task: Task, *overrides: str) -> list[str]:
    """The findings, as the command prints them."""
    findings = task_check.check_task(load(run_file, ["--vllm.max_model_len", "1024", *overrides]), task).findings
    assert {finding.severity for finding in findings} <= {"warning"}
    return [str(finding) for finding in findings]


def test_prompts_that_fit_are_passed_in_silence(run_file: Path) -> None:
    assert check(run_file, task_of(SHORT, SHORT)) == []


def test_episodes_are_bounded_by_prompt_and_turn_unless_something_else_adds_to_them(run_file: Path) -> None:
    config = load(run_file, ["--vllm.max_model_len", "1024", "--rollout.max_turn_tokens", "100"])
    bounded = task_check.check_task(config, task_of(SHORT)).episode_tokens
    assert bounded is not None
    assert 100 < bounded < 300

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Two.
        """
        return a + b

    with_tool = Task(dataset=[{"prompt": SHORT}], rewards=[reward], tools=[add])
    assert task_check.check_task(config, with_tool).episode_tokens is None


def test_where_no_prompt_fits_the_start_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no prompt fits into the context: the longest has \d+ tokens.* raise vllm"):
        check(run_file, task_of(LONG, LONG))


@pytest.mark.parametrize(
    ("prompts", "overrides", "told"),
    [
        ([SHORT, LONG, LONG], [], "2 of 3 prompts that were tried do not fit and will be dropped: the longest has"),
        ([SHORT], ["--rollout.max_turn_tokens", "1020"], "1 of 1 prompts that were tried leave less than rollout.max_"),
        (
            [SHORT, None, SHORT],
            [],
            "1 of 3 rows that were looked at cannot be used, and will be dropped; row 1: its prompt is None",
        ),
    ],
)
def test_some_that_do_not_fit_are_told(run_file: Path, prompts: list[object], overrides: list[str], told: str) -> None:
    (line,) = check(run_file, task_of(*prompts), *overrides)
    assert told in line


def test_i7_a_prompt_that_cannot_be_rendered_is_named_with_its_row_and_reason(run_file: Path) -> None:
    calls = [{"function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}]
    unanswered = [*SHORT, {"role": "assistant", "content": "", "tool_calls": calls}]
    (line,) = check(run_file, task_of(SHORT, SHORT, unanswered, SHORT))
    told = (
        "1 of 4 prompts that were tried cannot be rendered, and will be dropped; row 2: the conversation ends in tool"
    )
    assert told in line


def test_a_system_prompt_beside_prompts_that_are_text_is_refused(run_file: Path) -> None:
    """They would be used without it, and nothing would say so."""
    told = r"chat.system_prompt = 'Be brief.': the prompts of .* are text.*make each prompt a list of messages"
    with pytest.raises(ConfigError, match=told):
        check(run_file, task_of("2 by 3 is"), "--chat.system_prompt", "Be brief.")
    check(run_file, task_of("2 by 3 is"))
    check(run_file, task_of(SHORT), "--chat.system_prompt", "Be brief.")


def test_a_column_of_two_kinds_is_told_with_a_row_of_each(run_file: Path) -> None:
    answers = [6, 6.5, None, "six"]
    rows = [{"prompt": SHORT, "answer": answer, "level": 1} for answer in answers]
    (line,) = check(run_file, Task(dataset=rows, rewards=[reward]))
    told = "the column 'answer' is not of one kind: a number in row 0, text in row 3; make it one"
    assert told in line


MCP_SERVER = shlex.join(
    [sys.executable, str(Path(__file__).parents[2] / "kit" / "programs" / "mcp_program.py"), "stdio"]
)


def test_the_tools_of_mcp_servers_are_part_of_the_prompt(run_file: Path) -> None:
    """Connected before the run starts, as a worker will be: their schemas take room in every prompt."""
    few = ("--vllm.max_model_len", "100", "--rollout.max_turn_tokens", "8")
    check(run_file, task_of(SHORT), *few)
    with pytest.raises(ConfigError, match="no prompt fits into the context"):
        check(run_file, task_of(SHORT), *few, "--task.mcp_servers", f"[{json.dumps(MCP_SERVER)}]")


def test_an_mcp_server_that_does_not_start_is_told_with_what_it_wrote(run_file: Path) -> None:
    words = shlex.join([sys.executable, "-c", "raise SystemExit('the key is missing')"])
    with pytest.raises(
        ConfigError, match=r"cannot be reached.*it wrote last: the key is missing; fix its command line"
    ):
        check(run_file, task_of(SHORT), "--task.mcp_servers", json.dumps([words]))


def test_text_prompts_and_mcp_servers_of_the_run_file_are_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.mcp_servers = .*the prompts are text, and tools need a conversation"):
        check(run_file, task_of("Multiply."), "--task.mcp_servers", json.dumps([MCP_SERVER]))


CLASSIFIER = "org/reward-model"


@contextmanager
def serving(server: FakePooling) -> Iterator[str]:
    """Its URL, while it runs on its own loop: the check has one, too."""
    url: list[str] = []
    up, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with server.serving() as at:
            url.append(at)
            up.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(30)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def judged(run_file: Path, url: str, prompt: object = SHORT) -> None:
    task = Task(dataset=[{"prompt": prompt}], rewards=[CLASSIFIER, reward])
    check(run_file, task, "--task.reward_servers", f'{{"{CLASSIFIER}" = "{url}"}}')


@pytest.mark.parametrize("prompt", [SHORT, "2 by 3"])
def test_a_reward_server_scores_once_before_the_start(run_file: Path, prompt: object) -> None:
    server = FakePooling(lambda asked: [0.5])
    with serving(server) as url:
        judged(run_file, url, prompt)
    (body,) = server.requests
    assert ("input" in body) == isinstance(prompt, str)


def test_a_reward_server_that_is_not_there_is_told_before_the_start(run_file: Path) -> None:
    port = free_port()
    says = rf"task.reward_servers = .*127.0.0.1:{port}.*: slipstream serve {CLASSIFIER} --runner pooling --port {port}"
    with pytest.raises(ConfigError, match=says):
        judged(run_file, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"generates": True},
            "answers 404.*it is not a pooling server, or .*; start it with: slipstream serve org/reward-model",
        ),
        ({"model": "org/another"}, "answers 404.*knows the model by another name .*/v1/models.*; start it with"),
        ({"score": lambda asked: [0.1, 0.9]}, r"gives 2 scores for a completion.*one label \(num_labels = 1\)"),
    ],
)
def test_a_reward_server_of_another_kind_is_told_before_the_start(
    run_file: Path, change: dict[str, object], says: str
) -> None:
    server = FakePooling(lambda asked: [0.5])
    for name, value in change.items():
        setattr(server, name, value)
    with serving(server) as url, pytest.raises(ConfigError, match=f"task.reward_servers = .*{url}.*{says}"):
        judged(run_file, url)


def too_few(completions: list[object], **_: object) -> list[float]:
    return [1.0]


def one_number(completions: list[object], **_: object) -> float:
    return 1.0


async def texts(completions: list[object], **_: object) -> list[str]:
    return ["good"] * len(completions)


def fails_on_numbers(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    return [float(completion[0]["content"].index("answer:")) for completion in completions]


@pytest.mark.parametrize("prompt", [SHORT, "2 by 3"])
@pytest.mark.parametrize("wrong", [too_few, one_number, texts])
def test_a_reward_that_can_give_no_score_is_refused_before_the_start(
    run_file: Path, wrong: Callable[..., object], prompt: object
) -> None:
    task = Task(dataset=[{"prompt": prompt}], rewards=[reward, wrong])
    with pytest.raises(ConfigError, match=rf"{wrong.__name__} returned .*test_task_check.py:\d+"):
        check(run_file, task)


def test_a_reward_that_fails_for_an_answer_is_told_before_the_start(run_file: Path) -> None:
    (line,) = check(run_file, Task(dataset=[{"prompt": SHORT}], rewards=[reward, fails_on_numbers]))
    assert "ValueError" in line
    assert "fails_on_numbers" in line


class Room:
    """An environment; class attributes steer it."""

    said: object = " Look."
    closed = 0

    def reset(self, **columns: object) -> object:
        if isinstance(Room.said, Exception):
            raise Room.said
        return Room.said

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self) -> float:
        return 1.0

    def close(self) -> None:
        Room.closed += 1


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.setattr(Room, "closed", 0)
    yield Room
    assert Room.closed >= 1, "whatever was found, it is closed"


def rooms(**changes: object) -> Task:
    return Task(**{"dataset": [{"prompt": SHORT}] * 4, "environment": Room, **changes})  # type: ignore[arg-type]


def test_environments_that_work_are_passed_in_silence(run_file: Path, room: type) -> None:
    assert check(run_file, rooms()) == check(run_file, rooms(dataset=())) == []


def test_a_reset_that_fails_is_refused(run_file: Path, room: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "said", OSError("no room"))
    told = r"Task\(environment=...\): Room.reset fails on row 0: OSError: no room \(.*test_task_check.py:\d+\); fix it"
    with pytest.raises(ConfigError, match=told):
        check(run_file, rooms())


def test_where_no_observation_fits_the_start_is_refused(
    run_file: Path, room: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the rows' own prompts are: no episode sees one without what reset says."""
    monkeypatch.setattr(Room, "said", "Look. " * 1000)
    with pytest.raises(ConfigError, match=r"task.path = .*: no prompt fits into the context"):
        check(run_file, rooms())


class Talkative(Room):
    def reset(self, words: int, **columns: object) -> str:
        return " Look." * words


def test_some_observations_that_are_too_long_are_told(run_file: Path) -> None:
    rows = [{"prompt": SHORT, "words": words} for words in (1, 1000, 1, 1)]
    (line,) = check(run_file, rooms(dataset=rows, environment=Talkative))
    assert "1 of 3 prompts that environments gave do not fit and will be dropped" in line
    rows = [{"prompt": LONG if number == 3 else SHORT, "words": 1} for number in range(4)]
    (line,) = check(run_file, rooms(dataset=rows, environment=Talkative))
    assert "1 of 4 prompts that were tried do not fit and will be dropped" in line


class Leaky(Room):
    def close(self) -> None:
        raise OSError("still open")


def test_environments_that_cannot_be_closed_are_told_once(run_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = check(run_file, rooms(environment=Leaky))
    assert line.startswith("Leaky.close failed: OSError: still open")
    assert caplog.records == []


def test_a_close_that_fails_is_told_once_and_as_a_warning(
    run_file: Path,
    room: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each instance's was a line of a log, with its time."""

    def close(self: Room) -> None:
        Room.closed += 1
        raise OSError("no door")

    monkeypatch.setattr(Room, "close", close)
    (line,) = check(run_file, rooms())
    assert line.startswith("Room.close failed: OSError: no door (")
    assert "test_task_check.py:" in line
    assert Room.closed > 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "method", "told"),
    [
        (
            "get_reward",
            lambda self, completions: 1.0,
            r"missing a required argument: 'completions'; .* get_reward\(self\)",
        ),
        ("respond", lambda self: None, r"Room.respond cannot be called: .*; write it as def respond\(self, messages\)"),
        ("respond", lambda self, turns: None, r"def respond\(self, messages\)"),
        ("close", lambda self, force: None, r"def close\(self\)"),
    ],
)
def test_a_method_that_cannot_be_called_as_we_call_it_is_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: object, told: str
) -> None:
    """It was found by running, in each episode."""
    monkeypatch.setattr(Room, name, method, raising=False)
    with pytest.raises(ConfigError, match=told):
        check(run_file, rooms())


def test_a_row_that_names_no_environment_is_refused(run_file: Path, room: type) -> None:
    rows = [{"prompt": SHORT, "environment": name} for name in ("a", "a", "c")]
    with pytest.raises(ConfigError, match="row 2 cannot be played: its column 'environment' is 'c', which is not one"):
        check(run_file, rooms(dataset=rows, environment={"a": Room, "b": Room}))


def test_an_environment_that_no_row_names_is_told(run_file: Path, room: type) -> None:
    (line,) = check(
        run_file, rooms(dataset=[{"prompt": SHORT, "environment": "a"}], environment={"a": Room, "b": Room})
    )
    assert "no row that was looked at names the environment 'b'" in line


def test_rows_without_the_column_that_begins_an_environment_are_told(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "begins_by", "seed", raising=False)
    without, made = [{"prompt": SHORT}], {"a": Room, "b": functools.partial(Room)}
    (line,) = check(run_file, rooms(dataset=without))
    assert "no row that was looked at has a column 'seed', so the episodes of a group may begin differently" in line
    assert check(run_file, rooms(dataset=[{"prompt": SHORT, "seed": 1}])) == []
    named = [{"prompt": SHORT, "environment": name} for name in made]
    assert len(check(run_file, rooms(dataset=named, environment=made))) == 2, "one each"


def test_an_environment_that_cannot_be_made_or_gives_no_reward_is_refused(run_file: Path) -> None:
    def broken() -> Room:
        raise ConnectionError("no server")

    with pytest.raises(ConfigError, match=r"no instance can be made: ConnectionError: no server \(.*; fix it there"):
        check(run_file, rooms(environment=broken))

    class Bare:
        def reset(self) -> None: ...

    with pytest.raises(ConfigError, match=r"nothing gives a reward: write a method get_reward\(self\) of Bare"):
        check(run_file, rooms(environment=lambda: Bare()))

    class Room:  # the name of a reward function, too
        def reset(self) -> None: ...
        def get_reward(self) -> float:
            return 0.0

    def judge(completions: list[object], **_: object) -> list[float]:
        return []

    judge.__name__ = "Room"
    with pytest.raises(ConfigError, match="'Room' is a reward function and the class of an environment"):
        check(run_file, rooms(environment=Room, rewards=[judge]))
    with pytest.raises(ConfigError, match="tool_isolation = process: an environment keeps its state"):
        check(run_file, rooms(), "--worker.tool_isolation", "process")


async def agent(endpoint: object) -> float:
    return 1.0


def test_an_agents_prompts_are_its_own_to_use(run_file: Path) -> None:
    task = Task(dataset=[{"prompt": "Multiply. " * 4000}], agent=agent)
    assert check(run_file, task, "--chat.system_prompt", "Be brief.") == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["--task.mcp_servers", '["http://127.0.0.1:9/mcp"]'],
            r"task\.mcp_servers = .*names its tools in its requests",
        ),
        (["--worker.tool_isolation", "process"], r"tool_isolation = process: the task has an agent.* set thread"),
    ],
)
def test_settings_of_tools_are_refused_where_an_agent_has_its_own(
    run_file: Path, overrides: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check(run_file, Task(dataset=[{"prompt": SHORT}], agent=agent), *overrides)


def evaluating(run_file: Path, task: Task, *overrides: str) -> list[str]:
    return check(run_file, task, "--eval.every", "5", *overrides)


def with_evals(*prompts: object, **changes: object) -> Task:
    given = {"dataset": [{"prompt": SHORT}] * 4, "rewards": [reward], **changes}
    return Task(**given, eval_dataset=[{"prompt": prompt} for prompt in prompts])  # type: ignore[arg-type]


def test_rows_of_evaluations_that_fit_are_passed_in_silence(run_file: Path) -> None:
    assert evaluating(run_file, with_evals(SHORT, SHORT)) == []


def test_where_no_prompt_of_the_eval_dataset_fits_the_start_is_refused(run_file: Path) -> None:
    told = r"^Task\(eval_dataset=\.\.\.\): no prompt fits into the context"
    with pytest.raises(ConfigError, match=told):
        evaluating(run_file, with_evals(LONG, LONG))
    with pytest.raises(ConfigError, match=told):
        evaluating(run_file, with_evals(LONG, SHORT), "--eval.rows", "1")
    check(run_file, with_evals(LONG))


@pytest.mark.parametrize(
    ("prompts", "overrides", "told"),
    [
        ([SHORT, LONG], [], "1 of 2 prompts of the eval_dataset that were tried do not fit and will count as failed"),
        ([SHORT], ["--eval.rows", "5"], "eval.rows = 5, and the eval_dataset has 1 rows: all of them are taken"),
    ],
)
def test_what_is_lost_of_evaluations_is_told(
    run_file: Path, prompts: list[object], overrides: list[str], told: str
) -> None:
    (line,) = evaluating(run_file, with_evals(*prompts), *overrides)
    assert told in line


def test_rows_that_no_evaluation_takes_are_not_looked_at(run_file: Path) -> None:
    assert evaluating(run_file, with_evals(SHORT, LONG), "--eval.rows", "1") == []


def test_a_row_of_the_eval_dataset_that_names_no_environment_is_refused(run_file: Path, room: type) -> None:
    def rows(*names: str) -> list[dict[str, object]]:
        return [{"prompt": SHORT, "environment": name} for name in names]

    task = rooms(dataset=rows("a"), eval_dataset=rows(*"aaac"), environment={"a": Room})
    told = r"^Task\(eval_dataset=\.\.\.\): row 3 cannot be played: its column 'environment' is 'c'"
    with pytest.raises(ConfigError, match=told):
        evaluating(run_file, task)
    evaluating(run_file, task, "--eval.rows", "3")


class Exact(Room):
    def reset(self, words: int) -> str:  # type: ignore[override]
        return " Look." * words


def test_a_column_that_reset_takes_and_the_eval_dataset_lacks_is_refused(run_file: Path, room: type) -> None:
    task = rooms(dataset=[{"prompt": SHORT, "words": 1}], eval_dataset=[{"prompt": SHORT}], environment=Exact)
    told = r"^Task\(eval_dataset=\.\.\.\): Exact.reset takes 'words', which is not a column of the eval_dataset"
    with pytest.raises(ConfigError, match=told):
        evaluating(run_file, task)


def test_a_reset_that_fails_on_the_eval_dataset_says_so(run_file: Path, room: type) -> None:
    task = rooms(
        dataset=[{"prompt": SHORT, "words": 1}], eval_dataset=[{"prompt": SHORT, "words": "x"}], environment=Talkative
    )
    with pytest.raises(ConfigError, match=r"Talkative.reset fails on row 0 of the eval_dataset: TypeError"):
        evaluating(run_file, task)


def test_the_model_of_a_served_teacher_is_checked_before_it_is_served(run_file: Path, tmp_path: Path) -> None:
    model = Path(load(run_file).model.path)
    assert check(run_file, task_of(SHORT), "--teacher.path", str(model)) == []
    other = tmp_path / "other"
    shutil.copytree(model, other)
    stand_in_tokenizer(["<s>"], "<s>").save_pretrained(other)
    for teacher, why in ((other, "another vocabulary"), (tmp_path / "nothing", "config.json")):
        with pytest.raises(ConfigError, match=rf"^teacher\.path = {re.escape(str(teacher))}: .*{why}"):
            check(run_file, task_of(SHORT), "--teacher.path", str(teacher))
    facts = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}
    shutil.copytree(model, tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(json.dumps(facts))
    (warning,) = check(run_file, task_of(SHORT), "--teacher.path", str(tmp_path / "short"))
    assert "1024" in warning
