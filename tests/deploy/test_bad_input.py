"""Bad input, through the command line: one message with value and remedy, code 2, and nothing started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest

from slipstream.deploy import cli
from slipstream.deploy.checks import preflight
from slipstream.deploy.run import run_directory as run_dir
from slipstream.protocol.config import ConfigError, load
from tests.deploy.conftest import TASK, run_directory
from tests.kit.copies import PipedCopy
from tests.kit.original import Request
from tests.kit.ports import free_port

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
# What the commands import.
MODULES = (
    "slipstream.deploy.cli",
    "slipstream.deploy.checks.preflight",
    "slipstream.deploy.checks.task_check",
    "transformers.models.auto.auto_factory",
)


def slipstream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    process = PipedCopy(
        MODULES, Request("slipstream.deploy.cli", tuple(map(str, arguments)), dict(os.environ), str(ROOT))
    )
    out, err = process.communicate(LIMIT_S)
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def assert_refused(result: subprocess.CompletedProcess[str], *says: str) -> None:
    """Exit code 2 and one message, which says all of `says`."""
    assert result.returncode == 2, result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line != "a task file may print"]
    assert message.startswith("slipstream: ")
    for text in says:
        assert text in message
    assert result.stdout == ""


def test_a_wrong_value_is_told_by_its_name(run_file: Path) -> None:
    result = slipstream("config", run_file, "--queue.max_staleness", "-3")
    assert_refused(result, "queue.max_staleness = -3", "must be at least 0", "command line")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--no-such"], ["--no-such: not understood", "--section.key value"]),
        (["--queue.prot", "1"], ["queue.prot is not a setting", "port"]),
        (["--queue.port"], ["--queue.port: a value is missing"]),
        (["--model.path", "/no/such/folder"], ["model.path = /no/such/folder", "there is no such folder"]),
        (["--task.path", "task.py:task"], ["task.py:task", "there is no file", "path/to/file.py:name"]),
        (["--vllm.port", "8200", "--queue.port", "8200"], ["queue.port = 8200", "change queue.port or vllm.port"]),
    ],
)
def test_arguments_that_no_run_file_could_have(run_file: Path, arguments: list[str], says: list[str]) -> None:
    """The message is what every command prints that needs task and model."""
    with pytest.raises(ConfigError) as error:
        load(run_file, arguments, needs=("task", "model"))
    for text in says:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "{}", "--resum"], "--resum: not understood; did you mean --resume?"),
        (["up", "--resum", "{}"], "--resum: not understood; did you mean --resume?"),
        (["up", "--resume", "true", "{}"], "--resume true: --resume takes no value; give it alone"),
        (["up", "--learner.stepz", "7", "{}"], "learner.stepz is not a setting; did you mean learner.steps?"),
        (["status", "{}", "--jsn"], "--jsn: not understood; did you mean --json?"),
        (["queue", "{}", "--port", "1"], "--port: not understood; settings are given as --section.key value; did you"),
        (["config", "{}", "queue.port", "1"], "queue.port: not understood; settings are given as --section.key value"),
        (["config", "{}", "--queue.port", "--section", "chat"], "--queue.port: a value is missing"),
        (["config", "--section", "lerner"], "--section lerner: there is no such section; did you mean learner?"),
        (["status", "{}", "--queue", "http://a:1,b"], "--queue http://a:1,b: 'b' is not the URL of a queue"),
        (["worker", "{}", "--queue", "a:8200"], "--queue a:8200: 'a:8200' is not the URL of a queue"),
        (["rollouts", "{}", "--worst", "--best"], "--worst and --best: choose one of the two"),
    ],
)
def test_a_mistyped_option_is_told_in_one_line_with_the_name_that_was_meant(
    run_file: Path,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", *(word.format(run_file) for word in arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("slipstream: ")
    assert says in err


@pytest.mark.parametrize("command", ["status", "rollouts"])
def test_a_queue_that_does_not_answer_is_told_with_its_url(run_file: Path, command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert_refused(slipstream(command, run_file, "--queue", url), f"the queue at {url} did not answer")


def launch(run_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real launcher, whose preflight is to fail."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "deploy" / "launch.sh"), str(run_file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S, stdin=subprocess.DEVNULL)


def test_the_launcher_starts_nothing_where_the_preflight_refuses(run_file: Path, taken_port: int) -> None:
    result = launch(run_file, "--queue.port", str(taken_port))
    assert_refused(result, f"queue.port = {taken_port}", "stop it or choose another port")
    assert not run_directory(run_file).exists()


def test_the_launcher_tells_an_unknown_argument(run_file: Path) -> None:
    assert_refused(launch(run_file, "--restart"), "--restart: not understood")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_launcher_explains_itself(arguments: list[str]) -> None:
    result = subprocess.run(["bash", str(ROOT / "deploy" / "launch.sh"), *arguments], capture_output=True, text=True)
    assert result.returncode == (0 if arguments else 2)
    assert "deploy/launch.sh run.toml [--resume]" in result.stderr


def test_a_task_file_without_the_object(run_file: Path) -> None:
    result = launch(run_file, "--task.path", f"{run_file.parent}/task.py:other")
    assert_refused(result, "task.path = ", "defines no 'other', it has task", "name another object")
    assert not run_directory(run_file).exists()


def spoil_task(run_file: Path, replace: str, by: str) -> None:
    assert replace in TASK
    (run_file.parent / "task.py").write_text(TASK.replace(replace, by), encoding="utf-8")


def test_a_tool_without_type_hints(run_file: Path) -> None:
    spoil_task(run_file, "tools=[multiply]", "tools=[untyped]")
    assert_refused(launch(run_file), "task.path = ", "'untyped'", "give every parameter a type hint")
    assert not run_directory(run_file).exists()


@pytest.mark.parametrize(
    ("replace", "by", "says"),
    [
        ("rows = [", "rows = = [", ["task.py cannot be imported: SyntaxError"]),
        ("rows = [", "import no_such_module\nrows = [", ["No module named 'no_such_module'"]),
        ("task = Task", "task = dict", ["task is a dict, not a Task"]),
    ],
)
def test_a_task_file_that_is_wrong(run_file: Path, replace: str, by: str, says: list[str]) -> None:
    spoil_task(run_file, replace, by)
    with pytest.raises(ConfigError) as error:
        preflight.check_run(load(run_file), resume=False)
    for text in ["task.path = ", *says]:
        assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_queue_on_a_taken_port(run_file: Path, taken_port: int) -> None:
    result = slipstream("queue", run_file, "--queue.port", str(taken_port))
    assert_refused(result, f"queue.port = {taken_port}", "choose another queue.port")
    assert not run_directory(run_file).exists()


def test_the_status_of_a_queue_that_is_not_there(run_file: Path) -> None:
    started = perf_counter()
    result = slipstream("status", run_file)
    assert_refused(result, "did not answer", "is the URL right?")
    assert perf_counter() - started < 10


def test_a_ledger_that_is_not_there(run_file: Path) -> None:
    assert_refused(slipstream("ledger", run_file), "there is no ledger", "queue.db", "run.dir is taken from")


def test_the_rollouts_of_a_run_that_was_started_elsewhere(run_file: Path) -> None:
    assert_refused(
        slipstream("rollouts", run_file), "there is no rollout", "run.dir is taken from the working directory"
    )


@pytest.mark.parametrize("setting", ["queue.port", "vllm.port"])
def test_a_taken_port(run_file: Path, taken_port: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = {taken_port}: another process listens"):
        preflight.check_run(load(run_file, [f"--{setting}", str(taken_port)]), resume=False)


def test_the_second_of_two_servers_finds_its_port_taken(run_file: Path) -> None:
    first, second = next((one, other) for one, other in pairwise(iter(free_port, None)) if other == one + 1)
    with (
        socket.create_server(("127.0.0.1", second)),
        pytest.raises(ConfigError, match=f"vllm.port = {second}"),
    ):
        preflight.check_run(load(run_file, ["--vllm.port", str(first), "--vllm.count", "2"]), resume=False)


def test_a_server_that_is_not_there(run_file: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"no vLLM server answers at {url} .*refused.*slipstream vllm run.toml"):
        preflight.check_run(load(run_file, ["--vllm.servers", f'["{url}"]']), resume=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1"])
def test_a_server_whose_url_is_broken(run_file: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL; write it as http://host:port"):
        load(run_file, ["--vllm.servers", f'["{url}"]'])


def test_a_run_directory_that_cannot_be_made(run_file: Path) -> None:
    (run_file.parent / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir = .*/file: .* cannot be written: Not a directory"):
        run_dir.write_resolved(load(run_file, ["--run.dir", f"{run_file.parent}/file"]))


@pytest.mark.parametrize(
    ("config_json", "says"),
    [("{", "not a valid JSON file"), ('{"model_type": "no-such"}', "no-such"), ("{}", "model_type")],
)
def test_a_model_that_cannot_be_loaded(run_file: Path, tmp_path: Path, config_json: str, says: str) -> None:
    (tmp_path / "config.json").write_text(config_json, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"model.path = {tmp_path}: not a model that can be loaded: .*{says}"):
        preflight.check_run(load(run_file, ["--model.path", str(tmp_path)]), resume=False)


def test_an_attention_that_the_model_does_not_have(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention = sparkling: the model cannot use it"):
        preflight.check_run(load(run_file, ["--model.attention", "sparkling"]), resume=False)


def test_a_thread_that_a_task_file_starts_does_not_hold_up_the_check(run_file: Path) -> None:
    task = run_file.parent / "task.py"
    thread = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    task.write_text(thread + task.read_text(encoding="utf-8"), encoding="utf-8")
    assert slipstream("preflight", run_file).returncode == 0
