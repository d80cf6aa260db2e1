"""Measures a worker's cost against the fake vLLM, next to TRL's rollout loop if it is installed. Prints JSON.

    python -m benchmarks.worker --json [--rounds 3] [--groups 64] [--turns 2]

Every way runs in a separate process, once per round, in an order that rotates. Figures are medians over the rounds. CPU
seconds are those of all threads of the way's process.

cpu_us_per_token: CPU microseconds per sampled token.
lag_p99_ms: CPU milliseconds that the loop's thread spent between two moments at which a waiting task could run, 99th
    percentile. TRL has no lag figure: it runs user code and rendering on its loop.
lag_wall_p99_ms: The same by the wall clock, which also counts other processes on the machine.
judge_overhead: Run time with resets and judges of 2 s each, 128 episodes and as many slots: the share above the time
    without these waits plus 4 s.
judge_overhead_more: The same with five times as many episodes, or `--groups`. They have to open as slots fall idle.
chat_us_per_turn: Suffix and parse of one turn, by renderer and template.
endpoint_us_per_turn: CPU microseconds of the worker's event loop that a turn takes more than in the native loop if
    agents in another process ask for it at their endpoints.
endpoint_process_us_per_turn: The same for the whole process. It includes the threads of user code, in which agents wait
    here, and in which the native loop's tools run.
endpoint: All figures of that way; `responses` and `messages`: the same where agents ask by those APIs, and
    `responses_us_per_turn` and the like.
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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.endpoint import endpoint
from benchmarks.worker_ways import WAYS as OTHER_WAYS
from benchmarks.worker_ways import chat_us_per_turn
from tests.kit.fake_vllm.tokenizer import save_model_folder

TURN_S = 0.02
WAYS = {
    **OTHER_WAYS,
    "endpoint": endpoint,
    "responses": partial(endpoint, api="responses"),
    "messages": partial(endpoint, api="messages"),
}


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
    """Run all ways and return the medians by way, with ratios to TRL's if it is installed."""
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
        for way in ("endpoint", "responses", "messages"):
            more = 1000 * (result[way][figure] - result["ours"][figure]) / turns
            result[name.replace("endpoint", way)] = round(more, 1)
    result["chat_us_per_turn"] = asyncio.run(chat_us_per_turn())
    result["turns"] = turns
    return result


def run(way: str, url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    """Measure one way in a separate process.

    Returns:
        The way's figures, by name.

    Raises:
        RuntimeError: If the process fails.
    """
    command = [sys.executable, "-m", "benchmarks.worker", "--way", way, "--url", url, "--model", model]
    command += ["--groups", str(groups), "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def the_same_template() -> str | None:
    """Return a chat template that TRL knows, for all ways; None if TRL is not installed, for the tiny model's own."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3.jinja"
    return file.read_text(encoding="utf-8")


@contextmanager
def fake_server(turns: int) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.kit.fake_vllm", "--port", "0", "--version", "1"]
    command += ["--latency", str(TURN_S), "--turns", str(turns)]
    command += ["--before", "<think>\n\n</think>\n\n"]  # Otherwise TRL's rendering drifts, and masks sampled tokens.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
