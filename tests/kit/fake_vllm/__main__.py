"""`python -m tests.kit.fake_vllm --port 0`: prints its port, then serves a policy that multiplies with its tool."""

from __future__ import annotations

import argparse
import asyncio
import re

from tests.kit.fake_vllm.engine import FakeEngine
from tests.kit.fake_vllm.policies import persistent, scripted
from tests.kit.fake_vllm.server import FakeVllm, serving
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--version", default="default", help="label of the weights, as weight_info gives it")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that a turn takes")
    parser.add_argument("--jitter", type=float, default=0.0, help="further seconds, by the index of the continuation")
    parser.add_argument("--turns", type=int, default=2, help="turns of an episode, all but the last with a tool call")
    parser.add_argument("--before", default="", help="text in front of every turn")
    arguments = parser.parse_args()
    tokenizer = tiny_tokenizer()
    engine = FakeEngine(
        policy=scripted(tokenizer, persistent(arguments.turns, arguments.before)),
        stop_token_ids=[tokenizer.eos_token_id],
        weight_version=arguments.version,
        latency_s=lambda index: arguments.latency + arguments.jitter * index,
        max_num_seqs=1024,
    )
    async with serving(FakeVllm(engine), port=arguments.port) as url:
        print(re.sub(r".*:", "", url), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
