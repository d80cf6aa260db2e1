"""A real SLURM on loopback for the tests of one process: munged, slurmctld and four slurmd, of Debian's packages
`slurm-wlm` and `munge`.

Nodes n1 to n4 have 8 CPUs and 2 GPUs as SLURM counts them; partition `spot` has n3 alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.deploy.clusters import slurm
from slipstream.protocol.config import RunConfig
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard
from tests.kit.ports import free_port

STARTS_WITHIN_S = 30.0

# Seconds between two changes of a partition. SLURM looks at what waits when something changes, which on an idle cluster
# nothing does for three minutes.
CHANGES_EVERY_S = 2.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3", "n4")

# Any two device files count as GPUs.
GRES = "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n"

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
# A job that is requeued waits until its credential has expired; below 5 s SLURM takes two minutes.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
KillWait=5
JobRequeue=1
{nodes}
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=spot Nodes=n3 MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return all(shutil.which(name, path=_path()) for name in PROGRAMS)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


class SlurmCluster:
    """Start it, set its `environment` for SLURM's commands, and close it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-slurm-"))
        self.folder.chmod(0o755)  # munged refuses a folder that others could write
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        munge = self.folder / "munge"
        for each in (munge, self.folder / "state"):
            each.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        nodes = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 "
            f"RealMemory=16000 Gres=gpu:2 State=UNKNOWN"
            for name in NODES
        ]
        user = Path.home().owner() if os.geteuid() else "root"
        conf = CONF.format(
            host=socket.gethostname(), port=free_port(), folder=self.folder, user=user, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(conf, encoding="utf-8")
        (self.folder / "gres.conf").write_text(
            "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n", encoding="utf-8"
        )
        names = ("key", "socket", "pid", "seed", "log")
        flags = [f"--{name}{'' if name == 'socket' else '-file'}={munge / name}" for name in names]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._guard = ProcessGuard(grace_s=5)
        self._over = threading.Event()
        try:
            self._start("munged", "--foreground", "--force", *flags)
            until_true(lambda: (munge / "socket").exists(), "munged makes no socket")
            self._start("slurmctld", "-D")
            for name in NODES:
                self._start("slurmd", "-D", "-N", name)
            until_true(lambda: self._states() == ["idle"] * len(NODES), "SLURM does not come up")
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._change, daemon=True).start()

    def _change(self) -> None:
        while not self._over.wait(CHANGES_EVERY_S):
            with suppress(AssertionError, subprocess.TimeoutExpired):  # it is busy
                self.run("scontrol", "update", "PartitionName=spot", "State=UP")

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("ab")
        with log:
            env = {**os.environ, **self.environment, "PATH": _path()}
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._daemons.append(process)
        self._guard.add(process.pid)  # it ends them if this process is killed

    def _states(self) -> list[str]:
        try:
            return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
        except AssertionError:  # slurmctld does not listen yet
            return []

    def run(self, *command: str) -> str:
        """Return the output of one of SLURM's commands."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self.environment, "PATH": _path()},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def allocation(self, config: RunConfig, run_file: Path) -> dict[str, str]:
        """Start a job as `slipstream up --on slurm` does, which only stays, and return its environment."""
        slurm.write_tokens(config)
        (config.run_dir / "logs").mkdir(exist_ok=True)
        lines = slurm.script(config, str(run_file), [], resume=False).splitlines()
        told = self.folder / "environment"
        told.unlink(missing_ok=True)
        stays = f"env -0 | grep -z SLURM >{told}.part; mv {told}.part {told}; exec sleep 600"
        slurm.submit("\n".join([*lines[:-1], stays, ""]))
        until_true(told.exists, "the job does not start")
        return dict(each.split("=", 1) for each in told.read_text().split("\0") if each)

    def clear(self) -> None:
        """Cancel all jobs."""
        self.run("scancel", "--me", "--full", "--signal=KILL")

        def none_is_left() -> bool:
            self.run("scancel", "--me")  # again, as one that was killed may wait in the queue once more
            return not self.run("squeue", "--noheader").strip()

        until_true(none_is_left, "a job does not end")

    def close(self) -> None:
        """End all jobs and daemons, and remove the folder."""
        self._over.set()
        conf = self.environment["SLURM_CONF"]
        env = {**os.environ, "SLURM_CONF": conf, "PATH": _path()}
        subprocess.run(["scancel", "--me", "--full", "--signal=KILL"], env=env, timeout=30, capture_output=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in self._daemons:
                if daemon.poll() is None:
                    daemon.send_signal(number)
            deadline = time.monotonic() + 5
            while [one for one in self._daemons if one.poll() is None] and time.monotonic() < deadline:
                time.sleep(0.05)
        for daemon in self._daemons:
            self._guard.remove(daemon.pid)
        self._guard.close(5)
        shutil.rmtree(self.folder, ignore_errors=True)


def until_true(true: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)
