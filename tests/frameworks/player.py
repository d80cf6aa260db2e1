"""Plays episodes in a framework's own environment: `python player.py SNIPPET`, where there is no Slipstream.

Reads a line of JSON for each episode, `[[base_url, api_key, model, temperature], {column: value}]`, and writes a line
with what the snippet's `agent` returned, or with the error that it raised.
"""

import asyncio
import inspect
import json
import runpy
import sys
import traceback
from types import SimpleNamespace


async def play(agent, endpoint, columns):
    base_url, api_key, model, temperature = endpoint
    root = base_url.removesuffix("/v1")
    given = SimpleNamespace(
        base_url=base_url, anthropic_base_url=root, api_key=api_key, model=model, temperature=temperature
    )
    found = agent(endpoint=given, **columns)
    return await found if inspect.isawaitable(found) else found


async def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    agent = runpy.run_path(sys.argv[1])["agent"]
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = {"returned": await play(agent, *json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), file=answers, flush=True)


asyncio.run(main())
