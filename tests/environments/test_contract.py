"""What holds for all adapters of `slipstream.environments`: each plays a small environment in a whole worker.

An adapter whose library is not installed is skipped here; `pytest -m frameworks tests/environments` runs this file in
its own environment for each (test_libraries.py).
"""

from __future__ import annotations

import importlib.util
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream import environments
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.task import Task
from tests import kit
from tests.environments.stand_ins import nemo_gym_server
from tests.kit.fake_vllm.policies import in_turn, multiplying, scripted
from tests.kit.worker import TOKENIZER, Run, fake, roll

STAND_INS = Path(__file__).parent / "stand_ins"
CONFIG = kit.config(
    kit.WORKER,
    rollout={"group_size": 2, "max_tool_result_tokens": 100},
    worker={"tool_timeout_s": 3.0, "reward_timeout_s": 3.0, "episode_timeout_s": 60.0},
)
SUMS = in_turn(["4", "6"])


@dataclass
class Bench:
    """What a case may use: a folder, and things that stay open until the test ends."""

    folder: Path
    stack: AsyncExitStack


@dataclass
class Case:
    """One adapter.

    Attributes:
        build: Makes the task with a fault; empty for none.
        library: What it imports; None if it needs nothing that is not here.
        missing: What to hide for a missing library, and what the error says.
        unknown: Makes a task of what is not there, and what the error says.
        faults: What each fault comes to; None where the episode continues, as what is too long is cut.
        policy: What the policy says.
        reward: What an episode without fault brings.
        turns: Answers of the policy in it.
    """

    build: Callable[[Bench, str], Any]
    faults: Mapping[str, str | None]
    unknown: Callable[[Bench], Any]
    unknown_says: str
    library: str | None = None
    missing: str = ""
    policy: Callable[[str, int], str] = SUMS
    reward: float = 2.0
    turns: int = 2
    metrics: Mapping[str, float] = field(default_factory=dict)


def gymnasium(bench: Bench, fault: str) -> Task:
    from tests.environments.stand_ins import gymnasium_sums  # noqa: F401

    return Task(dataset=[{"seed": 1}], environment=environments.gymnasium_environment("Sums-v0", fault=fault))


def textarena(bench: Bench, fault: str) -> Task:
    from tests.environments.stand_ins import textarena_sums  # noqa: F401

    return Task(environment=environments.textarena_environment("Sums-v0", fault=fault))


def openenv(bench: Bench, fault: str) -> Task:
    from tests.environments.stand_ins.openenv_sums import serving

    url = bench.stack.enter_context(serving())
    environment = environments.openenv_environment(
        url, action="text", observe="question", columns=["fault"], timeout_s=2.0, max_mb=1.0
    )
    return Task(dataset=[{"fault": fault}], environment=environment)


async def nemo_gym(bench: Bench, fault: str) -> Task:
    url = await bench.stack.enter_async_context(nemo_gym_server.ResourcesServer(fault))
    data = bench.folder / "data.jsonl"
    data.write_text(f"{nemo_gym_server.line()}\n\n")
    return environments.nemo_gym_task(url, data, timeout_s=2.0)


def harbor_program(bench: Bench) -> str:
    program = bench.folder / "harbor"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_INS / "harbor_program.py"} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def harbor(bench: Bench, fault: str) -> Task:
    tasks = bench.folder / "tasks" / "sums"
    tasks.mkdir(parents=True)
    for name, text in (("task.toml", ""), ("instruction.md", "What is 2 + 2?"), ("fault", fault)):
        (tasks / name).write_text(text)
    return environments.harbor_task(tasks.parent, program=harbor_program(bench), timeout_s=10.0)


def inspect_ai(bench: Bench, fault: str) -> Task:
    place = f"{STAND_INS / 'inspect_sums.py'}:sums"
    seconds = 20.0 if fault == "hang" else 120.0
    return environments.inspect_task(place, fault=fault, processes=1, timeout_s=seconds)


def verifiers(bench: Bench, fault: str) -> Task:
    sys.path.append(str(Path(__file__).parents[1] / "slipstream" / "verifiers_environments"))
    return environments.verifiers_task("doubling-v1", taskset={"count": 1})


CASES = {
    "gymnasium": Case(
        gymnasium,
        library="gymnasium",
        missing="pip install gymnasium",
        unknown=lambda bench: environments.gymnasium_environment("NoSuchThing-v0"),
        unknown_says="NoSuchThing",
        faults={"image": "12288 numbers.*observe=", "nan": "step 1 gave the reward nan", "hang": "3 s", "flood": None},
    ),
    "textarena": Case(
        textarena,
        library="textarena",
        missing="pip install textarena",
        unknown=lambda bench: environments.textarena_environment("Wordel-v0"),
        unknown_says="no such game; there are .*Wordle",
        faults={"nan": "step 1 gave the reward nan", "hang": "3 s", "flood": None},
    ),
    "openenv": Case(
        openenv,
        library="openenv",
        missing="pip install openenv-core",
        unknown=lambda bench: environments.openenv_environment("echo-env"),
        unknown_says="give the server's address",
        faults={
            "image": "4096 numbers.*observe=",
            # Its own server sends a reward that is no number as none.
            "hang": "step had no answer in 2 s",
            "flood": "step failed",
        },
    ),
    "nemo_gym": Case(
        nemo_gym,
        unknown=lambda bench: environments.nemo_gym_task("http://127.0.0.1:9", bench.folder / "no.jsonl"),
        unknown_says="cannot be read",
        policy=multiplying,
        reward=1.0,
        faults={"image": "an image|number", "nan": "nan", "hang": "no answer in 2 s", "flood": "more than 4 MiB"},
        metrics={"calls": 1.0},
    ),
    "harbor": Case(
        harbor,
        unknown=lambda bench: environments.harbor_task(bench.folder, program=harbor_program(bench)),
        unknown_says="no task.toml",
        reward=1.0,
        turns=1,
        faults={"image": "ImageError: no such image", "nan": "nan", "hang": "timeout_s = 10", "flood": "no result"},
        metrics={"tests": 2.0},
    ),
    "inspect_ai": Case(
        inspect_ai,
        library="inspect_ai",
        unknown=lambda bench: environments.inspect_task(f"{STAND_INS / 'inspect_sums.py'}:no_such"),
        unknown_says="has no 'no_such'",
        policy=lambda text, index: "4",
        reward=1.0,
        turns=1,
        faults={"image": "the image cannot be read", "nan": "nan", "hang": "timeout_s = 20"},
    ),
    "verifiers": Case(
        verifiers,
        library="verifiers",
        missing="slipstream-rl.verifiers",
        unknown=lambda bench: environments.verifiers_task("no-such-set"),
        unknown_says="no-such-set",
        policy=lambda text, index: "0",
        reward=0.5,
        turns=1,
        faults={},
    ),
}


def is_here(case: Case) -> bool:
    return case.library is None or importlib.util.find_spec(case.library) is not None


HERE = {name: case for name, case in CASES.items() if is_here(case)}
FAULTS = [(name, fault) for name, case in HERE.items() for fault in case.faults]


async def played(case: Case, fault: str, folder: Path) -> Run:
    async with AsyncExitStack() as stack:
        built = case.build(Bench(folder, stack), fault)
        task = built if isinstance(built, Task) else await built
        return await roll(task, fake(scripted(TOKENIZER, case.policy)), config=CONFIG)


@pytest.mark.parametrize("name", HERE)
async def test_i4_its_episodes_are_played_and_rewarded(name: str, tmp_path: Path) -> None:
    case = HERE[name]
    run = await played(case, "", tmp_path)
    assert run.queue.failures == {}, run.queue.failures
    assert len(run.rollouts) == 2
    for rollout in run.rollouts:
        assert rollout.reward == case.reward, rollout.messages
        assert rollout.turns == case.turns
        assert {metric: rollout.metrics.get(metric) for metric in case.metrics} == case.metrics
        (segment,) = rollout.segments
        said = TOKENIZER.decode(segment.token_ids[segment.loss_mask]).split("<|im_end|>")
        # Each turn of the policy trains, whole, and nothing that the environment said does.
        assert len(said) == case.turns + 1
        assert not any("What" in turn or "And" in turn for turn in said)


@pytest.mark.parametrize(("name", "fault"), FAULTS)
async def test_what_goes_wrong_in_it_is_one_clear_error(
    name: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = HERE[name].faults[fault]
    run = await played(HERE[name], fault, tmp_path)
    if says is None:
        assert run.queue.failures == {}
        assert {rollout.reward for rollout in run.rollouts} == {HERE[name].reward}
        assert max(len(segment.token_ids) for rollout in run.rollouts for segment in rollout.segments) < 300
        return
    (failure,) = run.queue.failures.values()
    assert failure.retryable
    assert run.rollouts == []
    told = " ".join([failure.detail, *caplog.messages])
    assert re.search(says, told), told


@pytest.mark.parametrize("name", HERE)
def test_what_is_not_there_is_said_before_a_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=HERE[name].unknown_says):
        HERE[name].unknown(Bench(tmp_path, AsyncExitStack()))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.missing])
def test_without_the_library_it_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    for module in [each for each in sys.modules if each.partition(".")[0] == case.library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, str(case.library), None)
    with pytest.raises(ConfigError, match=case.missing):
        case.unknown(Bench(Path(), AsyncExitStack()))


def test_a_process_of_inspect_ends_with_its_worker() -> None:
    """Its stdin stays open, as it would be read only after the episode that it plays."""
    player = Path(environments.__file__).with_name("inspect_player.py")
    command = f"[sys.executable, '-P', {str(player)!r}, '{{}}', str(os.getpid())]"
    code = f"import os, subprocess, sys; print(subprocess.Popen({command}).pid)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        process = psutil.Process(int(worker.stdout.readline()))
        worker.wait(60)
        process.wait(60)


def test_harbor_and_inspect_without_their_programs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install harbor"):
        environments.harbor_task(tmp_path, program=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be started"):
        environments.inspect_task("a.py:b", python=str(tmp_path / "none"))
