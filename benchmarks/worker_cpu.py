"""CPU time of a worker per two-turn episode, against the fake vLLM in another process. Prints JSON.

python -m benchmarks.worker_cpu [--groups 64] [--group-size 8] [--plain]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import uvloop

from protocol.config import RunConfig
from rollout_worker.chat.template import ChatFormat
from rollout_worker.inference.client import InferenceClient
from rollout_worker.task import Task
from rollout_worker.task.tools import ToolBox
from rollout_worker.ticket_loop import Worker
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for

WARM_UP_GROUPS = 8


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def accuracy(completions: list[list[dict[str, str]]], answer: list[int], **columns: object) -> list[float]:
    return [float(str(right) in turns[-1]["content"]) for turns, right in zip(completions, answer, strict=True)]


def task() -> Task:
    rows = [
        {"prompt": [{"role": "user", "content": f"Multiply {a} by {a + 7}."}], "answer": a * (a + 7)}
        for a in range(100, 1000)
    ]
    return Task(dataset=rows, tools=[multiply], rewards=[accuracy])


def config(folder: Path, group_size: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "task": {"path": f"{__file__}:task"},
            "rollout": {"group_size": group_size, "max_turn_tokens": 64, "max_episode_tokens": 256},
            "vllm": {"max_model_len": 1024, "max_num_seqs": 1024},
        }
    )


async def measure(folder: Path, url: str, groups: int, group_size: int, stream: bool) -> dict[str, float | int | bool]:
    run = config(folder, group_size)
    the_task = task()
    tools = ToolBox(the_task.tools)
    chat = ChatFormat.load(run.model.path, tools.schemas)
    spent = []
    async with InferenceClient(60.0) as client:
        for count in (WARM_UP_GROUPS, groups):
            queue = StandInQueue(serving_at(url, version=1), deque(tickets_for(count, group_size)))
            worker = Worker(run, the_task, queue, "bench", chat, tools, client, stream_first_turn=stream)
            wall, cpu = time.perf_counter(), time.process_time()
            await worker.run(asyncio.Event())
            spent = [time.process_time() - cpu, time.perf_counter() - wall]
            if any(rollout.reward != 1.0 or rollout.turns != 2 for group in queue.groups for rollout in group.rollouts):
                raise RuntimeError(f"episodes did not run as scripted: {queue.failures or queue.groups[0]}")
    episodes = groups * group_size
    return {
        "cpu_ms_per_episode": round(1000 * spent[0] / episodes, 3),
        "wall_ms_per_episode": round(1000 * spent[1] / episodes, 3),
        "episodes": episodes,
        "group_size": group_size,
        "streamed": stream,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="first turns as plain requests, not streamed")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "tests.kit.fake_vllm", "--port", "0", "--version", "1", "--latency", "0.02"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            model = save_model_folder(Path(folder))
            result = runner.run(measure(model, url, arguments.groups, arguments.group_size, not arguments.plain))
        finally:
            server.terminate()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
