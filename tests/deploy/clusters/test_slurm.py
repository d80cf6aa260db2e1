"""`slipstream up --on slurm` under a real SLURM; vLLM and the learner are stand-ins."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from slipstream.deploy.clusters import slurm, slurm_job
from slipstream.deploy.clusters.following import Stops
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.config import ConfigError, load
from tests.deploy.conftest import run_directory, save_ledger
from tests.deploy.stage import until
from tests.deploy.typed import SMALL, Typed, output, read_until
from tests.kit.slurm import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_run_is_submitted_followed_and_done(slurm_here: SlurmCluster, run_file: Path, hold: Path) -> None:
    with Typed("up", str(run_file), "--on", "slurm", "--worker.count", "2", *SMALL) as up:
        told = read_until(up, "all have come")
        assert "all have come: vllm-0, worker-0, worker-1; resume False" in told
        steps = slurm_here.run("squeue", "--steps", "--noheader", "--format=%j").split()
        assert {"vllm-0", "worker-0", "worker-1"} < {*steps}
        hold.unlink()
        assert up.wait(timeout=100) == 0


def test_more_workers_come_as_an_array_and_go(slurm_here: SlurmCluster, run_file: Path, hold: Path) -> None:
    with Typed("up", str(run_file), "--on", "slurm", "--worker.count", "0", *SMALL) as up:
        read_until(up, "all have come: vllm-0")
        code, script = output("render", "slurm", str(run_file), "--workers", "2", *SMALL)
        assert code == 0, script
        array = slurm.submit(script)
        names = {f"worker-{array}-0", f"worker-{array}-1"}
        until(lambda: names <= workers(run_file))
        slurm_here.run("scancel", "--batch", "--signal=TERM", f"{array}_0")
        until(lambda: names & workers(run_file) == {f"worker-{array}-1"})
        hold.unlink()
        assert up.wait(timeout=100) == 0


@pytest.mark.parametrize("words", ["two words", "#1 of $(false) 'x", 'said "q"', "a\\b %j", "'two words'"])
def test_options_of_sbatch_reach_slurm_as_they_are_written(
    slurm_here: SlurmCluster, run_file: Path, hold: Path, words: str
) -> None:
    settings = ["--cluster.sbatch", json.dumps([f"--comment={words}", "--hold"])]
    code, script = output("render", "slurm", str(run_file), "--workers", "2", *SMALL, *settings)
    assert code == 0, script
    told = slurm_here.run("scontrol", "show", "job", slurm.submit(script))
    assert f"Comment={words.strip(chr(39)) if words[0] == chr(39) else words} \n" in told


def workers(run_file: Path) -> set[str]:
    code, said = output("status", str(run_directory(run_file) / "run.toml"), "--json")
    found = json.loads(said)["workers"] if code == 0 else []
    return {each["worker_id"] for each in found if each["does"] != "left"}


@pytest.mark.parametrize("ended_by", ["the signal of its limit", "scontrol requeue"])
def test_a_job_that_is_queued_again_has_written_a_checkpoint_and_goes_on_from_it(
    slurm_here: SlurmCluster, run_file: Path, hold: Path, ended_by: str
) -> None:
    """The signal is SLURM's own, sent early here; what follows it is what follows at the limit."""
    with Typed("up", str(run_file), "--on", "slurm", "--deploy.grace_s", "5", *SMALL) as up:
        told = read_until(up, "all have come")
        job = told.split("submitted job ")[1].split(",")[0]
        if ended_by == "scontrol requeue":
            slurm_here.run("scontrol", "requeue", job)
        else:
            slurm_here.run("scancel", "--batch", "--signal=TERM", job)
        told = read_until(up, "all have come")
        assert "step 3: checkpoint written at the signal" in told
        assert "resume True" in told
        assert "slipstream: scontrol" not in told
        hold.unlink()
        assert up.wait(timeout=100) == 0


def test_ctrl_c_stops_the_job_and_it_is_not_queued_again(slurm_here: SlurmCluster, run_file: Path, hold: Path) -> None:
    with Typed("up", str(run_file), "--on", "slurm", *SMALL) as up:
        read_until(up, "all have come")
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=100) == 130
    assert slurm_here.run("squeue", "--noheader") == ""
    assert not [word for word in every_command_line() if "fake_vllm" in word]


def test_a_job_that_is_cancelled_from_outside_is_not_queued_again(
    slurm_here: SlurmCluster, run_file: Path, hold: Path
) -> None:
    with Typed("up", str(run_file), "--on", "slurm", *SMALL) as up:
        job = read_until(up, "all have come").split("submitted job ")[1].split(",")[0]
        slurm_here.run("scancel", job)
        told, _ = up.communicate(timeout=100)
    assert up.returncode == 143, told
    assert f"job {job} ended as cancelled" in told
    assert slurm_here.run("squeue", "--noheader") == ""


def test_a_run_directory_may_have_percent_signs_and_spaces(
    slurm_here: SlurmCluster, run_file: Path, hold: Path
) -> None:
    folder = run_file.parent / "50%j done"
    with Typed("up", str(run_file), "--on", "slurm", "--run.dir", str(folder), *SMALL) as up:
        read_until(up, "all have come")  # which is in the job's log
        hold.unlink()
        assert up.wait(timeout=100) == 0


def every_command_line() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["--cluster.partition", "nope"],
            "cluster.partition = nope: there is no such partition; the partitions are: main, spot",
        ),
        (
            ["--cluster.worker_partition", "nope"],
            "cluster.worker_partition = nope: there is no such partition; the partitions are: main, spot",
        ),
        (
            ["--cluster.server_gpus", "3"],
            "cluster.server_gpus = 3: no node of partition main has more than 2 GPUs; lower it, or name another "
            "partition",
        ),
        (
            ["--cluster.learner_nodes", "2"],
            "cluster.learner_nodes = 2: learner.ranks = 1 cannot be divided among them; choose a number that divides "
            "it",
        ),
        (
            ["--cluster.head_cpus", "9"],
            "cluster.head_cpus = 9: no node of partition main has more than 8 CPU cores; lower it, or name another "
            "partition",
        ),
        (
            ["--cluster.worker_memory_gb", "100"],
            "cluster.worker_memory_gb = 100: no node of partition main has more than 15.625 GB of memory; lower it, or "
            "name another partition",
        ),
        (
            ["--cluster.sbatch", '["--reservation=nope"]'],
            "--on slurm: SLURM refuses the job: sbatch: error: Batch job submission failed: Requested reservation is "
            "invalid",
        ),
    ],
)
def test_what_slurm_does_not_have_is_one_line_and_nothing_is_placed(
    slurm_here: SlurmCluster, run_file: Path, hold: Path, settings: list[str], told: str
) -> None:
    assert output("up", str(run_file), "--on", "slurm", *settings) == (2, f"slipstream: {told}\n")
    assert slurm_here.run("squeue", "--noheader") == ""


def test_without_slurm_or_its_controller_one_line_says_so(
    run_file: Path, hold: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load(run_file)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--on slurm: there is no sbatch on PATH"):
        slurm.check(config)
    (tmp_path / "sbatch").touch(mode=0o755)
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1\n")
    sinfo.chmod(0o755)
    with pytest.raises(ConfigError, match="does not answer: sinfo: slurm_load_partitions: Unable to contact"):
        slurm.check(config)


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a\\b"])
def test_a_path_that_a_script_cannot_hold_is_refused(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot stand in a batch script"):
        slurm.script(load(run_file), str(run_file), [], False)


def test_another_release_on_a_node_is_one_line(run_file: Path, hold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_RELEASE", "0.0.1")
    code, said = output("worker", str(run_file))
    assert code == 2
    assert said.startswith("slipstream: SLIPSTREAM_RELEASE = 0.0.1: the run has that release, and ")
    assert said.count("\n") == 1


def test_a_job_that_slurm_starts_again_goes_on_only_if_a_step_was_made(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(run_file)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not slurm_job.to_resume(config, resume=False)
    run_directory(run_file).mkdir(parents=True)
    save_ledger(run_file)
    assert slurm_job.to_resume(config, resume=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert not slurm_job.to_resume(config, resume=False)
    assert slurm_job.to_resume(config, resume=True)


def test_numbers_of_slurm_are_read() -> None:
    assert slurm_job.counts("2(x3),1") == [2, 2, 2, 1]
    assert [slurm._gpus(text) for text in ("gpu:a100:8(S:0-1),nvme:1", "gpu:2", "(null)")] == [8, 2, 0]


def test_a_job_that_fails_has_its_code(slurm_here: SlurmCluster, run_file: Path, tmp_path: Path) -> None:
    job = slurm.submit(f"#!/bin/bash\n#SBATCH --output={tmp_path}/log\necho words\nexit 5\n")
    words = f"job {job} ended as failed with code 5; its log: {tmp_path}/log"
    with pytest.raises(RunFailed, match=words) as failed, Stops() as stops:
        slurm._Job(job, tmp_path / "log", load(run_file)).follow(stops)
    assert failed.value.code == 5
