"""Compares the tokens a second of a run with those of its vLLM server alone.

    python -m benchmarks.server_share examples/pretrained/run.toml [--steps 16] [--first 5] [--section.key value ...]

The run trains as usual, on two cores or more, and keeps a record of its groups. Its rate counts from step `--first` on.
Then the same server, on the same core, is saturated by a plain client that asks for the same first turns: the prompts
of the record, each as often as it was asked for, and as many tokens as were sampled. Prompts of one group find each
other in the prefix cache, those of an earlier pass do not, as after a publication. Tasks of one turn alone compare.

Prints JSON: tokens a second of both, their ratio `server_share`, and `learner_waits`, the share of the run's time in
which the learner waited for groups. Where it seldom waits, the learner is the limit, not the server; then
`--learner.script benchmarks/publish_only.py` shows what publications alone take from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.trl_async import serving
from slipstream.deploy.servers import vllm_server
from slipstream.deploy.servers.devices import place_devices
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.trained_record import RECORD_FOLDER, read_record

ALONE_S = 60.0


def run(run_file: Path, folder: Path, steps: int, settings: list[str]) -> Path:
    """Train, and return the run directory."""
    given = ["--run.dir", str(folder), "--run.name", "share", "--learner.steps", str(steps), "--queue.record", "true"]
    command = [sys.executable, "-m", "slipstream.deploy.cli", "up", str(run_file), *given, *settings]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "share"


def rate_of_run(run_dir: Path, first: int) -> tuple[float, float]:
    """Return sampled tokens a second from step `first` on, those of dropped groups included, and the share of the time
    in which the learner waited."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line.get("step", 0) >= first]
    seconds = sum(line["step_time"] for line in counted)
    return sum(line["tokens_sampled"] for line in counted) / seconds, sum(line["wait_s"] for line in counted) / seconds


def turns_of_run(run_dir: Path) -> list[tuple[list[int], int]]:
    """Return the prompt and the number of sampled tokens of each rollout in the record, group by group."""
    found = []
    for step in read_record(run_dir / RECORD_FOLDER).steps:
        for place in step.trained:
            for rollout in place.group().rollouts:
                segment = rollout.segments[0]
                first = int(segment.loss_mask.argmax())
                found.append((segment.token_ids[:first].tolist(), int(segment.loss_mask.sum())))
    return found


async def rate_alone(url: str, turns: list[tuple[list[int], int]], at_once: int) -> float:
    """Saturate the server for `ALONE_S`. Returns sampled tokens a second, without the first and the last pass."""
    made: list[tuple[float, int]] = []
    ends = time.monotonic() + ALONE_S
    waiting = iter([(number, *turn) for number in range(10_000) for turn in turns])

    async def ask(session: aiohttp.ClientSession) -> None:
        for number, prompt, count in waiting:
            if time.monotonic() >= ends:
                return
            sampling = {
                "max_tokens": count,
                "min_tokens": count,
                "temperature": 1.0,
                "logprobs": 0,
                "detokenize": False,
            }
            body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": str(number), "stream": False}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                await response.read()
            made.append((time.monotonic(), count))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(ask(session) for _ in range(at_once)))
    since, until = ends - 0.75 * ALONE_S, ends
    return sum(count for at, count in made if since <= at < until) / (until - since)


def alone(config: RunConfig, turns: list[tuple[list[int], int]]) -> float:
    """Start the run's server on its core, with its settings, and measure it."""
    placed = place_devices(sorted(os.sched_getaffinity(0)), 1)
    assert placed is not None, "one core: the comparison needs two"
    env = vllm_server.environment(config) | {"OMP_NUM_THREADS": str(placed.server_threads)}
    with serving(vllm_server.command(config, 0), env, config.vllm.port, placed.servers):
        os.sched_setaffinity(0, placed.others)
        return asyncio.run(rate_alone(config.vllm.urls[0], turns, config.vllm.max_num_seqs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--first", type=int, default=5, help="step from which on the run's rate counts")
    arguments, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = run(arguments.run_file, Path(scratch), arguments.steps, settings)
        (of_run, waits), turns = rate_of_run(run_dir, arguments.first), turns_of_run(run_dir)
        of_server = alone(load(run_dir / "run.toml"), turns)
    figures: dict[str, Any] = {"run_tokens_per_s": round(of_run, 1), "alone_tokens_per_s": round(of_server, 1)}
    figures |= {"server_share": round(of_run / of_server, 3), "learner_waits": round(waits, 2)}
    print(json.dumps({**figures, "rollouts": len(turns)}))


if __name__ == "__main__":
    main()
