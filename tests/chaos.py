"""Kills at random under the supervisor, with a real vLLM: `python -m tests.chaos [--seeds 0 1 2 3 4]`.

Each seed is one run of the multiply example under `slipstream up`, in which a queue, worker, vLLM server or learner is
killed (SIGKILL, its whole process group) every few steps. The supervisor starts what died again; when the learner
dies the run ends, and is resumed. Every run must reach its last step; then its ledger is audited: each ticket ended
once, no row trained twice on the surviving time line (I1), steps 1..n each once, versions increasing, staleness within
its bound (I2). Prints one JSON object a run; exit code 1 if any rule was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from rollout_queue.store.sqlite import SqliteReader
from rollout_queue.store.sqlite_file import FILE_NAME
from tests.kit.ports import free_port

EXAMPLE = Path(__file__).parent.parent / "examples" / "multiply"
STEPS = 40
LIMIT_S = 900.0
VICTIMS = {"queue": 3, "worker": 3, "learner": 2, "vllm": 1}
MAX_SERVER_KILLS = 2  # each costs half a minute
OVERRIDES = [
    *("--rollout.group_size", "4", "--learner.groups_per_step", "4", "--learner.checkpoint_every", "5"),
    *("--queue.ticket_timeout_s", "5", "--queue.lease_timeout_s", "10", "--learner.steps", str(STEPS)),
    *("--deploy.restart", "20"),
]


def victims(supervisor: psutil.Process) -> dict[str, int]:
    """Process ids of the supervisor's children by kind."""
    found = {}
    for child in supervisor.children():
        line = " ".join(child.cmdline())
        if "vllm.entrypoints" in line:
            found["vllm"] = child.pid
        for kind in ("queue", "worker", "learner"):
            if f"deploy.cli {kind} " in line:
                found[kind] = child.pid
    return found


def step_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def kill_now_and_then(
    supervisor: subprocess.Popen[bytes], folder: Path, rng: random.Random, killed: Counter[str], until: float
) -> int:
    """Until the supervisor ends, or is ended at time `until`; returns its exit code.

    A kill comes one to five steps after the one before, so that a slow machine makes progress too, and every third
    time another one follows at once, which meets processes at their start.
    """
    process = psutil.Process(supervisor.pid)
    due = step_of(folder) + rng.randint(1, 5)
    while supervisor.poll() is None:
        if time.monotonic() > until:
            supervisor.terminate()
        time.sleep(0.1)
        if step_of(folder) < due or supervisor.poll() is not None:
            continue
        for _ in range(rng.choice([1, 1, 2])):
            time.sleep(rng.uniform(0, 2))
            try:
                alive = victims(process)
            except psutil.Error:
                break
            if killed["vllm"] >= MAX_SERVER_KILLS:
                alive.pop("vllm", None)
            if not alive:
                break
            kind = rng.choices(list(alive), weights=[VICTIMS[name] for name in alive])[0]
            try:
                os.killpg(alive[kind], signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed[kind] += 1
        due = step_of(folder) + rng.randint(1, 5)
    return supervisor.wait()


def broken_rules(folder: Path, group_size: int, last_step: int = STEPS) -> list[str]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    rows = SqliteReader(folder / FILE_NAME).read_ledger()
    trained = [row.index for row in rows if row.trained]
    outcomes = Counter("trained" if row.trained else str(row.state) for row in rows)
    versions = [line["version"] for line in steps]
    rules = {
        "steps are not 1..n": [line["step"] for line in steps] == list(range(1, last_step + 1)),
        "versions do not increase": versions == sorted(set(versions)),
        "a row was trained twice": len(trained) == len(set(trained)),
        "a ticket has not ended": set(outcomes) <= {"trained", "dropped", "reissued"},
        "a drop has no reason": all(row.reason for row in rows if row.state == "dropped"),
        "the ledger and the steps disagree": len(trained) == sum(line["groups_trained"] for line in steps),
        "the ledger and the summary disagree": len(trained) == summary["groups_trained"],
        "a token was too old": summary["staleness_max"] <= 4,
    }
    return [broken for broken, holds in rules.items() if not holds]


def run(seed: int, model: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    starts = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as runs:
        folder = Path(runs) / "chaos"
        command = [
            *(sys.executable, "-m", "deploy.cli", "up", str(EXAMPLE / "run.toml"), "--model.path", str(model)),
            *("--run.name", "chaos", "--run.dir", runs, "--run.seed", str(seed)),
            *("--queue.port", str(free_port()), "--vllm.port", str(free_port()), *OVERRIDES),
        ]
        code = -1
        while time.monotonic() - started < LIMIT_S:
            resume = ["--resume"] if starts else []
            starts += 1
            supervisor = subprocess.Popen([*command, *resume], stdout=sys.stderr)
            code = kill_now_and_then(supervisor, folder, rng, killed, started + LIMIT_S)
            if code == 0:
                break
        broken = broken_rules(folder, 4) if code == 0 else [f"ended with {code} at step {step_of(folder)}"]
        if broken:
            for log in sorted((folder / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - started),
        "starts": starts,
        "killed": dict(killed),
        "broken": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--model", type=Path, default=EXAMPLE / "models" / "seed-0")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "build_model.py"), "--out", str(arguments.model)], check=True)
    results = []
    for seed in arguments.seeds:
        results.append(run(seed, arguments.model.resolve()))
        print(json.dumps(results[-1]), flush=True)
    return int(any(result["broken"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
