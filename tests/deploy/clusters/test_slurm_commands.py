"""What becomes of a run whose job SLURM refuses to tell of for a while; SLURM's commands are scripts here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.clusters import slurm, slurm_job
from slipstream.deploy.run.run_directory import held_alone
from slipstream.protocol.config import ConfigError, load
from tests.deploy.conftest import save_ledger
from tests.deploy.stage import until
from tests.deploy.typed import Typed, output, read_until

COMMANDS = {
    "sinfo": """
for n in 1 2 3; do echo "main*|n$n|8|16000|(null)|idle"; done
""",
    "sbatch": "cat >script; echo RUNNING >state; sleep $SLOW; echo 7",
    "scontrol": """
if [ -s silent ]; then
  sed -i 1d silent; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1
fi
[ $1 != requeue ] || { echo REQUEUED >state; exit; }
[ -e state ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
echo "JobId=7 JobState=$(cat state) Reason=None ExitCode=0:0"
[ ! -e other ] || echo "JobId=8 JobState=$(cat other) Reason=None ExitCode=0:0"
""",
    "scancel": """
[ ! -s silent ] || { sed -i 1d silent; exit 1; }
echo "$*" >>cancelled
case "$*" in 7) echo CANCELLED >state ;; *) [ ! -e obeys ] || echo FAILED >state ;; esac
""",
}


@pytest.fixture
def scripted(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the scripts. `state`: that of the job; `silent`: as many lines as commands that get no answer;
    `obeys`: the job ends at a signal; `cancelled`: how scancel was called."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\ncd {folder}\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    monkeypatch.setenv("SLOW", "0")
    return folder


def test_a_job_is_followed_through_a_time_without_an_answer(scripted: Path, run_file: Path) -> None:
    (scripted / "silent").write_text("once\nand again\n")
    with Typed("up", str(run_file), "--on", "slurm") as up:
        told = read_until(up, "SLURM answers again")
        assert (
            told.count("SLURM does not answer, asking again: scontrol: slurm_load_jobs error: Unable to contact") == 1
        )
        # The job's own node has ended, another has not.
        (scripted / "other").write_text("COMPLETING")
        (scripted / "state").write_text("COMPLETED")
        with pytest.raises(subprocess.TimeoutExpired):
            up.wait(timeout=3)
        (scripted / "other").write_text("COMPLETED")
        assert up.wait(timeout=60) == 0


@pytest.mark.parametrize("finished", [True, False])
def test_how_a_job_ended_that_slurm_has_forgotten_is_read_from_the_run(
    scripted: Path, run_file: Path, finished: bool
) -> None:
    with Typed("up", str(run_file), "--on", "slurm") as up:
        read_until(up, "job 7: RUNNING")
        save_ledger(run_file, step=2, finished=finished)
        (scripted / "state").unlink()
        said, _ = up.communicate(timeout=60)
    assert up.returncode == (0 if finished else 1), said
    assert ("SLURM has forgotten job 7" in said) != finished


@pytest.mark.parametrize("obeys", [True, False])
def test_ctrl_c_ends_the_job_although_scancel_fails_at_first(scripted: Path, run_file: Path, obeys: bool) -> None:
    if obeys:
        (scripted / "obeys").touch()
    with Typed("up", str(run_file), "--on", "slurm") as up:
        read_until(up, "job 7: RUNNING")
        (scripted / "silent").write_text("fails\n" * 4)
        up.send_signal(signal.SIGINT)
        until((scripted / "cancelled").exists)
        if not obeys:  # as a batch script that has only begun
            until(lambda: (scripted / "cancelled").read_text().count("--signal=INT") >= 2)
            (scripted / "obeys").touch()
        assert up.wait(timeout=60) == 130
    assert (scripted / "state").read_text() == "FAILED\n"


def test_ctrl_c_while_the_job_is_submitted_ends_it(
    scripted: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "2")
    (scripted / "obeys").touch()
    with Typed("up", str(run_file), "--on", "slurm") as up:
        until((scripted / "state").exists)
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=60) == 130
    assert (scripted / "state").read_text() == "FAILED\n"


@pytest.mark.parametrize(
    ("state", "then"), [("RUNNING", "REQUEUED"), ("CANCELLED", "CANCELLED"), ("COMPLETING", "COMPLETING")]
)
def test_a_job_is_queued_again_unless_it_was_cancelled(
    scripted: Path, monkeypatch: pytest.MonkeyPatch, state: str, then: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_job, "FOLLOW_EVERY_S", 0.01)
    (scripted / "state").write_text(state)
    (scripted / "silent").write_text("once\n")
    slurm_job.requeue()
    assert (scripted / "state").read_text().strip() == then


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["--worker.count", "9", "--cluster.server_cpus", "4"],
            "the run needs 30 CPU cores (1 x cluster.head_cpus = 8, 1 x cluster.server_cpus = 4, 9 x "
            "cluster.worker_cpus = 2), and partition main has 24: lower these, vllm.count or worker.count, or name "
            "another partition",
        ),
        (
            ["--cluster.time_limit", "2"],
            "cluster.time_limit = 2: the learner is told to end 120 s before the limit, so that the run would make no "
            "step; take more, as 1:00:00 for an hour",
        ),
    ],
)
def test_a_job_that_would_wait_or_be_queued_again_for_ever_is_refused(
    scripted: Path, run_file: Path, settings: list[str], told: str
) -> None:
    assert output("up", str(run_file), "--on", "slurm", *settings) == (2, f"slipstream: {told}\n")
    assert not (scripted / "state").exists()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("3", 180), ("2:30", 150), ("0:02:01", 121), ("1-0", 86400), ("1-0:01", 86460), ("0-0:02", 120)],
)
def test_time_limits_are_read_as_slurm_reads_them(
    scripted: Path, run_file: Path, limit: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(run_file, ["--cluster.time_limit", limit])
    monkeypatch.setattr(slurm, "NOTICE_S", seconds - 1)
    slurm.script(config, str(run_file), [], False)
    monkeypatch.setattr(slurm, "NOTICE_S", seconds)
    with pytest.raises(ConfigError, match=re.escape(f"cluster.time_limit = {limit}: ")):
        slurm.script(config, str(run_file), [], False)


def test_tokens_of_a_run_that_is_on_are_not_replaced(
    run_file: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.write_tokens(load(run_file))
    secret = load(run_file).run_dir / "tokens" / "secret"
    before = secret.read_text()
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "f" * 32)
    with held_alone(load(run_file)):
        code, said = output("render", "slurm", str(run_file), "--workers", "2")
        assert (code, said.count("\n")) == (2, 1)
        assert said.startswith("slipstream: SLIPSTREAM_TOKEN: run small is on with another secret than the one here")
    assert secret.read_text() == before
    assert output("render", "slurm", str(run_file))[0] == 0
    assert secret.read_text() == "f" * 32 + "\n"
