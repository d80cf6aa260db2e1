"""`slipstream.train(task, ...)` from a script: what reaches the run, what comes back, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slipstream import script as script_module
from slipstream import train
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.config import ConfigError, RunConfig, TaskSection
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.script import TRAIN, of_a_trainer
from tests.kit.copies import PipedCopy
from tests.kit.original import Request
from tests.kit.ports import free_port
from tests.slipstream.conftest import Script

LIMIT_S = 100.0


def start(script: Script) -> PipedCopy:
    request = Request(str(script.path), (), dict(os.environ), str(script.folder))
    return PipedCopy(["slipstream.script"], request)


def run(script: Script) -> subprocess.CompletedProcess[str]:
    process = start(script)
    out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess([], process.wait(), out, err)


def guarded(code: str) -> str:
    return 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(code), "    ")


PATCHED = """
import slipstream.deploy.run.processes
slipstream.deploy.run.processes.SLIPSTREAM = ("bash", "stand-in")
"""

# The learner is done at once; all others stay.
STAND_IN = """
echo "$@" >>calls
case $1 in
    preflight) exec {python} -P -m slipstream.deploy.cli "$@" ;;
    learner) until [ $(grep -c . calls) = 5 ]; do sleep 0.1; done; {learner} ;;
esac
sleep 300
"""


def stand_in(script: Script, learner: str) -> None:
    text = STAND_IN.format(python=sys.executable, learner=learner)
    (script.folder / "stand-in").write_text(text, encoding="utf-8")


def sections() -> str:
    return f"model=MODEL, queue={{'port': {free_port()}}}, vllm={{'port': {free_port()}}}, deploy={{'grace_s': 1.0}}"


def test_the_script_runs_everything_and_gets_the_summary(script: Script) -> None:
    """With the real check, which imports the script as a worker does."""
    summary = {"steps": 7, "reward_last10": None}
    stand_in(script, f"echo '{json.dumps(summary)}' >runs/mine/summary.json; echo step 7; exit 0")
    call = f"result = train(task, {sections()}, run={{'name': 'mine'}}, learner={{'steps': 7, 'learning_rate': 1e-6}})"
    script.write(PATCHED + guarded(f"{call}\nprint(json.dumps(result))"))
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == summary
    assert "step 7" in done.stdout
    run_file = (script.folder / "runs" / "mine" / "run.toml").read_text()
    assert f'path = "{script.path}:task"' in run_file
    assert "steps = 7 " in run_file
    roles = {line.split()[0] for line in (script.folder / "calls").read_text().splitlines()}
    assert roles == {"preflight", "queue", "vllm", "worker", "learner"}


def test_a_run_that_fails_raises(script: Script) -> None:
    stand_in(script, "echo last words >&2; exit 3")
    script.write(
        PATCHED
        + guarded(f"""
        try:
            train(task, {sections()})
        except RunFailed as failure:
            print("failed", failure.code, "last words" in str(failure))
        """)
    )
    done = run(script)
    assert done.stdout.splitlines()[-1] == "failed 3 True", done.stdout + done.stderr


def test_ctrl_c_ends_the_script_and_all_that_it_started(script: Script) -> None:
    """As KeyboardInterrupt in the script; the other signals are the supervisor's tests'."""
    stand_in(script, "echo up; sleep 300")
    script.write(PATCHED + guarded(f"train(task, {sections()})"))
    process = start(script)
    assert process.stdout is not None
    try:
        assert "up\n" in process.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == -signal.SIGINT
    finally:
        process.kill()
    left = subprocess.run(["pgrep", "-f", str(script.folder)], capture_output=True, text=True)
    assert left.stdout == ""


def test_a_script_that_calls_train_whenever_it_is_imported_is_refused(script: Script) -> None:
    """The check finds it before anything is started. Without it, runs would start within runs."""
    script.write(f"train(task, {sections()})")
    done = run(script)
    assert done.returncode == 1
    assert "calls train() whenever it is imported" in done.stderr
    assert 'put the call under: if __name__ == "__main__":' in done.stderr
    assert not (script.folder / "runs").exists()


def test_a_helper_that_calls_train_does_not_hide_it(script: Script) -> None:
    script.write("def start(): train(task, model=MODEL)\nstart()")
    with pytest.raises(ConfigError, match="calls train\\(\\) whenever it is imported"):
        load_task(TaskSection(path=f"{script.path}:task"))


REFUSED = [
    ("train(Task(dataset=task.dataset, rewards=[accuracy]), model=MODEL)", "is not a global of any module"),
    ("train({}, model=MODEL)", "the task is a dict; give a Task"),
    ("train(task, model=MODEL, learner=7)", "train(learner=7): must be a dict of settings"),
    ("train(task)", "train(): the section [model] is missing; it needs path"),
    ("train(task, model=MODEL, learner={'steps': -1})", "train(): learner.steps = -1: must be at least 1"),
    ("train(task, model=MODEL, learner={'stepz': 1})", "train(): learner.stepz is not a setting"),
    ("train(task, model=MODEL, lerner={'steps': 1})", "train(): [lerner] is not a section"),
    ("train(task, 'no.toml', model=MODEL)", "no.toml: there is no such run file"),
    (
        "async def main(): train(task, model=MODEL)\nasyncio.run(main())",
        "while an event loop is running, as in a notebook",
    ),
    (
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor() as pool:\n"
        "    pool.submit(train, task, model=MODEL).result()",
        "from the main thread only",
    ),
]


def test_what_cannot_work_is_refused_with_its_remedy(script: Script) -> None:
    """One script tries them all: each is refused before anything is started."""
    caught = "except ConfigError as error:\n    print('refused', json.dumps(str(error)))"
    tried = [f"try:\n{textwrap.indent(code, '    ')}\n{caught}" for code, _ in REFUSED]
    script.write(guarded("\n".join(tried)))
    done = run(script)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("refused ")]
    for (code, says), text in zip(REFUSED, told, strict=True):
        assert says in text, code
    assert not (script.folder / "runs").exists()


def test_a_task_of_a_session_without_a_file_is_refused(script: Script) -> None:
    script.write("train(task, model=MODEL)")
    done = subprocess.run([sys.executable], input=script.path.read_text(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "stands in a session or a script that is not a .py file" in done.stderr
    assert "put the task into a .py file as a global" in done.stderr


task = Task(dataset=[{"prompt": "a text"}], rewards=[lambda completions, **columns: [0.0] * len(completions)])


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[RunConfig, bool]]:
    """Note what train() would have run."""
    runs: list[tuple[RunConfig, bool]] = []

    def supervise(config: RunConfig, resume: bool) -> None:
        runs.append((config, resume))
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "summary.json").write_text("{}")

    monkeypatch.setattr(script_module, "supervise", supervise)
    monkeypatch.chdir(tmp_path)
    return runs


def test_sections_override_the_run_file(supervised: list[Any], model_folder: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "a.toml"
    run_file.write_text('[model]\npath = "no/such"\n[learner]\nsteps = 5\nwarmup_steps = 2\n[queue]\ntoken = "t"')
    model = {"path": model_folder}  # a Path will do
    train(task, run_file, resume=True, model=model, learner={"steps": 7, "betas": (0.8, 0.9)}, queue={"token": None})
    ((config, resume),) = supervised
    assert (config.learner.steps, config.learner.warmup_steps, config.learner.betas) == (7, 2, (0.8, 0.9))
    assert config.model.path == str(model_folder)
    assert config.queue.token == "t"
    assert config.task.path == f"{__file__}:task"
    assert resume


SAID = [
    (
        "run.name = out: /a/out already holds a run; continue with it by --resume, or choose another name: "
        "--run.name out-2",
        "run.name = out: /a/out already holds a run; continue with it by resume=True, or choose another name: "
        "run={'name': 'out-2'}",
        "output_dir = out: /a/out already holds a run; continue with it by resume_from_checkpoint=True, or choose "
        "another name: output_dir='/a/out-2'",
    ),
    (
        "--resume: /a/out holds nothing to continue from; start it without --resume",
        "resume=True: /a/out holds nothing to continue from; start it without resume=True",
        "resume_from_checkpoint=True: /a/out holds nothing to continue from; start it without "
        "resume_from_checkpoint=True",
    ),
    (
        "begin a new run from its merged model with --run.name and --model.path /a/out/model",
        "begin a new run from its merged model with another run.name and model={'path': '/a/out/model'}",
        "begin a new run from its merged model with another output_dir and model='/a/out/model'",
    ),
]


@pytest.mark.parametrize(("text", "train_s", "trainer_s"), SAID)
def test_messages_name_what_a_script_gives_in_place_of_options(text: str, train_s: str, trainer_s: str) -> None:
    assert TRAIN.reworded(text) == train_s
    assert of_a_trainer(Path("/a/out"), "GRPOTrainer").reworded(text) == trainer_s


@pytest.mark.parametrize("kind", [ConfigError, RunFailed])
def test_what_a_run_raises_is_told_in_the_script_s_words(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path, kind: type[Exception]
) -> None:
    def refuses(config: RunConfig, resume: bool) -> None:
        assert os.environ["SLIPSTREAM_RESUME"] == "resume=True"
        raise kind("continue with it by --resume")

    monkeypatch.setattr(script_module, "supervise", refuses)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_RESUME", "")
    with pytest.raises(kind, match=r"^continue with it by resume=True$"):
        train(task, model={"path": str(model_folder)})


def test_the_task_may_come_from_another_module(supervised: list[Any], model_folder: Path) -> None:
    train(task, model={"path": str(model_folder)}, vllm={"args": ["--max-num-seqs", "1"]})
    ((config, resume),) = supervised
    assert load_task(config.task).dataset == task.dataset
    assert config.vllm.args == ["--max-num-seqs", "1"]
    assert not resume
