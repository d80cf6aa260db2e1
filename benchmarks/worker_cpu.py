"""CPU time of a worker per two-turn episode, against the fake vLLM in another process. Prints JSON.

python -m benchmarks.worker_cpu [--groups 64] [--group-size 8] [--plain] [--no-messages]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from rollout_worker.chat import build_chat_format
from rollout_worker.inference.client import InferenceClient
from rollout_worker.task.tools import ToolBox
from rollout_worker.ticket_loop import Worker
from rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for
from tests.kit.worker import row, task

WARM_UP_GROUPS = 8


async def measure(
    folder: Path, url: str, groups: int, group_size: int, stream: bool, keep_messages: bool
) -> dict[str, float | int | bool]:
    run_config = config(
        WORKER,
        model={"path": str(folder)},
        rollout={"group_size": group_size},
        worker={"request_timeout_s": 60.0, "keep_messages": keep_messages},
        vllm={"max_num_seqs": 1024},
    )
    the_task = task(dataset=[row(a, a + 7) for a in range(100, 1000)])
    tools = ToolBox(the_task.tools, run_config.worker.tool_timeout_s)
    chat = build_chat_format(run_config, tools.schemas)
    spent = []
    async with UserCode() as code, InferenceClient(run_config.worker.request_timeout_s) as client:
        for count in (WARM_UP_GROUPS, groups):
            queue = StandInQueue(tickets_for(count, group_size), serving_at(url, version=1))
            worker = Worker(run_config, the_task, queue, "bench", chat, tools, client, code, stream_first_turn=stream)
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
        "messages": keep_messages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="first turns as plain requests, not streamed")
    parser.add_argument("--no-messages", action="store_true", help="worker.keep_messages = false")
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
            stream, keep = not arguments.plain, not arguments.no_messages
            result = runner.run(measure(model, url, arguments.groups, arguments.group_size, stream, keep))
        finally:
            server.terminate()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
