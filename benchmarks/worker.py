"""A worker's cost against the fake vLLM, and TRL's rollout loop beside it where it is installed. Prints JSON.

    python -m benchmarks.worker --json [--rounds 3] [--groups 64] [--turns 2]

Every way runs in a process of its own, all of them once a round, in turning order; figures are medians over the rounds.
CPU seconds are those of the way's process, all threads. `cpu_us_per_token`: sampled tokens. `lag_p99_ms`: CPU
milliseconds that the loop's thread spent between two moments at which a waiting task could run, 99th percentile;
`lag_wall_p99_ms` the same on the clock, which counts what else runs on the machine. TRL's loop has no lag figure: it
runs user code and rendering on its loop. `judge_overhead`: with resets and judges of 2 s each, 128 episodes and as many
slots, the share of the time above what they take without and 4 s; `judge_overhead_more`: with five times as many
episodes, or `--groups`, which have to open as slots fall idle. `chat_us_per_turn`: suffix and parse of one turn, by
renderer and template. `endpoint_us_per_turn`: CPU microseconds of the worker's event loop that a turn takes more where
agents in another process ask for it at their endpoints than in the native loop; `endpoint_process_us_per_turn` the same
of the whole process: with the threads of user code, in which agents wait here, and where the native loop's tools run.
`endpoint` has the way's own figures.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.endpoint import endpoint
from benchmarks.worker_ways import WAYS as OTHER_WAYS
from benchmarks.worker_ways import chat_us_per_turn
from tests.kit.fake_vllm.tokenizer import save_model_folder

TURN_S = 0.02
WAYS = {**OTHER_WAYS, "endpoint": endpoint}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the default, and the only format")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 episodes in a measurement")
    parser.add_argument("--turns", type=int, default=2, help="turns of an episode, all but the last with a tool call")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(WAYS[arguments.way](arguments.url, arguments.model, arguments.groups, arguments.turns)))
        return
    with tempfile.TemporaryDirectory() as folder, fake_server(arguments.turns) as url:
        save_model_folder(Path(folder), chat_template=the_same_template())
        print(json.dumps(compare(url, folder, arguments.rounds, arguments.groups, arguments.turns)))


def compare(url: str, model: str, rounds: int, groups: int, turns: int) -> dict[str, Any]:
    """Medians by way, and the ratios to TRL's where it is installed."""
    ways = [way for way in WAYS if way != "trl" or importlib.util.find_spec("trl")]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(run(way, url, model, groups, turns))
    result: dict[str, Any] = {
        way: {name: round(statistics.median(figures[name] for figures in runs), 3) for name in runs[0]}
        for way, runs in found.items()
    }
    if "trl" in result:
        for figure in ("cpu_ms_per_episode", "cpu_us_per_token", "wall_ms_per_episode"):
            result[f"{figure}_trl_ratio"] = round(result["ours"][figure] / result["trl"][figure], 3)
    result |= result.pop("waiting")
    for figure, name in (("loop_cpu", "endpoint_us_per_turn"), ("cpu", "endpoint_process_us_per_turn")):
        figure = f"{figure}_ms_per_episode"
        result[name] = round(1000 * (result["endpoint"][figure] - result["ours"][figure]) / turns, 1)
    result["chat_us_per_turn"] = asyncio.run(chat_us_per_turn())
    result["turns"] = turns
    return result


def run(way: str, url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    """One measurement, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.worker", "--way", way, "--url", url, "--model", model]
    command += ["--groups", str(groups), "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def the_same_template() -> str | None:
    """A template that TRL knows, for all ways alike; None, the tiny model's own, where TRL is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3.jinja"
    return file.read_text(encoding="utf-8")


@contextmanager
def fake_server(turns: int) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.kit.fake_vllm", "--port", "0", "--version", "1"]
    command += ["--latency", str(TURN_S), "--turns", str(turns)]
    command += ["--before", "<think>\n\n</think>\n\n"]  # else TRL's rendering drifts, and masks what was sampled
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
