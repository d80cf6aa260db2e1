"""A run of the multiply example over hosts with addresses of their own, whose links are cut in turn.

    python -m tests.links [--cut 60] [--steps 400] [--servers 2] [--ranks 2] [--workers 3] [--postgres]
        [--links queue worker-0]

Queue, with `--postgres` its PostgreSQL, each vLLM server, each rank of the learner and each worker is a host
(`tests.kit.network`): 20 ms to the others, 1 % of the frames lost, 50 Mbit/s. Each link is cut without a word for
`--cut` seconds, then a worker gets another address. Prints a line of JSON for each: which optimiser steps were made
meanwhile, what the status said of it, and how many seconds after the mend the run made its next step, and the host took
part again. At the end the ledger is audited as in `tests.nights.audit`. Needs root, and real vLLM servers need a core
each. Exit code 1 if something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.protocol import access
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import load
from slipstream.protocol.status import Status
from slipstream.rollout_queue.store import open_for_reading
from tests.kit.network import Host, Network, network, why_not
from tests.kit.postgres import killable_cluster
from tests.nights.audit import of_files

EXAMPLE = Path(__file__).parent.parent / "examples" / "multiply"

# A worker reports every few seconds.
SILENT_S = 15.0

# Bounds, in seconds: the first step, a step after a mended link, and the end of the run.
STARTS_WITHIN_S, GOES_ON_WITHIN_S, ENDS_WITHIN_S = 300.0, 300.0, 600.0


class Run:
    """The processes of a run, each in its own host."""

    def __init__(self, there: Network, folder: Path, arguments: argparse.Namespace, store: str) -> None:
        self.there, self.folder = there, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._queue = f"http://{there.hosts['queue'].address}:8200"
        self._settings = [
            *("--model.path", str(arguments.model.resolve()), "--run.name", "links", "--run.dir", str(folder)),
            *("--queue.host", there.hosts["queue"].address, "--weight_sync.host", there.hosts["rank-0"].address),
            *("--rollout.group_size", "4", "--learner.groups_per_step", "4", "--learner.steps", str(arguments.steps)),
            *("--learner.checkpoint_every", "50", "--queue.ticket_timeout_s", "20", "--queue.lease_timeout_s", "30"),
            *("--vllm.max_num_seqs", "16", "--worker.episodes", "16", "--vllm.count", "0", "--vllm.servers", "[]"),
            *("--queue.store", store),
        ]
        self._token = secrets.token_hex(16)
        self.config = load(EXAMPLE / "run.toml", [*self._settings, "--queue.token", self._token])

    def start(self, ranks: int, servers: int, workers: int) -> None:
        """Start every process, each with the token of its role."""
        file = str(EXAMPLE / "run.toml")
        self._start("queue", "queue", "run", file)
        for number in range(servers):
            host = self.there.hosts[f"server-{number}"]
            own = ("--vllm.host", host.address, "--name", host.name, "--join", self._queue)
            self._start(host.name, "vllm", file, *own)
        for number in range(ranks):
            host = self.there.hosts[f"rank-{number}"]
            meet = (f"--master-addr={self.there.hosts['rank-0'].address}", "--master-port=29500")
            size = (f"--nnodes={ranks}", "--nproc-per-node=1", f"--node-rank={number}")
            command = [sys.executable, "-m", "torch.distributed.run", *size, *meet, "-m", "slipstream.learner", file]
            self._run(host, self._token, *command, "--queue", self._queue, *self._settings)
        for number in range(workers):
            host = self.there.hosts[f"worker-{number}"]
            self._start(host.name, "worker", file, "--queue", self._queue, "--name", host.name, role="worker")

    def _start(self, name: str, *command: str, role: access.Role | None = None) -> None:
        token = access.derive_token(self._token, role) if role else self._token
        self._run(
            self.there.hosts[name], token, sys.executable, "-m", "slipstream.deploy.cli", *command, *self._settings
        )

    def _run(self, host: Host, token: str, *command: str) -> None:
        # gloo would take the address that this machine's name has.
        own = {"SLIPSTREAM_TOKEN": token, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.device}
        with (self.folder / f"{host.name}.txt").open("wb") as log:
            self.processes[host.name] = subprocess.Popen(
                host.inside(*command), env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT
            )

    async def status(self) -> Status | None:
        """Return the status; None if the queue does not answer now."""
        with suppress(QueueError, TimeoutError):
            async with asyncio.timeout(5), QueueClient(self._queue, self._token, patience_s=4) as client:
                return await client.status()
        return None

    def step(self) -> int:
        """Return the last step that rank 0 has written down."""
        with suppress(OSError, IndexError, ValueError):
            lines = (self.folder / "links" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return int(json.loads(lines[-1])["step"])
        return 0

    async def step_after(self, step: int, within_s: float) -> float:
        """Wait until a step later than `step` is made; return the seconds.

        Raises:
            AssertionError: None was made in time, or a process has ended.
        """
        began = time.monotonic()
        while self.step() <= step:
            ended = {name: process.poll() for name, process in self.processes.items() if process.poll() is not None}
            assert not ended, f"ended: {ended}\n{self.tail(next(iter(ended)))}"
            assert time.monotonic() - began < within_s, f"no step after {step} within {within_s:g} s"
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    def tail(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text(errors="replace")[-3000:]

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


async def cut(run: Run, name: str, seconds: float) -> dict[str, Any]:
    """Cut a host's link, mend it, and tell what came of it."""
    before, began, said = run.step(), time.monotonic(), ""
    run.there.cut(name)
    while time.monotonic() - began < seconds:
        await asyncio.sleep(1)
        if name not in ("queue", "postgres") and not said and (status := await run.status()) is not None:
            said_after = time.monotonic() - began
            said = named_in(status, name, said_after)
    run.there.join(name)
    made = run.step() - before
    goes_on = await run.step_after(run.step(), GOES_ON_WITHIN_S)
    return {
        "cut": name,
        "seconds": seconds,
        "steps meanwhile": made,
        "said": said,
        "said after s": round(said_after, 1) if said else None,
        "next step after s": round(goes_on, 1),
        "takes part after s": await _takes_part(run, name),
    }


async def _takes_part(run: Run, name: str) -> float | None:
    """Return the seconds until a server serves, or a worker is heard of, again."""
    if not name.startswith(("server", "worker")):
        return None
    began = time.monotonic()
    while time.monotonic() - began < GOES_ON_WITHIN_S:
        status = await run.status()
        if status is not None and not named_in(status, name):
            return round(time.monotonic() - began, 1)
        await asyncio.sleep(0.5)
    raise AssertionError(f"{name} does not take part again")


def named_in(status: Status, name: str, within_s: float = 0.0) -> str:
    """Return what the status says is wrong with a host, of the learner's what it has said `within_s`; "" if nothing."""
    for server in status.servers:
        if server.name == name and server.state != "serving":
            return f"{server.state}: {server.reason}"
    for worker in status.workers:
        if worker.worker_id == name and worker.seen_s_ago > SILENT_S:
            return f"not seen for {worker.seen_s_ago:.0f} s"
    if name.startswith("rank"):
        new = [each.text for each in status.notices if each.since_s < within_s]
        return (status.stall.why or "") if status.stall.stalled else " ".join(new)
    return ""


async def play(arguments: argparse.Namespace) -> int:
    names = ["queue", *(["postgres"] if arguments.postgres else []), *(f"server-{i}" for i in range(arguments.servers))]
    names += [f"rank-{i}" for i in range(arguments.ranks)] + [f"worker-{i}" for i in range(arguments.workers)]
    with (
        network(names, arguments.latency, arguments.loss, arguments.mbit) as there,
        tempfile.TemporaryDirectory() as folder,
    ):
        cluster = killable_cluster(there.hosts["postgres"]) if arguments.postgres else None
        run = Run(there, Path(folder), arguments, "sqlite" if cluster is None else cluster.new_database())
        try:
            run.start(arguments.ranks, arguments.servers, arguments.workers)
            print(json.dumps({"first step after s": round(await run.step_after(0, STARTS_WITHIN_S), 1)}), flush=True)
            for name in arguments.links or names:
                print(json.dumps(await cut(run, name, arguments.cut)), flush=True)
            if "worker-0" in there.hosts:
                host = there.hosts["worker-0"]
                host.move(f"{host.address.rpartition('.')[0]}.200")
                goes_on = await run.step_after(run.step(), GOES_ON_WITHIN_S)
                print(json.dumps({"moved": "worker-0", "next step after s": round(goes_on, 1)}), flush=True)
            learner = run.processes["rank-0"]
            code = await asyncio.to_thread(learner.wait, ENDS_WITHIN_S)
            broken = of_files(Path(folder) / "links", arguments.steps, open_for_reading(run.config))
            print(json.dumps({"ended with": code, "broken": broken}), flush=True)
            return int(bool(code or broken))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"links: {error}", file=sys.stderr)
            for name in run.processes:
                print(f"--- {name}\n{run.tail(name)}", file=sys.stderr)
            return 1
        finally:
            run.end()
            if cluster is not None:
                cluster.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "models" / "seed-0")
    parser.add_argument("--links", nargs="*", help="hosts to cut off, by name; default: all, one after the other")
    parser.add_argument("--cut", type=float, default=60.0, help="seconds")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--postgres", action="store_true", help="the queue stores in PostgreSQL on another host")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds, in one direction")
    parser.add_argument("--loss", type=float, default=0.01, help="share of the frames")
    parser.add_argument("--mbit", type=float, default=50.0)
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"links: skipped: {reason}")
        return 0
    load(EXAMPLE / "run.toml", ["--model.path", str(arguments.model)])
    return asyncio.run(play(arguments))


if __name__ == "__main__":
    sys.exit(main())
