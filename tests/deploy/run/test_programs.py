"""The processes of a run: commands, environments and cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.run import processes
from slipstream.deploy.run.processes import Children, Program
from slipstream.protocol.config import load
from slipstream.weight_sync.transports.staging_cores import STAGING_CORES
from slipstream.weight_sync.vllm.guard import RequireToken
from tests.deploy.stage import until

RUN_FILE = Path("/the run/run.toml")


def of(run_file: Path, *overrides: str, resume: bool = False) -> dict[str, Program]:
    return {program.name: program for program in processes.run_programs(load(run_file, [*overrides]), RUN_FILE, resume)}


def test_a_cpu_machine_divides_its_cores_and_a_gpu_machine_does_not(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    for on_cpu, server, other in [(True, ([4, 5], "2"), ([6, 7], "2")), (False, ([], None), ([], None))]:
        monkeypatch.setattr(processes, "on_cpu", lambda here=on_cpu: here)
        placed = {name: (p.cores, p.env.get("OMP_NUM_THREADS")) for name, p in of(run_file).items()}
        assert placed == {"queue": other, "vllm-0": server, "worker-0": other, "learner": other}
        staging = {name: p.env[STAGING_CORES] for name, p in of(run_file).items() if STAGING_CORES in p.env}
        assert staging == ({"vllm-0": "4,5,6,7"} if on_cpu else {})


def test_the_password_of_the_queue_s_database_reaches_the_queue_and_the_check_alone(run_file: Path) -> None:
    config = load(run_file, ["--queue.store", "postgresql://me:hunter2@db/runs"])
    check = processes.preflight_program(config, RUN_FILE, resume=False)
    programs = {program.name: program for program in (check, *processes.run_programs(config, RUN_FILE, resume=False))}
    assert {name: program.env["PGPASSWORD"] for name, program in programs.items() if "PGPASSWORD" in program.env} == {
        "preflight": "hunter2",
        "queue": "hunter2",
    }
    assert not [program for program in programs.values() if "hunter2" in " ".join(program.command)]


def test_a_platform_without_affinity_pins_nothing(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert not any(program.cores for program in of(run_file).values())


def test_servers_that_run_elsewhere_are_not_started_and_nothing_is_pinned(run_file: Path) -> None:
    found = of(run_file, "--vllm.servers", '["http://10.0.0.1:8000"]')
    assert list(found) == ["queue", "worker-0", "learner"]
    assert not any(program.cores for program in found.values())


def test_queue_and_servers_have_a_route_that_tells_that_they_are_up(run_file: Path) -> None:
    found = of(run_file, "--queue.port", "7000", "--vllm.port", "7100", "--vllm.count", "2")
    assert {name: program.health for name, program in found.items() if program.health} == {
        "queue": "http://127.0.0.1:7000/healthz",
        "vllm-0": "http://127.0.0.1:7100/health",
        "vllm-1": "http://127.0.0.1:7101/health",
    }


def test_the_teacher_of_a_path_is_a_server_of_the_run_with_its_own_flags(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    settings = ["--vllm.port", "7100", "--vllm.count", "2", "--queue.token", "a-secret-of-the-run", "--teacher.path"]
    found = of(run_file, *settings, "/models/large", "--teacher.top_k", "40", "--teacher.args", '["--dtype", "half"]')
    teacher, server = found["teacher"], found["vllm-0"]
    assert (teacher.role, teacher.cores, teacher.env) == ("vllm", server.cores, server.env)
    assert teacher.health == "http://127.0.0.1:7102/health"
    command = [*teacher.command[len(processes.SLIPSTREAM) :]]
    assert command[:2] == ["serve", "/models/large"]
    assert command[-2:] == ["--dtype", "half"]
    for flags in (
        ["--port", "7102"],
        ["--max-logprobs", "40"],
        ["--middleware", RequireToken.__module__ + ".RequireToken"],
    ):
        assert command[command.index(flags[0]) + 1] == flags[1]
    elsewhere = of(run_file, "--teacher.path", "/models/large", "--teacher.url", "http://10.0.0.1:9000")["teacher"]
    assert elsewhere.health == "http://10.0.0.1:9000/health"
    assert elsewhere.command[elsewhere.command.index("--port") + 1] == "9000"
    assert "--middleware" not in elsewhere.command


def test_only_the_learner_speaks_to_the_terminal_and_only_it_resumes(run_file: Path) -> None:
    found = of(run_file, resume=True)
    assert [name for name, program in found.items() if program.terminal == "stdout"] == ["learner"]
    assert [name for name, program in found.items() if "--resume" in program.command] == ["learner"]


@pytest.mark.parametrize("activated", [True, False])
def test_programs_of_an_environment_that_is_not_activated_are_found(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, activated: bool
) -> None:
    ours = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"/usr/bin:{ours}" if activated else "/usr/bin")
    paths = {program.env.get("PATH") for program in of(run_file).values()}
    assert paths == {None if activated else f"{ours}:/usr/bin"}


async def test_a_process_runs_on_its_cores_and_the_parent_keeps_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    command = ["grep", "Cpus_allowed_list", "/proc/self/status"]
    with Children(grace_s=5) as children:
        child = children.start(Program("pinned", "worker", command, cores=[core]), tmp_path)
        until(lambda: child.poll() is not None)
        await children.end([child])
    assert child.tail()[0].split() == ["Cpus_allowed_list:", str(core)]
    assert os.sched_getaffinity(0) == before


def test_folders_of_the_working_directory_are_not_imported(run_file: Path) -> None:
    for package in ("protocol", "deploy", "rollout_worker"):
        (run_file.parent / package).mkdir()
        (run_file.parent / package / "__init__.py").write_text("raise SystemExit('the wrong one')")
    command = [*processes.SLIPSTREAM, "config", str(run_file)]
    done = subprocess.run(command, cwd=run_file.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_task_file_still_imports_its_siblings(run_file: Path) -> None:
    task = run_file.parent / "task.py"
    task.write_text("import beside_it\n" + task.read_text())
    (run_file.parent / "beside_it.py").touch()
    command = [*processes.SLIPSTREAM, "preflight", str(run_file)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 1
